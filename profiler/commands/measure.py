"""Commands that measure for the store: `muri profile run`, `sensitivity` and `bandwidth`."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

import click

from muri.profiler.allreduce import (
    BANDWIDTH_KIND,
    AllReduceError,
    Bandwidth,
    Timing,
    bandwidths,
    fit,
    measure_on_this_node,
    ring_s,
    step_of,
    time_all_reduce,
    usable_backend,
)
from muri.profiler.commands.options import (
    console,
    echo_json,
    json_option,
    open_store,
    read_if_any,
    refuse_unwritable,
    store_option,
    user_option,
)
from muri.profiler.dryrun.messages import DEFAULT_ITERATIONS, DEFAULT_STEADY_S, DryRunResult, Limits
from muri.profiler.dryrun.runner import Progress, check_command, measure_script
from muri.profiler.dryrun.steadiness import HALF_WINDOW
from muri.profiler.errors import SensitivityError
from muri.profiler.exchange import to_dict
from muri.profiler.lookup import of_command
from muri.profiler.records import ProfileKey, StageProfile, owned_name
from muri.profiler.sensitivity.bisection import Measured, bisect
from muri.profiler.sensitivity.memory_axis import Dataset, MemoryAxis
from muri.profiler.sensitivity.record import KIND as SENSITIVITY_KIND
from muri.profiler.sensitivity.record import SensitivityProfile, stored
from muri.profiler.sensitivity.throughput import STEADY_S, ScriptMeter, cores, overlap_seen, usable_cpus
from muri.utc import now_text

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

READING_SHARE: Final = 0.1
"""A loop that waits for its data for a larger share of the iteration probably reads from storage."""

UNSEEN_OVERLAP: Final = (
    "the dry run saw no reading behind other work, so the loop is taken to wait for each batch. If the script marks "
    "its stages itself and its loader has workers, give --overlap 1"
)


class RunOptions(TypedDict):
    """The options that say what is measured, for whom, and how long."""

    user: str | None
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
    default=DEFAULT_STEADY_S,
    show_default=True,
    help="Measure at most so long, once the script has warmed up.",
)
@click.option("--no-store", is_flag=True, help="Only print the profile.")
@store_option
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGUMENTS]...")
def run_command(
    command: tuple[str, ...], no_store: bool, store_path: Path | None, as_json: bool, **asked: Unpack[RunOptions]
) -> None:
    """Measure SCRIPT by its first iterations, end it, and store its profile.

    The script runs until it has warmed up and its mean times are known within 5 %: usually 10 to 40
    iterations. Nothing after them is executed. Its output is hidden; if it fails, its last line is shown.

    \b
    Examples:
      muri profile run -- train.py --lr 0.1
      muri profile run --model resnet18 --batch-size 64 -- train.py --batch 64
      muri profile run --model bert --gpus 2 --gpu-type a100 -- -m my.training
      muri profile run --no-store --json -- train.py | jq .propagate_s
    """
    check_command(command)
    model = asked["model"] or of_command(command)
    key = ProfileKey(model, asked["batch_size"], asked["gpu_count"], asked["gpu_type"], asked["user"] or "")
    if not no_store:
        refuse_unwritable(store_path)
    result = _measure_profile(command, Limits(asked["iterations"], asked["seconds"]))
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


@click.command(
    "sensitivity",
    short_help="Find the least CPUs and memory that saturate a script.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGS]...")
@click.option("--model", help="Name under which it is stored.  [default: the script's]")
@user_option("Whose jobs it serves.  [default: all users']")
@click.option("--max-cpus", type=click.IntRange(1), help="Greatest CPU count.  [default: all of this machine]")
@click.option("--no-pin", is_flag=True, help="Only tell the script the count, where the work runs on other machines.")
@click.option("--seconds", type=click.FloatRange(0.1, 60), default=STEADY_S, show_default=True, help="Per measurement.")
@click.option("--dataset", type=click.Path(path_type=Path), help="Its files: their size and bandwidth are measured.")
@click.option("--dataset-gib", type=float, help="Size of the dataset, instead of --dataset.")
@click.option("--storage-mib-per-s", type=float, help="Bandwidth of its storage, instead of measuring it.")
@click.option("--batch-mib", type=float, help="What an iteration reads: batch size × mean size of a sample.")
@click.option("--overlap", type=click.FloatRange(0, 1), help="Share of reading that is hidden.  [default: measured]")
@click.option("--show", metavar="MODEL", help="Show what is stored under MODEL; measure nothing.")
@store_option
@json_option
def sensitivity_command(show: str | None, store_path: Path | None, as_json: bool, **asked: Any) -> None:
    """Measure a script's throughput on different CPU counts, by bisection, in at most 8 measurements.

    CPU affinity enforces each count; the script's threads follow, and {cpus} in its arguments stands
    for the count. The memory axis is computed from the dataset's size, its bandwidth and --batch-mib.

    \b
    Examples:
      muri profile sensitivity -- train.py --workers {cpus}
      muri profile sensitivity --dataset /data/imagenet --batch-mib 28 \\
        -- train.py --workers {cpus}
      muri profile sensitivity --show train
      muri profile sensitivity --show train --json | jq .demand
    """
    request = SensitivityRequest(**asked)
    if show is None:
        found = _measure_sensitivity(request, store_path)
    elif request.command:
        raise SensitivityError("--show measures nothing: leave the script out, or leave --show out")
    else:
        with open_store(store_path, read_only=True) as store:
            found = stored(store, show)
    if as_json:
        echo_json(found.to_json())
        return
    from muri.profiler.render import print_sensitivity

    print_sensitivity(console(), found)


@dataclass(frozen=True, slots=True)
class SensitivityRequest:
    """The options of `muri profile sensitivity`, as click hands them over."""

    command: tuple[str, ...]
    model: str | None
    user: str | None
    max_cpus: int | None
    no_pin: bool
    seconds: float
    dataset: Path | None
    dataset_gib: float | None
    storage_mib_per_s: float | None
    batch_mib: float | None
    overlap: float | None

    @property
    def axis(self) -> MemoryAxis | None:
        """The memory axis that the options mean."""
        return MemoryAxis.from_options(
            self.dataset, self.dataset_gib, self.storage_mib_per_s, self.batch_mib, self.overlap
        )

    @property
    def name(self) -> str:
        """The name under which the result is stored: as given, or the script's or module's.

        Raises:
            SensitivityError: There is no script.
        """
        words = self.command[1:] if self.command[:1] == ("-m",) else self.command
        if not words:
            raise SensitivityError("there is nothing to measure; give a script and its arguments after --")
        model = self.model or (words[0] if words is not self.command else Path(words[0]).stem)
        return owned_name(model, self.user or "")


def _measure_sensitivity(request: SensitivityRequest, store_path: Path | None) -> SensitivityProfile:
    name, axis = request.name, request.axis
    greatest = request.max_cpus or usable_cpus()
    if not request.no_pin:
        cores(greatest)  # refuses a count that the machine lacks before anything is measured
    refuse_unwritable(store_path)
    dataset = None if axis is None else _read_dataset(axis)
    meter = ScriptMeter(request.command, not request.no_pin, request.seconds, _tell)
    cpu = bisect(meter, greatest)
    seen = meter.dry_run(cpu.saturating_cpus)
    if axis is not None and dataset is not None:
        dataset = axis.with_overlap(dataset, overlap_seen(seen))
        _warn_of_reading(seen)
        if dataset.overlap == 0 and axis.overlap is None:
            click.echo(f"muri: {UNSEEN_OVERLAP}", err=True)
    found = SensitivityProfile(name, now_text(), cpu, meter.pinned, dataset, seen.detail.host_mem_gib)
    with open_store(store_path) as store:
        store.put_document(SENSITIVITY_KIND, found.to_document())
    return found


def _read_dataset(axis: MemoryAxis) -> Dataset:
    dataset = axis.measure()
    click.echo(f"storage: {dataset.storage_mib_per_s:.4g} MiB/s, {dataset.dataset_gib:.4g} GiB", err=True)
    return dataset


def _warn_of_reading(seen: DryRunResult) -> None:
    share = seen.stage_s[0] / seen.iteration_s
    if share > READING_SHARE:
        click.echo(
            f"muri: the loop waited for its data for {share:.0%} of an iteration. If that came from storage, the "
            "throughput is not that at full memory: run the script once before, so that the page cache has the data",
            err=True,
        )


def _tell(cpus: int, measured: Measured) -> None:
    count, scatter = f"{cpus:>4} {'CPU: ' if cpus == 1 else 'CPUs:'}", f"± {measured.spread * 100:.1f} %"
    click.echo(f"{count} {measured.throughput:.4g} iterations/s {scatter}", err=True)


@click.command("bandwidth", short_help="Measure the all-reduce that scaled profiles rest on.")
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True, help="Processes, one per GPU.")
@click.option("--backend", type=click.Choice(("auto", "gloo", "nccl")), default="auto", show_default=True)
@click.option("--gpu-type", default="gpu", show_default=True, help="Slurm's type of the GPUs, as profiles have it.")
@click.option("--list", "list_only", is_flag=True, help="Measure nothing; show what was measured.")
@store_option
@json_option
def bandwidth_command(
    *, ranks: int, backend: str, gpu_type: str, list_only: bool, store_path: Path | None, as_json: bool
) -> None:
    """Measure an all-reduce and store its bandwidth and latency, for `muri profile predict`.

    It runs between --ranks processes on this node or, if srun started several tasks, between the tasks.

    \b
    Examples:
      muri profile bandwidth --ranks 4 --gpu-type a100
      srun -N 2 --ntasks-per-node 4 --gres gpu:4 \\
        muri profile bandwidth --gpu-type a100
      muri profile bandwidth --list
    """
    if list_only:
        _print_bandwidths(read_if_any(store_path, bandwidths), as_json)
        return
    step = step_of(os.environ)
    backend = usable_backend(backend, ranks if step is None else step.ranks // step.nodes)
    if step is None:
        click.echo(f"measuring between {ranks} processes with {backend} …", err=True)
        timings, nodes = measure_on_this_node(ranks, backend), 1
    else:
        timings, ranks, nodes = time_all_reduce(*step.meeting(backend)), step.ranks, step.nodes
        if step.rank:
            return
    found = _bandwidth(timings, gpu_type, ranks, nodes, backend)
    with open_store(store_path) as store:
        store.put_document(BANDWIDTH_KIND, found.to_document())
    _print_bandwidths((found,), as_json)
    if not as_json:
        _print_timings(found, timings)


def _bandwidth(timings: Sequence[Timing], gpu_type: str, ranks: int, nodes: int, backend: str) -> Bandwidth:
    if ranks % nodes:
        raise AllReduceError(f"{ranks} tasks on {nodes} nodes: give every node as many (srun --ntasks-per-node)")
    now = now_text()
    return Bandwidth(gpu_type, nodes, ranks // nodes, *fit(timings, ranks), backend, now)


def _print_bandwidths(found: Sequence[Bandwidth], as_json: bool) -> None:
    if as_json:
        documents = [{"name": item.name, **item.to_document().body, "measured_at": item.measured_at} for item in found]
        echo_json({"bandwidths": documents})
        return
    for item in found:
        click.echo(
            f"{item.name}: {item.mib_per_s:.0f} MiB/s a link, {item.latency_s * 1e6:.0f} µs a step "
            f"({item.backend}, {item.measured_at})"
        )
    if not found:
        click.echo("No bandwidth was measured yet.")


def _print_timings(found: Bandwidth, timings: Sequence[Timing]) -> None:
    click.echo(f"{'MIB':>10} {'MEASURED':>12} {'RING MODEL':>12}   ms")
    for size_mib, seconds in timings:
        model_s = ring_s(size_mib / found.mib_per_s, found.latency_s, found.ranks)
        click.echo(f"{size_mib:>10.3f} {seconds * 1e3:>12.3f} {model_s * 1e3:>12.3f}")
