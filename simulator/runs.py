"""Runs of a sweep, policies × traces × seeds: one after the other or in parallel processes."""

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any, Final

from muri.errors import MuriError
from muri.simulator.metrics import Metrics, metrics_of
from muri.simulator.model import Cluster, Settings, SimulationResult, Trace
from muri.simulator.run import simulate

Watch = Callable[[int, float], None]
"""Called with the index of a run and the share of it that is done, 0 to 1."""

_POLL_S: Final = 0.2
_REPORT_EVERY_S: Final = 0.1
_END_WITHIN_S: Final = 10.0


class SweepError(MuriError):
    """A run of a sweep could not be carried out."""


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a sweep."""

    label: str  # Its name in tables: that of the policy, unless several variants of one policy are run
    trace: Trace
    policy: str
    cluster: Cluster
    settings: Settings  # How to simulate, seed included
    options: Mapping[str, Any] = field(default_factory=dict)  # Options of the policy
    first: int | None = None  # Index of the first job that the metrics count (steady state); None: from the first job
    last: int | None = None  # Index behind the last one; None: to the last job
    with_spans: bool = False  # Whether to record the timeline of the groups

    @property
    def name(self) -> str:
        """What it is called beside the others of a sweep."""
        return f"{self.trace.name}, {self.label}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run."""

    run: Run
    result: SimulationResult
    metrics: Metrics


def run_one(run: Run, progress: Callable[[float], None] | None = None) -> Outcome:
    """Carry out one run in this process."""
    result = simulate(
        run.trace,
        run.policy,
        run.cluster,
        run.settings,
        options=run.options,
        progress=progress,
        with_spans=run.with_spans,
    )
    return Outcome(run, result, metrics_of(result, run.first, run.last))


def sweep(runs: Sequence[Run], processes: int = 1, watch: Watch | None = None) -> tuple[Outcome, ...]:
    """Carry out all runs.

    Raises:
        SweepError: A process was killed from outside.
        MuriError: A run refused its input; where there are several, the text begins with its name.
    """
    watch = watch or _ignore
    if len(runs) == 1:
        return (_watched(runs[0], 0, watch),)
    if processes <= 1:
        return tuple(_named(run, partial(_watched, run, index, watch)) for index, run in enumerate(runs))
    return _sweep_in_processes(runs, min(processes, len(runs)), watch)


def _ignore(index: int, share: float) -> None:
    pass


def _named(run: Run, work: Callable[[], Outcome]) -> Outcome:
    """Carry out one run of several; an error tells which one it was."""
    try:
        return work()
    except MuriError as error:
        error.args = (f"{run.name}: {error}", *error.args[1:])
        raise
    except Exception as error:
        error.add_note(f"in the simulation of {run.name}, seed {run.settings.seed}")
        raise


def _watched(run: Run, index: int, watch: Watch) -> Outcome:
    outcome = run_one(run, lambda share: watch(index, share))
    watch(index, 1.0)
    return outcome


def _sweep_in_processes(runs: Sequence[Run], processes: int, watch: Watch) -> tuple[Outcome, ...]:
    # A forked child would inherit threads and locks in an unknown state; a spawned one starts clean.
    context = multiprocessing.get_context("spawn")
    reports: Queue[tuple[int, float]] = context.Queue()
    pool = ProcessPoolExecutor(processes, context, _prepare_worker, (reports,))
    with _cleared_away(pool):
        futures = [pool.submit(_work, index, run) for index, run in enumerate(runs)]
        for index, share in _reports_until_done(futures, reports):
            watch(index, share)
        try:
            return tuple(future.result() for future in futures)
        except BrokenProcessPool as error:
            raise SweepError(
                "a simulation's process was killed, most likely because memory ran out; try fewer --jobs"
            ) from error


@contextmanager
def _cleared_away(pool: ProcessPoolExecutor) -> Iterator[None]:
    """End all workers when the caller is interrupted or a run fails."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        children = set(multiprocessing.active_children()) - before
        for child in children:
            child.terminate()
        for child in children:
            child.join(_END_WITHIN_S)
        raise
    pool.shutdown()


def _reports_until_done(
    futures: Sequence[Future[Outcome]], reports: "Queue[tuple[int, float]]"
) -> Iterator[tuple[int, float]]:
    """Yield what the workers report until all runs have ended or one has failed."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_POLL_S)
        with suppress(Empty):
            while True:
                yield reports.get_nowait()
        yield from ((futures.index(future), 1.0) for future in done)
        if any(future.exception() is not None for future in done):
            return


_worker_reports: "list[Queue[tuple[int, float]]]" = []
"""The queue to the parent, in a worker process: an initialiser can only leave it in the module."""


def _prepare_worker(reports: "Queue[tuple[int, float]]") -> None:
    _worker_reports.append(reports)
    # The parent handles Ctrl-C and ends its workers; tracebacks of the workers would only be noise.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(index: int, run: Run) -> Outcome:
    sent_s = 0.0

    def report(share: float) -> None:
        nonlocal sent_s
        now_s = time.monotonic()
        if now_s - sent_s >= _REPORT_EVERY_S:
            sent_s = now_s
            _worker_reports[0].put((index, share))

    return _named(run, partial(run_one, run, report))


@contextmanager
def progress_bar(names: list[str], *, shown: bool) -> Iterator[Watch]:
    """A progress bar on stderr, with the time that is left, as the `watch` of a sweep."""
    if not shown or not sys.stderr.isatty():
        yield lambda index, share: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    shares = [0.0] * len(names)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(names[0], total=float(len(names)))

        def watch(index: int, share: float) -> None:
            shares[index] = max(shares[index], min(1.0, share))
            done = sum(one == 1.0 for one in shares)
            description = f"{names[index]} ({done} of {len(names)} done)" if len(names) > 1 else names[index]
            progress.update(task, completed=sum(shares), description=description)

        yield watch
