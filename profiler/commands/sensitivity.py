"""`muri profile sensitivity`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from muri.profiler.commands.options import console, json_option, open_store, store_option
from muri.profiler.dryrun.result import DryRunResult
from muri.profiler.sensitivity import cpu_limits
from muri.profiler.sensitivity.bisection import bisect
from muri.profiler.sensitivity.cache_model import Dataset
from muri.profiler.sensitivity.curve import Measured
from muri.profiler.sensitivity.errors import SensitivityError
from muri.profiler.sensitivity.memory_axis import MemoryAxis
from muri.profiler.sensitivity.profiling import ScriptMeter, overlap_seen
from muri.profiler.sensitivity.record import KIND, Sensitivity, stored
from muri.profiler.sensitivity.throughput import STEADY_S
from muri.profiler.times import now_text

READING_SHARE: Final = 0.1
"""A loop that waits longer for its data, as a share of the iteration, probably reads from storage."""

UNSEEN_OVERLAP: Final = (
    "the dry run saw no reading behind other work, so the loop is taken to wait for each batch. If the script marks "
    "its stages itself and its loader has workers, give --overlap 1"
)


@click.command(
    "sensitivity",
    short_help="Find the least CPUs and memory that saturate a script.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGS]...")
@click.option("--model", help="Name under which it is stored.  [default: the script's]")
@click.option("--max-cpus", type=click.IntRange(1), help="Greatest CPU count.  [default: all of this machine]")
@click.option("--no-pin", is_flag=True, help="Only tell the script the count, for work on other machines' CPUs.")
@click.option("--seconds", type=click.FloatRange(0.1, 60), default=STEADY_S, show_default=True, help="Per measurement.")
@click.option("--dataset", type=click.Path(path_type=Path), help="Its files: their size and bandwidth are measured.")
@click.option("--dataset-gib", type=float, help="Size of the dataset, instead of --dataset.")
@click.option("--storage-mib-per-s", type=float, help="Bandwidth of its storage, instead of measuring it.")
@click.option("--batch-mib", type=float, help="What an iteration reads: batch size × mean size of a sample.")
@click.option("--overlap", type=click.FloatRange(0, 1), help="Share of reading that is hidden.  [default: measured]")
@click.option("--show", metavar="MODEL", help="Show what is stored of a model and measure nothing.")
@store_option
@json_option
def sensitivity_command(show: str | None, store_path: Path | None, as_json: bool, **asked: Any) -> None:
    """Measure a script's throughput on different CPU counts, by bisection, in at most 8 measurements.

    Each count is enforced by affinity; the script's threads follow, and {cpus} in its arguments is
    replaced by the count. With the dataset's size, its bandwidth and --batch-mib the memory axis is computed.

    \b
    Examples:
      muri profile sensitivity -- train.py --workers {cpus}
      muri profile sensitivity --dataset /data/imagenet --batch-mib 28 \\
        -- train.py --workers {cpus}
      muri profile sensitivity --show train
      muri profile sensitivity --show train --json | jq .demand
    """
    request = Request(**asked)
    if show is None:
        found = _measure(request, store_path)
    elif request.command:
        raise SensitivityError("--show measures nothing: leave the script out, or leave --show out")
    else:
        with open_store(store_path, read_only=True) as store:
            found = stored(store, show)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        return
    from muri.profiler.sensitivity.render import print_sensitivity  # -- rich takes a while to load

    print_sensitivity(console(), found)


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a measurement, as click hands them over."""

    command: tuple[str, ...]
    model: str | None
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
        """The memory axis they mean."""
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
        return self.model or (words[0] if words is not self.command else Path(words[0]).stem)


def _measure(request: Request, store_path: Path | None) -> Sensitivity:
    name, axis = request.name, request.axis
    greatest = request.max_cpus or cpu_limits.usable_cpus()
    if not request.no_pin:
        cpu_limits.cores(greatest)  # refuses more than there are before anything is measured
    with open_store(store_path):  # who may not write need not wait for the measurements
        pass
    dataset = None if axis is None else _read_dataset(axis)
    meter = ScriptMeter(request.command, not request.no_pin, request.seconds, _tell)
    cpu = bisect(meter, greatest)
    seen = meter.dry_run(cpu.saturating_cpus)
    if axis is not None and dataset is not None:
        dataset = axis.with_overlap(dataset, overlap_seen(seen))
        _warn_of_reading(seen)
        if dataset.overlap == 0 and axis.overlap is None:
            click.echo(f"muri: {UNSEEN_OVERLAP}", err=True)
    found = Sensitivity(name, now_text(), cpu, meter.pinned, dataset, seen.detail.host_mem_gib)
    with open_store(store_path) as store:
        store.put_document(KIND, found.to_document())
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
