"""The command `muri`: a table of sub-commands, each imported only when it is called."""

import os
import sys
from pathlib import Path
from typing import Final

import click

from muri import __version__
from muri.commands import LazyCommand, LazyGroup, run_command
from muri.foreign_yaml import yaml_of

COMMANDS = {
    "run": LazyCommand("muri.launcher.run.command:run", "Run a training script; inside a group, interleave it."),
    "queue": LazyCommand("muri.slurm_plugin.cli.look:queue", "Show each Muri job: state, partners, speed."),
    "top": LazyCommand("muri.launcher.telemetry.top:top", "Watch the groups on this node, live."),
    "timeline": LazyCommand("muri.launcher.telemetry.timeline:timeline", "Draw a trace: who held which resource when."),
    "explain": LazyCommand("muri.slurm_plugin.cli.look:explain", "Say why a job waits or whom it runs with."),
    "report": LazyCommand("muri.slurm_plugin.cli.report:report", "Say what sharing did for a job, or in a month."),
    "plan": LazyCommand("muri.slurm_plugin.cli.look:plan", "Print the plan for a snapshot without acting on it."),
    "snapshot": LazyCommand("muri.slurm_plugin.cli.look:snapshot", "Print queue and nodes as JSON, for replay."),
    "preempt": LazyCommand("muri.slurm_plugin.cli.admin:preempt", "Stop a running job that has a checkpoint."),
    "drain": LazyCommand(
        "muri.slurm_plugin.cli.admin:drain", "Let Slurm start every waiting job as its user submitted it."
    ),
    "profile": LazyCommand("muri.profiler.commands:profile", "List, show, move and remove stage profiles."),
    "trace": LazyCommand(
        "muri.simulator.cli.trace_command:trace", "Import, generate, show and check traces to simulate."
    ),
    "policies": LazyCommand("muri.slurm_plugin.cli.look:policies", "List the policies and what each one does."),
    "simulate": LazyCommand(
        "muri.simulator.cli.simulate_command:simulate", "Say what policies would do to a trace's jobs."
    ),
    "doctor": LazyCommand("muri.slurm_plugin.cli.doctor:doctor", "Examine what Muri needs; say what to do."),
    "setup": LazyCommand("muri.slurm_plugin.cli.setup:setup", "Bring Slurm's files to what Muri needs, or back."),
    "config": LazyCommand("muri.slurm_plugin.cli.admin:config", "Show or check the configuration file."),
    "completion": LazyCommand("muri.completion:completion", "Print the completion script for a shell."),
    "controller": LazyCommand("muri.slurm_plugin.cli.admin:controller", "Run the controller (as muri-controller)."),
}


_DEFAULT_CONFIG: Final = "/etc/muri/muri.yaml"


def site_state_dir() -> str | None:
    """The controller's state_dir, so that `muri profile` and the controller mean the same store.

    Only that key is read, without the configuration's model: that takes long to load, and a fault elsewhere in the
    file must not keep users from their profiles. `muri config check` judges the file.
    """
    try:
        config = yaml_of(Path(os.environ.get("MURI_CONFIG") or _DEFAULT_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = config.get("state_dir") if isinstance(config, dict) else None
    return value if isinstance(value, str) else None


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    # Commands find the object in their context, also when a shell asks for completions and none of them runs.
    context_settings={"help_option_names": ["-h", "--help"], "obj": site_state_dir},
    epilog="Submit with `sbatch --muri=model=resnet18,batch-size=64 train.sh`, where train.sh calls "
    "`muri run train.py`. Each command's --help shows examples.",
)
@click.version_option(__version__, prog_name="muri")
def cli() -> None:
    """Interleave training jobs that wait for different resources on the same GPUs."""


def main() -> None:
    """Entry point of the console script `muri`."""
    sys.exit(run_command(cli))
