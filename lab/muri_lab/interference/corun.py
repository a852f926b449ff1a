"""Measures how two scripts slow each other down, as plain processes on the same device.

Both are started once. When both iterate steadily they take turns: the first alone while the other is stopped
(SIGSTOP), the second alone, both at once; and so on for some rounds. Drifts of the machine affect all three alike, and
no time goes into starting anything twice. ξ is the median over rounds of the mean iteration time beside
the other divided by that alone in the same round.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock, now_text
from muri.errors import MuriError, UsageError
from muri.profiler.dryrun.messages import ITERATION_LOG_VARIABLE, StampReader
from muri.profiler.dryrun.runner import check_command, end, last_words, start
from muri.profiler.dryrun.steadiness import certainty, settled_after
from muri.profiler.interference import Interference, Side
from muri.profiler.records import ProfileKey

DEFAULT_STEADY_S: Final = 30.0
DEFAULT_STARTUP_S: Final = 120.0
MOST_ROUNDS: Final = 10
LEAST_ROUNDS: Final = 3  # Fewer rounds do not show how sure the ratio is
LEAST_ITERATIONS: Final = 3  # Of the slower script in a turn
SURE: Final = 0.95
_TURNS: Final = 3
_EDGE_S: Final = 0.15
"""Left out at the start of a turn, when queued work of a stopped script still runs and caches fill."""

_TICK_S: Final = 0.05

Tell = Callable[[str], None]


class PairFailedError(MuriError):
    """Two scripts could not be measured side by side; the text says which one failed and how."""


class PairUnstartableError(UsageError):
    """The budget of a pair's measurement is not positive."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a measurement may take."""

    steady_s: float = DEFAULT_STEADY_S  # Seconds of running steadily, alone and side by side together
    startup_s: float = DEFAULT_STARTUP_S  # Seconds until both iterate steadily

    def __post_init__(self) -> None:
        """Refuse a budget in which nothing can be measured."""
        if not (self.steady_s > 0 and self.startup_s > 0):
            raise PairUnstartableError(f"{self.steady_s:g} s after a start of {self.startup_s:g} s: both must be > 0")

    def rounds(self, slowest_iteration_s: float) -> int:
        """How many rounds fit if each turn is to have enough iterations of the slower script."""
        needed_s = 2 * LEAST_ITERATIONS * slowest_iteration_s + _EDGE_S  # beside the other it is slower
        rounds = int(self.steady_s / (_TURNS * needed_s))
        if rounds < LEAST_ROUNDS:
            raise PairFailedError(
                f"an iteration takes {slowest_iteration_s:.3g} s; {LEAST_ROUNDS} rounds need at least "
                f"{LEAST_ROUNDS * _TURNS * needed_s:.0f} s of steady work, not {self.steady_s:g} (--seconds)"
            )
        return min(MOST_ROUNDS, rounds)


@dataclass
class Runner:
    """One of the two scripts while it runs."""

    command: Sequence[str]  # The script and its arguments
    process: "subprocess.Popen[bytes]"  # Its process, which leads a session
    output: Path
    stamps: StampReader  # When its iterations end
    solo_s: list[float] = field(default_factory=list)  # Mean iteration time of each turn alone
    shared_s: list[float] = field(default_factory=list)  # Mean iteration time of each turn beside the other
    iterations: int = 0  # Iterations beside the other

    @property
    def name(self) -> str:
        """The script as the user named it."""
        return " ".join(self.command)

    def check_alive(self) -> None:
        """Fail if the script has ended."""
        code = self.process.poll()
        if code is None:
            return
        count, words = len(self.stamps.read()), last_words(self.output)
        if code == 0:
            raise PairFailedError(
                f"{self.name} ended after {count} iterations, before the pair was measured; "
                "let it run longer (more iterations or epochs), or measure for less time (--seconds)"
            )
        raise PairFailedError(f"{self.name} failed with exit code {code} after {count} iterations: {words}")

    def pause(self, paused: bool) -> None:
        """Stop the script and its children, or let them go on."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def settled(self) -> bool:
        """Whether it has warmed up."""
        stamps_s = self.stamps.read()
        return settled_after([after - before for before, after in pairwise(stamps_s)]) is not None

    def recent_iteration_s(self) -> float:
        """Mean of the last iterations."""
        return fmean(after - before for before, after in pairwise(self.stamps.stamps_s[-11:]))


def measure_pair(
    command_a: Sequence[str],
    command_b: Sequence[str],
    keys: tuple[ProfileKey, ProfileKey],
    *,
    budget: Budget = Budget(),
    tell: Tell = lambda _: None,
    clock: Clock = MACHINE_CLOCK,
) -> Interference:
    """Measure ξ of two scripts that run at once on the devices that they choose themselves."""
    for command in (command_a, command_b):
        check_command(command)
    with tempfile.TemporaryDirectory(prefix="muri-pair-") as folder, ExitStack() as both:
        runners = [
            both.enter_context(_running(command, Path(folder, name)))
            for command, name in ((command_a, "a"), (command_b, "b"))
        ]
        _settle(runners, budget, tell, clock)
        began_s = clock()
        rounds = _take_turns(runners, budget, tell, clock)
        measured_s = clock() - began_s
        a, b = (_side(key, runner) for key, runner in zip(keys, runners, strict=True))
        return Interference(a, b, rounds, measured_s, now_text())


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[Runner]:
    folder.mkdir()
    log, output = folder / "iterations", folder / "output"
    with output.open("wb") as stream:
        process = start(("--no-attach", *command), {**os.environ, ITERATION_LOG_VARIABLE: str(log)}, stream)
    runner = Runner(command, process, output, StampReader(log))
    try:
        yield runner
    finally:
        runner.pause(False)  # a stopped process does not act on SIGTERM
        end(process)


def _settle(runners: Sequence[Runner], budget: Budget, tell: Tell, clock: Clock) -> None:
    """Wait until both have warmed up, side by side."""
    tell("waiting until both iterate steadily")
    deadline_s = clock() + budget.startup_s
    while waiting := [runner for runner in runners if not runner.settled()]:
        for runner in runners:
            runner.check_alive()
        if clock() > deadline_s:
            count = len(waiting[0].stamps.stamps_s)
            reason = (
                f"only {count} iterations" if count else "no iterations; mark them with muri.batches(loader) or stages"
            )
            raise PairFailedError(f"{waiting[0].name} is not steady after {budget.startup_s:g} s: {reason}")
        clock.sleep(_TICK_S)


def _take_turns(runners: Sequence[Runner], budget: Budget, tell: Tell, clock: Clock) -> int:
    """Alone, alone, both, for some rounds; returns how many."""
    rounds = budget.rounds(max(runner.recent_iteration_s() for runner in runners))
    turn_s = budget.steady_s / (rounds * _TURNS)
    for done in range(1, rounds + 1):
        for active in ((runners[0],), (runners[1],), runners):
            _turn(runners, active, turn_s, clock)
        ratios = ", ".join(f"{median(_ratios(runner)):.2f}" for runner in runners)
        tell(f"round {done} of {rounds}: slower by {ratios}")
        if done >= LEAST_ROUNDS and all(certainty(_ratios(runner)).probability >= SURE for runner in runners):
            return done
    return rounds


def _turn(runners: Sequence[Runner], active: Sequence[Runner], turn_s: float, clock: Clock) -> None:
    """Let some run and note their mean iteration times."""
    for runner in runners:
        runner.pause(runner not in active)
    start_s = clock() + _EDGE_S
    end_s = start_s + max(turn_s - _EDGE_S, _TICK_S)
    while (left_s := end_s - clock()) > 0:
        for runner in active:
            runner.check_alive()
        clock.sleep(min(left_s, 0.5))
    for runner in active:
        stamps_s = [stamp_s for stamp_s in runner.stamps.read() if start_s <= stamp_s <= end_s]
        if len(stamps_s) < 2:  # two ends make one iteration
            raise PairFailedError(f"{runner.name} did not finish an iteration in {turn_s:.1f} s; give more --seconds")
        mean_s = (stamps_s[-1] - stamps_s[0]) / (len(stamps_s) - 1)
        (runner.solo_s if len(active) == 1 else runner.shared_s).append(mean_s)
        runner.iterations += (len(stamps_s) - 1) if len(active) > 1 else 0


def _ratios(runner: Runner) -> list[float]:
    return [shared_s / solo_s for solo_s, shared_s in zip(runner.solo_s, runner.shared_s, strict=True)]


def _side(key: ProfileKey, runner: Runner) -> Side:
    ratios = _ratios(runner)
    sure = certainty(ratios)
    return Side(
        key=key,
        solo_s=median(runner.solo_s),
        shared_s=median(runner.shared_s),
        ratio=max(1.0, median(ratios)),
        spread=sure.half_width,
        confidence=sure.probability,
        iterations=runner.iterations,
    )
