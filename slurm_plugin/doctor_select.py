"""Whether Slurm hands out CPUs and memory at all: without, shares that a policy plans are figures on paper."""

import re

from muri.errors import MuriError
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.doctor_checks import Finding, Level
from muri.slurm_plugin.slurm_commands import SlurmCommands

_NAME = "CPUs and memory"


def examine_select(config: Config, commands: SlurmCommands | None = None) -> Finding | None:
    """Look at how Slurm allocates; None where Slurm cannot be asked, which other findings say."""
    try:
        text = (commands or SlurmCommands()).run("read the configuration", ["scontrol", "show", "config"])
    except MuriError:
        return None
    return judge_select(text, config)


def judge_select(text: str, config: Config) -> Finding | None:
    """Judge the text of `scontrol show config`; None where it doesn't tell, or nothing is to be given out.

    Args:
        text: What scontrol printed.
        config: What of jobs' requests may be changed.
    """
    settings = dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, flags=re.MULTILINE))
    kind, parameters = settings.get("SelectType", ""), settings.get("SelectTypeParameters", "").upper()
    allocation = config.allocation
    if not kind or allocation.cpus == allocation.memory == "off":
        return None
    shown = f"{kind} with {parameters or 'no parameters'}"
    if "cons_" not in kind:
        remedy = "SelectType=select/cons_tres with CR_Core_Memory, or allocation.cpus and allocation.memory: off"
        return Finding(_NAME, Level.WARNING, f"Slurm gives out whole nodes ({shown})", remedy)
    lacking = []
    if allocation.cpus != "off" and not re.search(r"CR_(CPU|CORE|SOCKET)", parameters):
        lacking.append("CPUs")
    if allocation.memory != "off" and "MEMORY" not in parameters:
        lacking.append("memory")
    if not lacking:
        return Finding(_NAME, Level.OK, f"given out by Slurm: {shown}")
    remedy = "SelectTypeParameters=CR_Core_Memory makes what a policy plans of them real"
    return Finding(_NAME, Level.WARNING, f"Slurm does not count {' and '.join(lacking)} ({shown})", remedy)
