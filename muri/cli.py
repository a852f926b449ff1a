"""The command `muri`: a table of sub-commands, each imported only when it is called."""

import os
import sys
from pathlib import Path
from typing import Any, Final

import click

from muri import __version__
from muri.commands import LazyCommand, LazyGroup, NoSuchCommandError, run_command
from muri.errors import UsageError
from muri.text import yaml_of

COMMANDS = {
    "run": LazyCommand("muri.launcher.run.command:run", "Run a training script; inside a group, interleave it."),
    "queue": LazyCommand("muri.slurm_plugin.cli.look:queue", "Show each Muri job: state, partners, speed."),
    "top": LazyCommand("muri.launcher.run.top:top", "Watch the groups on this node, live."),
    "explain": LazyCommand("muri.slurm_plugin.cli.look:explain", "Say why a job waits, or why it has its partners."),
    "report": LazyCommand("muri.slurm_plugin.cli.report:report", "Say what sharing did for a job, or in a month."),
    "plan": LazyCommand("muri.slurm_plugin.cli.look:plan", "Save queue and nodes, or print the plan for them."),
    "preempt": LazyCommand("muri.slurm_plugin.cli.admin:preempt", "Stop a running job that has a checkpoint."),
    "drain": LazyCommand(
        "muri.slurm_plugin.cli.admin:drain", "Let Slurm start every waiting job as its user submitted it."
    ),
    "profile": LazyCommand("muri.profiler.commands:profile", "List, show, move and remove stage profiles."),
    "trace": LazyCommand("muri.simulator.commands:trace", "Import, generate and check traces to simulate."),
    "policies": LazyCommand("muri.slurm_plugin.cli.look:policies", "List the policies and what each one does."),
    "simulate": LazyCommand("muri.simulator.commands:simulate", "Say what policies would do to a trace's jobs."),
    "doctor": LazyCommand("muri.slurm_plugin.cli.doctor:doctor", "Examine what Muri needs; say what to do."),
    "config": LazyCommand("muri.slurm_plugin.cli.admin:config", "Check the configuration file, and show it."),
}

REMOVED: Final = {
    "run --accumulate": "let the script call muri.accumulate() (docs/scripts.md)",
    "timeline": "open the trace in https://ui.perfetto.dev",
    "snapshot": "use `muri plan --save FILE`",
    "config show": "use `muri config check --show`",
    "completion": "click has it: `_MURI_COMPLETE=bash_source muri` prints the script for bash, likewise zsh and fish",
    "controller": "use `muri-controller`",
    "setup": "`muri doctor` prints the lines that Slurm's files lack; before a removal use `muri drain --forget`",
    "profile compare": "use `muri profile show` for each of them",
    "profile sensitivity": "use `muri profile run --sweep`; `muri profile show` shows what was measured",
    "profile bandwidth": "nccl-tests measures an all-reduce; what 0.2 has measured still counts",
    "profile edit": "use `muri profile set MODEL load_ms=120`",
    "profile audit": "a profile's history is in `muri profile show`",
    "profile stale": "`muri profile list` says what is stale; after `muri profile rm` a model is measured again",
    "profile stats": "use `muri profile list`; of a damaged store `muri doctor` tells",
    "profile unpublish": "use `muri profile publish --withdraw`",
    "profile predict": "the lab has `muri-lab predict` (pip install ./lab)",
    "profile pair": "the lab has `muri-lab pair` (pip install ./lab)",
    "profile fit": "the lab has `muri-lab fit` (pip install ./lab)",
    "profile fit-slowdown": "the lab has `muri-lab slowdown` (pip install ./lab)",
    "profile list --reverse": "use --json with jq",
    "profile list --batch-size": "use --json with jq",
    "profile list --gpus": "use --json with jq",
    "profile list --source": "use --json with jq",
    "profile list --bottleneck": "use --sort bottleneck, or --json with jq",
    "profile list --stale": "`muri profile list` says below its table what is stale, and why",
    "profile export -o": "it prints: use `> FILE`",
    "profile export --output": "it prints: use `> FILE`",
    "profile import --json": "it prints one line",
    "profile publish --json": "it prints a line for each profile",
    "preempt --json": "its exit code says what became of it",
    "trace show": "use `muri trace check`",
    "report --since": "use --month",
    "report --until": "use --month",
    "report --account": "use --json with jq: each record names its account",
    "report --csv": "use --json with jq: `jq -r '.[] | [.job_id, .gpu_s] | @csv'`",
    "top --interval": "status files are written, and looked at, every second",
    "doctor --nodes": "try a node with a job: `srun --nodelist=NODE --muri=model=x muri --version`",
    "doctor --try": "submit two jobs with --muri, and look at them with `muri queue`",
    "simulate --experiment": "use `muri-lab experiment NAME` (pip install ./lab)",
    "simulate --traces": "use `muri-lab experiment NAME --traces DIR` (pip install ./lab)",
    **{f"simulate --{option}": f"use `muri-lab sweep --{option}` (pip install ./lab)" for option in (
        "profiling-s", "profile-noise", "no-checkpoints", "any-user", "interference", "slowdown", "outage", "seed",
        "steady-state", "check", "format", "skip-bad-rows", "jobs", "executor", "slurm-option", "out",
    )},
}  # fmt: skip
"""Commands, and options behind their command's name, that 0.2 had: what to do instead."""

_DEFAULT_CONFIG: Final = "/etc/muri/muri.yaml"


def site_state_dir() -> str | None:
    """The controller's state_dir, so that `muri profile` and the controller use the same store.

    Only that key is read, without the configuration's model, which takes long to load, and whatever else is wrong in
    the file. `muri config check` judges it.
    """
    try:
        config = yaml_of(Path(os.environ.get("MURI_CONFIG") or _DEFAULT_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = config.get("state_dir") if isinstance(config, dict) else None
    return value if isinstance(value, str) else None


class _Muri(LazyGroup):
    """The command itself, which names the replacement of a removed command or option."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; say what replaces a removed one."""
        try:
            return super().invoke(ctx)
        except (click.NoSuchOption, NoSuchCommandError) as error:
            words, at = [error.name if isinstance(error, NoSuchCommandError) else error.option_name], error.ctx
            while at is not None and at.parent is not None:
                words, at = [at.info_name or "", *words], at.parent
            name = " ".join(words)
            if name not in REMOVED:
                raise
            raise UsageError(f"`muri {name}` was removed in 0.3: {REMOVED[name]}") from None


@click.group(
    cls=_Muri,
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
