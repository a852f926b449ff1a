"""`muri profile run`."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

import click

from muri.profiler.commands.options import console, json_option, open_store, store_option
from muri.profiler.dryrun.request import DEFAULT_ITERATIONS, DEFAULT_STEADY_S, Limits
from muri.profiler.dryrun.steadiness import HALF_WINDOW
from muri.profiler.exchange import to_dict
from muri.profiler.fingerprint import of_command
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.times import now_text

if TYPE_CHECKING:
    from muri.profiler.dryrun.runner import DryRunResult, Progress

INTERRUPTED: Final = 130


class Asked(TypedDict):
    """The options that say what is measured and how long."""

    model: str | None
    batch_size: int
    gpu_count: int
    gpu_type: str
    iterations: int
    seconds: float


@click.command(
    "run",
    short_help="Measure a script in a dry run and store its profile.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--model", help="Name of the model.  [default: the script's name and a fingerprint of it]")
@click.option("--batch-size", type=click.IntRange(0), default=0, help="Samples per iteration and GPU (0: not known).")
@click.option("--gpus", "gpu_count", type=click.IntRange(1), default=1, show_default=True, help="GPUs it runs on.")
@click.option("--gpu-type", default="gpu", show_default=True, help="GRES type of the GPUs, as Slurm names it.")
@click.option(
    "--iterations",
    type=click.IntRange(2 * HALF_WINDOW),
    default=DEFAULT_ITERATIONS,
    show_default=True,
    help="Most to measure.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_STEADY_S,
    show_default=True,
    help="Most to measure for, once it has warmed up.",
)
@click.option("--no-store", is_flag=True, help="Only print the profile.")
@store_option
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGUMENTS]...")
def run_command(
    command: tuple[str, ...], no_store: bool, store_path: Path | None, as_json: bool, **asked: Unpack[Asked]
) -> None:
    """Measure SCRIPT by its first iterations, end it, and store what was found.

    It runs until it has warmed up and the mean times are sure within 5 %: usually 10 to 40 iterations.
    Nothing after them is executed. Its output is kept back; where it fails, its last words are shown.

    \b
    Examples:
      muri profile run -- train.py --lr 0.1
      muri profile run --model resnet18 --batch-size 64 -- train.py --batch 64
      muri profile run --model bert --gpus 2 --gpu-type a100 -- -m my.training
      muri profile run --no-store --json -- train.py | jq .propagate_s
    """
    from muri.profiler.dryrun.runner import check_command  # -- only when needed

    check_command(command)
    model = asked["model"] or of_command(command)
    key = ProfileKey(model, asked["batch_size"], asked["gpu_count"], asked["gpu_type"])
    if not no_store:
        with open_store(store_path):  # before the measurement: who may not write need not wait for it
            pass
    result = _measure(command, Limits(asked["iterations"], asked["seconds"]))
    profile = result.profile(key, now_text())
    history: tuple[StageProfile, ...] = (profile,)
    if not no_store:
        with open_store(store_path) as store:
            store.put(profile)
            history = tuple(store.history(key))
    _show(profile, history, result.stopped, stored=not no_store, as_json=as_json)


def _measure(command: tuple[str, ...], limits: Limits) -> "DryRunResult":
    from muri.profiler.dryrun.runner import measure_script  # -- only when needed

    try:
        with _progress(" ".join(command[:2] if command[0] == "-m" else command[:1])) as tell:
            return measure_script(command, limits=limits, on_progress=tell)
    except KeyboardInterrupt:
        click.echo("Interrupted; the script was ended and nothing was stored.", err=True)
        sys.exit(INTERRUPTED)


@contextmanager
def _progress(name: str) -> "Iterator[Callable[[Progress], None]]":
    """Says on stderr how far the script is; a terminal sees one line that changes."""
    from rich.console import Console  # -- rich takes a while to load

    terminal = Console(stderr=True, highlight=False)
    if not terminal.is_terminal:
        click.echo(f"measuring {name}", err=True)
    with terminal.status(f"{name} starts") as line:

        def tell(progress: "Progress") -> None:
            measured = progress["measured"]
            line.update(f"{name}: {measured} iterations measured" if measured else f"{name}: warming up")

        yield tell


def _show(
    profile: StageProfile, history: tuple[StageProfile, ...], stopped: str, *, stored: bool, as_json: bool
) -> None:
    if as_json:
        click.echo(json.dumps(to_dict(profile) | {"stopped": stopped, "stored": stored}, indent=2, ensure_ascii=False))
        return
    from muri.profiler.render_profile import print_profile  # -- rich takes a while to load

    print_profile(console(), history, datetime.now(UTC))
    click.echo(f"{'stopped because:':<21} {stopped}")
    if not stored:
        click.echo("Not stored.")
