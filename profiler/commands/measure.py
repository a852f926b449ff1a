"""`muri profile run`: measures a script for the store, its stages or how many CPUs and how much memory it needs."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from muri.clock import now_text
from muri.profiler.commands.stored import (
    console,
    echo_json,
    json_option,
    open_store,
    refuse_unwritable,
    store_option,
    user_option,
)
from muri.profiler.dryrun.messages import DEFAULT_ITERATIONS, DEFAULT_STEADY_S, DryRunResult, Limits
from muri.profiler.dryrun.runner import Progress, check_command, measure_script
from muri.profiler.dryrun.steadiness import HALF_WINDOW
from muri.profiler.exchange import to_dict
from muri.profiler.lookup import of_command
from muri.profiler.records import ProfileKey, StageProfile, owned_name
from muri.profiler.sensitivity import SENSITIVITIES, Measured, SensitivityProfile, bisect
from muri.profiler.sweep import MEMORY_KEYS, STEADY_S, MemoryAxis, ScriptMeter, cores, overlap_seen, usable_cpus

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

READING_SHARE: Final = 0.1
"""A loop that waits for its data for a larger share of the iteration probably reads from storage."""

UNSEEN_OVERLAP: Final = (
    "the dry run saw no reading behind other work, so the loop is taken to wait for each batch. If the script marks "
    "its stages itself and its loader has workers, give --memory overlap=1"
)


@click.command(
    "run",
    short_help="Measure a script in a dry run and store its profile.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--model", help="Name of the model.  [default: the script's name and a fingerprint of it]")
@click.option("--batch-size", type=click.IntRange(0), default=0, help="Samples per iteration and GPU (0: not known).")
@click.option("--gpus", "gpu_count", type=click.IntRange(1), default=1, show_default=True, help="GPUs it runs on.")
@click.option("--gpu-type", default="gpu", show_default=True, help="GRES type of the GPUs, as Slurm names it.")
@user_option("Whose jobs it serves.  [default: all users']")
@click.option(
    "--iterations",
    type=click.IntRange(2 * HALF_WINDOW),
    default=DEFAULT_ITERATIONS,
    show_default=True,
    help="Measure at most so many.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help=f"Measure at most so long, once it has warmed up.  [default: {DEFAULT_STEADY_S:g}; of a sweep {STEADY_S:g}]",
)
@click.option("--no-store", is_flag=True, help="Only print the profile.")
@click.option("--sweep", is_flag=True, help="Find the least CPUs and memory that saturate SCRIPT instead.")
@click.option("--max-cpus", type=click.IntRange(1), help="Of a sweep: greatest CPU count.  [default: all here]")
@click.option("--no-pin", is_flag=True, help="Of a sweep: only tell SCRIPT the count, where others do the work.")
@click.option("--memory", metavar="KEY=VALUE,...", help=f"Of a sweep, for its memory: {', '.join(MEMORY_KEYS)}.")
@store_option
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGUMENTS]...")
def run_command(
    command: tuple[str, ...], no_store: bool, sweep: bool, store_path: Path | None, as_json: bool,
    **asked: Any,
) -> None:  # fmt: skip
    """Measure SCRIPT by its first iterations, end it, and store its profile.

    The script runs until it has warmed up and its mean times are known within 5 %: usually 10 to 40
    iterations. Nothing after them is executed. Its output is hidden; if it fails, its last line is shown.

    --sweep measures the throughput on different CPU counts instead, by bisection, in at most 8
    measurements. CPU affinity enforces each count; the script's threads follow, and {cpus} in its
    arguments stands for the count. The memory axis is computed from the size of the dataset, the
    bandwidth of its storage, and the bytes that an iteration reads; `muri profile show` shows the result.

    \b
    Examples:
      muri profile run -- train.py --lr 0.1
      muri profile run --model resnet18 --batch-size 64 -- train.py --batch 64
      muri profile run --model bert --gpus 2 --gpu-type a100 -- -m my.training
      muri profile run --sweep -- train.py --workers {cpus}
      muri profile run --sweep --memory dataset=/data/imagenet,batch-mib=28 \\
        -- train.py --workers {cpus}
    """
    if sweep:
        found = _run_sweep(command, asked, store_path)
        if as_json:
            echo_json(found.to_json())
            return
        from muri.profiler.render import print_sensitivity

        print_sensitivity(console(), found)
        return
    if asked["max_cpus"] or asked["no_pin"] or asked["memory"]:
        raise click.UsageError("--max-cpus, --no-pin and --memory need --sweep")
    check_command(command)
    model = asked["model"] or of_command(command)
    key = ProfileKey(model, asked["batch_size"], asked["gpu_count"], asked["gpu_type"], asked["user"] or "")
    if not no_store:
        refuse_unwritable(store_path)
    result = _measure_profile(command, Limits(asked["iterations"], asked["seconds"] or DEFAULT_STEADY_S))
    profile = result.profile(key, now_text())
    history: tuple[StageProfile, ...] = (profile,)
    if not no_store:
        with open_store(store_path) as store:
            store.put(profile)
            history = tuple(store.history(key))
    _show_profile(profile, history, result.stopped, stored=not no_store, as_json=as_json)


def _measure_profile(command: tuple[str, ...], limits: Limits) -> DryRunResult:
    try:
        with _progress(" ".join(command[:2] if command[0] == "-m" else command[:1])) as tell:
            return measure_script(command, limits=limits, on_progress=tell)
    except KeyboardInterrupt:
        click.echo("Interrupted; the script was ended and nothing was stored.", err=True)
        sys.exit(INTERRUPTED)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[Progress], None]]:
    """Say on stderr how far the script is; on a terminal one line changes."""
    from rich.console import Console  # rich takes a while to load

    terminal = Console(stderr=True, highlight=False)
    if not terminal.is_terminal:
        click.echo(f"measuring {name}", err=True)
    with terminal.status(f"{name} starts") as line:

        def tell(progress: Progress) -> None:
            measured = progress["measured"]
            line.update(f"{name}: {measured} iterations measured" if measured else f"{name}: warming up")

        yield tell


def _show_profile(
    profile: StageProfile, history: tuple[StageProfile, ...], stopped: str, *, stored: bool, as_json: bool
) -> None:
    if as_json:
        echo_json(to_dict(profile) | {"stopped": stopped, "stored": stored})
        return
    from muri.profiler.render import print_profile

    print_profile(console(), history, datetime.now(UTC))
    click.echo(f"{'stopped because:':<21} {stopped}")
    if not stored:
        click.echo("Not stored.")


def _run_sweep(command: tuple[str, ...], asked: Mapping[str, Any], store_path: Path | None) -> SensitivityProfile:
    """Measure and store the sensitivity that the options ask for (SensitivityError: the sweep cannot be made)."""
    words = command[1:] if command[:1] == ("-m",) else command
    model = asked["model"] or (words[0] if words is not command else Path(words[0]).stem)
    greatest = asked["max_cpus"] or usable_cpus()
    if not asked["no_pin"]:
        cores(greatest)  # refuses a count that the machine lacks before anything is measured
    axis = MemoryAxis.from_words(asked["memory"]) if asked["memory"] else None
    refuse_unwritable(store_path)
    dataset = None if axis is None else axis.measure()
    if dataset is not None:
        click.echo(f"storage: {dataset.storage_mib_per_s:.4g} MiB/s, {dataset.dataset_gib:.4g} GiB", err=True)
    meter = ScriptMeter(command, not asked["no_pin"], asked["seconds"] or STEADY_S, _tell)
    cpu = bisect(meter, greatest)
    seen = meter.dry_run(cpu.saturating_cpus)
    if axis is not None and dataset is not None:
        dataset = axis.with_overlap(dataset, overlap_seen(seen))
        _warn(seen, unseen=dataset.overlap == 0 and axis.overlap is None)
    name = owned_name(model, asked["user"] or "")
    found = SensitivityProfile(name, now_text(), cpu, meter.pinned, dataset, seen.detail.host_mem_gib)
    with open_store(store_path) as store:
        store.put_document(SENSITIVITIES, found.to_document())
    return found


def _warn(seen: DryRunResult, *, unseen: bool) -> None:
    share = seen.stage_s[0] / seen.iteration_s
    if share > READING_SHARE:
        click.echo(
            f"muri: the loop waited for its data for {share:.0%} of an iteration. If that came from storage, the "
            "throughput is not that at full memory: run the script once before, so that the page cache has the data",
            err=True,
        )
    if unseen:
        click.echo(f"muri: {UNSEEN_OVERLAP}", err=True)


def _tell(cpus: int, measured: Measured) -> None:
    count, scatter = f"{cpus:>4} {'CPU: ' if cpus == 1 else 'CPUs:'}", f"± {measured.spread * 100:.1f} %"
    click.echo(f"{count} {measured.throughput:.4g} iterations/s {scatter}", err=True)
