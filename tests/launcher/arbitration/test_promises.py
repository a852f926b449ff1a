"""Promised speeds, with real threads in virtual time: members with long stages beside one that was promised a speed."""

from dataclasses import dataclass

from virtual_clock import VirtualClock

from muri.launcher.arbitration.arbiter import Arbiter, FairArbiter, WaitInterruptedError
from muri.launcher.job.stage_clock import STAGE_COUNT, IterationRecord

GPU = 2
MINUTE_S = 60.0


@dataclass(frozen=True)
class Script:
    """An iteration: (resource, seconds) one after the other, None for time outside of stages."""

    steps: tuple[tuple[int | None, float], ...]
    piece_s: float = 1e9
    min_speed: float = 0.0
    known: bool = True

    @property
    def solo_s(self) -> float:
        return sum(seconds for _, seconds in self.steps)


def train(clock: VirtualClock, arbiter: Arbiter, member: str, script: Script, ends_s: list[float]) -> None:
    """Iterate until the member is told to leave; note when each iteration ended."""
    arbiter.join(member, script.solo_s if script.known else None, script.min_speed)
    try:
        while True:
            begun_s, wait_s, stage_s = clock(), [0.0] * STAGE_COUNT, [0.0] * STAGE_COUNT
            for resource, seconds in script.steps:
                if resource is None:
                    clock.sleep(seconds)
                    continue
                stage_s[resource] += seconds
                wait_s[resource] += arbiter.acquire(member, resource)
                left_s = seconds
                while left_s > 1e-9:
                    clock.sleep(min(script.piece_s, left_s))
                    left_s -= script.piece_s
                    if left_s > 1e-9:
                        wait_s[resource] += arbiter.yield_point(member, resource)
                arbiter.release(member, resource)
            ends_s.append(clock())
            arbiter.iteration_done(member, IterationRecord(clock() - begun_s, tuple(stage_s), tuple(wait_s)))
    except WaitInterruptedError:
        return


def speeds(
    scripts: list[Script], window_s: float = MINUTE_S, warmup_s: float = 10.0, **options: int
) -> tuple[float, ...]:
    """Normalized speeds of members beside each other, after a warm-up."""
    clock = VirtualClock()
    arbiter = FairArbiter(clock, **options)  # type: ignore[arg-type]
    names = [str(number) for number in range(1, len(scripts) + 1)]
    ends_s: dict[str, list[float]] = {name: [] for name in names}
    threads = [
        clock.start(train, clock, arbiter, name, script, ends_s[name])
        for name, script in zip(names, scripts, strict=True)
    ]
    clock.sleep(warmup_s + window_s)
    for name in names:
        arbiter.leave(name)
    clock.finish(*threads)
    counted = [sum(warmup_s <= end_s < warmup_s + window_s for end_s in ends_s[name]) for name in names]
    return tuple(count * script.solo_s / window_s for count, script in zip(counted, scripts, strict=True))
