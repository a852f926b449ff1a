"""What `muri doctor` finds out by taking a job's real way: submission, job_submit, Slurm's changes, compute nodes."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ClusterShell.NodeSet import NodeSet

from muri.errors import MuriError, UsageError
from muri.slurm_plugin.cli.doctor_checks import Finding, Level
from muri.slurm_plugin.cli.member_trial import MARK, examine_members
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.gpu_removal_file import read_gpu_removal
from muri.slurm_plugin.gateway.base import (
    Gateway,
    GatewayError,
    GatewayUnavailableError,
    SlurmUnreachableError,
    first_line,
)
from muri.slurm_plugin.gateway.gpu_removal import (
    PROBE_NAME,
    cancelled_afterwards,
    place_for,
    submit_probe,
    try_every_form,
)
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.cluster import Node, Snapshot
from muri.slurm_plugin.records.comment_tags import GATE_PREFIX, REQUEST_PREFIX, token
from muri.slurm_plugin.records.gpu_removal import PER_NODE, Place, TriedForm

_SPANK: Final = "SPANK plugin"
_TAKING: Final = "members' GPUs"
_SUBMIT: Final = "job_submit"
_MOST_SKEW_S: Final = 5.0

_LOOK: Final = """\
echo "time $(date +%s.%N)"
echo "mark ${MURI_JOB-}"
echo "muri $(muri --version 2>&1 | head -n 1)"
echo "run_dir $(stat -c '%u %a' "/run/muri/$(id -u)" 2>&1)"
echo "devices $(ls /dev/nvidia[0-9]* 2>/dev/null | wc -l)"
echo "commands $(for name in squeue scontrol srun; do command -v "$name"; done | wc -l)"
"""


def examine_submission(commands: SlurmCommands) -> Finding | None:
    """Whether sbatch knows --muri on this machine; None where there is no sbatch."""
    try:
        text = commands.run("read sbatch's help", ["sbatch", "--help"])
    except GatewayUnavailableError:
        return None
    except MuriError as error:
        return Finding(_SPANK, Level.PROBLEM, str(error))
    if "--muri" in text:
        return Finding(_SPANK, Level.OK, "sbatch on this machine knows --muri")
    remedy = "install muri_spank.so and name it in plugstack.conf on each machine that submits: `muri setup --check`"
    return Finding(_SPANK, Level.PROBLEM, "sbatch on this machine does not know --muri", remedy)


def examine_real_path(
    config: Config, snapshot: Snapshot, gateway: Gateway, commands: SlurmCommands
) -> Iterator[Finding]:
    """What becomes of a job; root tries it with held jobs that are cancelled again, others see what is known."""
    place = place_for(snapshot.nodes, config.partitions, snapshot.limits)
    if place is None:
        yield Finding(
            _TAKING, Level.WARNING, "no node with GPUs is in a partition that Muri serves", "see `partitions`"
        )
    elif os.geteuid() == 0:
        yield _examine_job_submit(config, place, commands)
        yield from _examine_members(config, place, snapshot, gateway, commands)
    else:
        yield judge_removal(read_gpu_removal(config.state_dir).forms)


def _examine_members(
    config: Config, place: Place, snapshot: Snapshot, gateway: Gateway, commands: SlurmCommands
) -> Iterator[Finding]:
    try:
        forms = try_every_form(commands, place)
    except MuriError as error:
        yield Finding(_TAKING, Level.PROBLEM, f"it cannot be tried whether they can be taken away: {error}")
        return
    known = read_gpu_removal(config.state_dir).forms
    if known and not any(each.conclusive for each in forms):  # root may not submit: the controller has, as a user
        yield judge_removal(known)
        return
    yield judge_removal(forms)
    yield from examine_members(snapshot, config.partitions, forms, gateway, commands)


def judge_removal(forms: Sequence[TriedForm]) -> Finding:
    """Judge in which form of request a waiting job's GPUs can be taken away, which a group needs."""
    if not forms:
        return Finding(_TAKING, Level.WARNING, "not tried yet", "run this as root")
    taken = [form.form for form in forms if form.request]
    kept = [form.form for form in forms if not form.request]
    alone = f"; jobs with {', '.join(kept)} run alone" if kept else ""
    if taken:
        return Finding(_TAKING, Level.OK, f"can be taken away where asked for by {', '.join(taken)}{alone}")
    why = next((form.why for form in forms if form.form == PER_NODE), forms[0].why)
    remedy = "add the GRES muri (`muri setup --check` shows how); Slurm 22.05 cannot do it in any way"
    return Finding(_TAKING, Level.PROBLEM, f"no group can form: Slurm cannot take them away ({why})", remedy)


def _examine_job_submit(config: Config, place: Place, commands: SlurmCommands) -> Finding:
    try:
        job_id = submit_probe(commands, "--gres=gpu:1", f"--partition={place.partition}", MARK)
    except SlurmUnreachableError as error:
        return Finding(_SUBMIT, Level.PROBLEM, str(error))
    except (GatewayError, ValueError) as error:
        return Finding(_SUBMIT, Level.WARNING, f"root may not submit to {place.partition} with --muri: {error}")
    with cancelled_afterwards(commands, job_id):
        text = commands.run(f"look at job {job_id}", ["scontrol", "--oneliner", "show", "job", str(job_id)])
    comment = re.search(r"\bAdminComment=(.*?)(?= [A-Z]\w+=|$)", text)
    return judge_job_submit(comment[1] if comment else "", config)


def judge_job_submit(admin_comment: str, config: Config) -> Finding:
    """Judge what job_submit wrote into a job that was submitted with --muri.

    Args:
        admin_comment: The job's AdminComment.
        config: Which gate is wanted.
    """
    gate = token(admin_comment, GATE_PREFIX)
    if token(admin_comment, REQUEST_PREFIX) is None:
        remedy = "JobSubmitPlugins=lua, and a call of muri.submit in job_submit.lua: `muri setup --check` shows both"
        return Finding(_SUBMIT, Level.PROBLEM, "jobs with --muri are not tagged: they start as ordinary jobs", remedy)
    if gate == "open":
        text = "jobs with --muri are tagged; no controller is at work, so they start as ordinary jobs"
        return Finding(_SUBMIT, Level.WARNING, text, "start the controller: systemctl status muri-controller.timer")
    if (gate == "hold") != (config.gate == "hold"):
        remedy = 'set muri.gate in job_submit.lua ("licence" or "hold") and gate in muri.yaml alike'
        return Finding(_SUBMIT, Level.PROBLEM, f"job_submit keeps jobs by {gate}, muri.yaml by {config.gate}", remedy)
    return Finding(_SUBMIT, Level.OK, f"jobs with --muri are tagged and kept waiting by {gate}")


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a job on a node told.

    Attributes:
        node: Its name.
        facts: What was printed, by name.
        before_s: This machine's time before, in seconds since the epoch.
        after_s: The same afterwards.
    """

    node: str
    facts: Mapping[str, str]
    before_s: float
    after_s: float

    @property
    def skew_s(self) -> float:
        """How far the node's clock is off, at least."""
        told_s = float(self.facts.get("time") or self.before_s)
        return max(self.before_s - told_s, told_s - self.after_s, 0.0)


def examine_nodes(names: str, config: Config, snapshot: Snapshot, commands: SlurmCommands) -> Iterator[Finding]:
    """Run a job of a second on each node and see what a member would find there.

    Args:
        names: Folded host list, or "all" for the nodes with GPUs that Muri serves.
        config: The configuration.
        snapshot: The nodes.
        commands: How commands are run.

    Raises:
        UsageError: A node does not exist, or Muri does not serve it.
    """
    served = {node.name: place for node in snapshot.nodes if (place := place_for((node,), config.partitions))}
    wanted = sorted(served) if names == "all" else list(NodeSet(names))
    if unknown := [name for name in wanted if name not in served]:
        raise UsageError(
            f"{', '.join(unknown)}: no node with GPUs that Muri serves; those are {NodeSet.fromlist(served)}"
        )
    nodes = {node.name: node for node in snapshot.nodes}
    for name in wanted:
        yield _examine_node(nodes[name], served[name].partition, commands)


def _examine_node(node: Node, partition: str, commands: SlurmCommands) -> Finding:
    title = f"node {node.name}"
    if not node.usable:
        return Finding(title, Level.WARNING, f"not examined: it is {node.state}")
    arguments = [
        "srun", "--quiet", f"--nodelist={node.name}", f"--partition={partition}", "--ntasks=1", "--time=1", "--mem=1",
        "--immediate=20", "--chdir=/", f"--job-name={PROBE_NAME}", MARK, "/bin/sh", "-c", _LOOK,
    ]  # fmt: skip
    before_s = time.time()
    try:
        text = commands.run(f"run a job on {node.name}", arguments)
    except MuriError as error:
        remedy = "nothing, if it is full or reserved; else see what Slurm says"
        return Finding(title, Level.WARNING, f"not examined: {first_line(str(error))}", remedy)
    facts = dict(line.partition(" ")[::2] for line in text.splitlines())
    return judge_node(NodeReport(node.name, facts, before_s, time.time()))


def judge_node(report: NodeReport) -> Finding:
    """Judge what a member would find on a node."""
    title = f"node {report.node}"
    faults = {
        "the SPANK plugin does not work there": not report.facts.get("mark"),
        f"`muri` cannot be run there ({report.facts.get('muri', '')})": "version" not in report.facts.get("muri", ""),
        "Slurm's commands are not in PATH there": report.facts.get("commands") != "3",
        "there is no run directory of root's making": not re.fullmatch(r"\d+ 700", report.facts.get("run_dir", "")),
        f"its clock is {report.skew_s:.0f} s off": report.skew_s > _MOST_SKEW_S,
    }
    if found := [fault for fault, there in faults.items() if there]:
        remedy = "install the package muri-node and the SPANK plugin there; docs/install.md"
        return Finding(title, Level.PROBLEM, "; ".join(found), remedy)
    devices = f"{report.facts.get('devices', '0')} NVIDIA devices"
    return Finding(title, Level.OK, f"{report.facts['muri']}, SPANK plugin, run directory, clock, {devices}")
