"""`muri.checkpoint` and `muri.should_stop`: a script that can be stopped at any iteration and resumed later.

What happens when it is asked to stop, alone and in a group, is here, too. See docs/checkpoints.md.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError, UsageError
from muri.launcher.job.environment import run_of, wait_for_end
from muri.launcher.job.stage_clock import StageClock
from muri.launcher.script.checkpoint_store import (
    CheckpointError,
    CheckpointStore,
    LoaderPosition,
    OneRank,
    agreement,
    default_place,
)
from muri.launcher.script.script_clock import current_clock
from muri.launcher.threads import Script, current_script

RETRY_S: Final = 10.0
"""Wait between a failed checkpoint and the next attempt."""

PathFunction = Callable[[Path], object]


class CheckpointLoadError(CheckpointError):
    """The job has a checkpoint, and the script could not load it."""


@dataclass(frozen=True)
class Resumed:
    """The answer of `muri.checkpoint`.

    Attributes:
        resumed: Whether the job had a checkpoint, which was loaded.
        iteration: Iterations done before; 0 at a fresh start.
        epoch: Runs of the training loop that had ended; the loop over epochs starts there.
        path: The loaded file or directory, None at a fresh start.
    """

    resumed: bool
    iteration: int = 0
    epoch: int = 0
    path: Path | None = None


@dataclass(frozen=True)
class Functions:
    """The script's functions that save to and load from a path, and intervals of periodic checkpoints."""

    save: PathFunction
    load: PathFunction
    every_s: float | None
    every_iterations: int | None

    def __post_init__(self) -> None:
        """Refuse arguments that cannot work."""
        for name in ("save", "load"):
            if not callable(getattr(self, name)):
                raise UsageError(f"muri.checkpoint: {name} must be a function that takes a path")
        for name in ("every_s", "every_iterations"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise UsageError(f"muri.checkpoint: {name}={value!r} must be a number > 0, or None for never")


class BoundaryCheckpointer:
    """Saves one script's state at iteration boundaries."""

    def __init__(
        self,
        functions: Functions,
        store: CheckpointStore,
        clock: StageClock,
        ranks: OneRank,
        now: Clock = MACHINE_CLOCK,
    ) -> None:
        self.position = LoaderPosition()  # of the training loop in its loader
        self.stop_asked = False  # whether the script is to be saved and ended at its next iteration boundary
        self.stopped_at: int | None = None  # iteration of the checkpoint after which the script was ended
        self._functions = functions
        self._store = store
        self._clock = clock
        self._ranks = ranks
        self._now = now
        self._before_clock = clock.iterations
        self._uncounted = 0  # iterations that the clock has not seen: of earlier runs, and of a loop without stages
        self._saved_iteration = 0
        self._saved_s = self._not_before_s = now()

    @property
    def iteration(self) -> int:
        """Iterations done, those of earlier runs included."""
        return self._uncounted + self._clock.iterations - self._before_clock

    def resume(self) -> Resumed:
        """Load the newest checkpoint that all ranks have, if there is one."""
        iteration = self._ranks.common(max(self._store.iterations(), default=-1))
        if iteration < 0:
            return Resumed(resumed=False)
        path, facts = self._store.read(iteration)
        try:
            self._functions.load(path)
        except Exception as error:
            raise CheckpointLoadError(
                f"the checkpoint {path} of iteration {iteration} could not be loaded: {type(error).__name__}: {error}. "
                f"Nothing was deleted; mend the load function, or move {path.parent} away to start anew"
            ) from error
        self.position.resume_at(facts["position"])
        self._uncounted += iteration
        self._saved_iteration = iteration
        _say(f"resumed at iteration {iteration} from {path}")
        return Resumed(resumed=True, iteration=iteration, epoch=self.position.epoch, path=path)

    def at_boundary(self) -> None:
        """Save at the end of an iteration, if it is time to; end the script once it was asked to stop and is saved."""
        if isinstance(sys.exc_info()[1], GeneratorExit):  # the loop was left with `break`: raise nothing here
            self.position.left()
            return
        if self.position.in_other_loop:
            return
        self.position.batch += 1
        if self._saved_to_stop(self._clock.recent_iteration_s()):
            _say(f"saved at iteration {self.iteration}, the script stops")
            conclude(os.environ)
            raise SystemExit(STOPPED_CODE)

    def own_boundary(self) -> bool:
        """Save at the end of an iteration of a loop that marks no stages, if it is time to.

        Return whether the script should stop now, because its state is saved. Never in a loop with stages: there
        `at_boundary` ends the script.
        """
        if self._clock.iterations != self._before_clock:
            return False
        self._uncounted += 1
        return self._saved_to_stop(None)

    def _saved_to_stop(self, iteration_s: float | None) -> bool:
        """Save if it is time to; return whether the script should stop now, because its state is saved."""
        every_s, every = self._functions.every_s, self._functions.every_iterations
        by_time = every_s is not None and self._now() - self._saved_s >= every_s
        by_count = every is not None and self.iteration - self._saved_iteration >= every
        stop, due = self._ranks.decide(self.stop_asked, by_time or by_count, iteration_s)
        if not ((stop or due) and self._now() >= self._not_before_s and self.save() and stop):
            return False
        self.stopped_at = self.iteration
        return True

    def save(self) -> bool:
        """Write a checkpoint; the one before goes when all ranks have the new one.

        Return whether it is complete; a failure is reported on standard error and changes nothing else.
        """
        iteration = self.iteration
        if iteration == self._saved_iteration and iteration in self._store.iterations():
            return True
        try:
            draft: Path | None = self._store.write(iteration, self._functions.save, {"position": self.position.facts()})
        except CheckpointError as error:
            draft = None
            _say(f"{error}. The job goes on; an earlier checkpoint is as it was")
        if not self._ranks.all_true(draft is not None) or draft is None:
            self._not_before_s = self._now() + RETRY_S
            return False
        self._store.commit(draft, iteration)
        if self._ranks.all_true(True):
            self._store.forget_before(iteration)
        self._saved_iteration, self._saved_s = iteration, self._now()
        return True

    def close(self) -> None:
        """Keep nothing after the script has ended."""
        self._store.close()
        if self.at_boundary in self._clock.at_boundary:
            self._clock.at_boundary.remove(self.at_boundary)


def checkpoint(
    save: PathFunction,
    load: PathFunction,
    *,
    every_s: float | None = None,
    every_iterations: int | None = None,
) -> Resumed:
    """Say how to save and load this script's state; loads the job's checkpoint if it has one.

    Call it once, when model and optimizer exist, right before the training loop. From then on the job is
    saved at an iteration boundary when it has to stop (SIGTERM, SIGUSR1 or SIGUSR2), and also periodically.

    Args:
        save: Writes the state to the path that it is given: a file or a directory that does not exist yet.
        load: Reads such a path back.
        every_s: Also save when that many seconds have passed since the last time.
        every_iterations: Also save after that many iterations.

    Returns:
        Whether the job resumed, at which iteration and epoch.

    Raises:
        CheckpointError: Checkpoints cannot be kept, or the job's own one cannot be loaded.
        UsageError: An argument is wrong, or it was called before.
    """
    functions = Functions(save, load, every_s, every_iterations)
    if current_checkpointer() is not None:
        raise UsageError("muri.checkpoint was called before in this script; call it once, with all of its state")
    ranks = agreement()
    store = CheckpointStore(default_place(os.environ, Path.cwd(), ranks.rank, ranks.world_size))
    clock = current_clock()
    checkpointer = BoundaryCheckpointer(functions, store, clock, ranks)
    try:
        resumed = checkpointer.resume()
    except BaseException:
        checkpointer.close()
        raise
    _belongings()[BoundaryCheckpointer] = checkpointer
    clock.at_boundary.append(checkpointer.at_boundary)
    _watch_stop_signals(checkpointer, first_rank=ranks.rank == 0)
    return resumed


def should_stop() -> bool:
    """Whether the script has to stop, for loops that mark no stages: call it once per iteration.

    The call saves the state when a stop or a periodic checkpoint is due. Leave the loop when it returns true.
    In loops with `muri.batches` or `muri.stage` Muri ends the script itself, and
    this is always false, as it is before `muri.checkpoint`.
    """
    checkpointer = current_checkpointer()
    if checkpointer is None or not checkpointer.own_boundary():
        return False
    conclude(os.environ)
    return True


def _say(text: str) -> None:
    print(f"muri: {text}", file=sys.stderr, flush=True)


STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's own SIGTERM, and what users choose for `--signal`."""

STOPPED_CODE: Final = 128 + signal.SIGTERM
"""Exit code of a script that was stopped after it had been saved."""


def _watch_stop_signals(checkpointer: BoundaryCheckpointer, *, first_rank: bool) -> None:
    """Let stop signals ask for a checkpoint, and tell the controller that the job has one.

    A handler that the script has set is called as well. To a thread the runtime delivers the signals.
    """
    # Takes time to load. It must not be in the thread: a fork meanwhile would leave the import's lock taken.
    from muri.launcher.job.scheduler import DECLARE_CHECKPOINT, ask_slurm
    from muri.launcher.job.script import wait_for_gloo_at_exit

    environment = dict(os.environ)
    job_id, run = environment.get("SLURM_JOB_ID"), run_of(environment)

    def declare() -> None:
        with contextlib.suppress(MuriError):  # then the job is never preempted, and nothing else is lost
            ask_slurm(DECLARE_CHECKPOINT, job_id or "", run, environment)

    if current_script() is None:
        wait_for_gloo_at_exit()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                _chain(number, checkpointer)
    if job_id and wants_requeue(environment) and first_rank:
        _thread.start_new_thread(declare, ())  # it belongs to no script: one in a thread may start no process


def wants_requeue(environment: Mapping[str, str]) -> bool:
    """Whether the job was submitted with `--muri=checkpoint`; a step has the option as its user typed it."""
    items = environment.get("MURI_JOB", "").lower().split(",")
    return not {"checkpoint", *(f"checkpoint={yes}" for yes in ("1", "yes", "on", "true"))}.isdisjoint(items)


def conclude(environment: Mapping[str, str]) -> None:
    """Requeue a job that was saved before its time limit, unless Slurm is ending it already.

    Waits for Slurm to end this process, so that the batch script does not go on meanwhile.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id or not wants_requeue(environment) or environment.get("SLURM_PROCID", "0") != "0":
        return
    if current_script() is not None:  # a thread's job goes back by its `muri run`
        return
    from muri.launcher.job.scheduler import REQUEUE_STOPPED

    go_back(REQUEUE_STOPPED, environment, f"job {job_id} was saved but", f"job {job_id} goes back to the queue")


def go_back_for_memory(environment: Mapping[str, str]) -> None:
    """Requeue a job that has run out of GPU memory beside others, where it may try again."""
    from muri.launcher.job.scheduler import REQUEUE_FOR_MEMORY

    trouble = "the script ran out of GPU memory while others shared its GPU, and the job"
    go_back(REQUEUE_FOR_MEMORY, environment, trouble)


def go_back(request: str, environment: Mapping[str, str], trouble: str, news: str = "") -> None:
    """Requeue this process's job, and wait for Slurm to end the process; return where the job may not go back."""
    from muri.launcher.job.scheduler import ask_slurm

    try:
        if not ask_slurm(request, environment.get("SLURM_JOB_ID", ""), run_of(environment)):
            return
    except MuriError as error:
        _say(f"{trouble} could not be requeued: {error}")
        return
    if news:
        _say(news)
    with contextlib.suppress(ValueError):  # only the main thread can
        for number in STOP_SIGNALS:  # the script's handlers would only delay the end
            signal.signal(number, signal.SIG_DFL)
    wait_for_end(environment)


def _chain(number: int, checkpointer: BoundaryCheckpointer) -> None:
    before = signal.getsignal(number)
    if before == signal.SIG_IGN:
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        checkpointer.stop_asked = True
        if callable(before):
            before(signum, frame)

    signal.signal(number, stop)


_process: Final[dict[Any, Any]] = {}
"""The belongings of a script that has its process for itself."""

os.register_at_fork(after_in_child=_process.clear)  # a child, such as a DataLoader's worker, must save nothing


def _belongings() -> dict[Any, Any]:
    script = current_script()
    return _process if script is None else script.belongings


def current_checkpointer() -> BoundaryCheckpointer | None:
    """Return the calling script's checkpointer, None before it called `muri.checkpoint`."""
    return _belongings().get(BoundaryCheckpointer)


def checkpointer_of(script: Script) -> BoundaryCheckpointer | None:
    """Return the checkpointer of one of this process's scripts, None before it called `muri.checkpoint`."""
    return script.belongings.get(BoundaryCheckpointer)
