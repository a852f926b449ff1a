"""A controller whose cycles take some virtual time, and what happens meanwhile."""

from typing import cast

from virtual_clock import VirtualClock

from muri.slurm_plugin.controller.cycle import Controller


class Happenings:
    """Events at set times, and the flag that ends the loop at another."""

    def __init__(self, clock: VirtualClock, at_s: list[float], until_s: float = float("inf")) -> None:
        self._clock, self._at_s, self._until_s = clock, sorted(at_s), until_s

    def look(self) -> bool:
        past = [at_s for at_s in self._at_s if at_s <= self._clock()]
        del self._at_s[: len(past)]
        return bool(past)

    mark = look

    def is_set(self) -> bool:
        return self._clock() >= self._until_s

    def wait(self, timeout: float) -> bool:
        self._clock.sleep(timeout)
        return self.is_set()


class Work:
    """Notes when cycles, and looks at new members, begin.

    Args:
        clock: Tells the time.
        lasting_s: How long each cycle takes; the last one is the time of all later ones, too.
        start_s: When the new members have started.
        look_s: How long a look takes.
        someone_waits: Whether jobs wait.
        cycles: After so many nothing is left to the next one.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *lasting_s: float,
        start_s: float = 0.0,
        look_s: float = 0.0,
        someone_waits: bool = False,
        cycles: int = 0,
    ) -> None:
        self.begun_s: list[float] = []
        self.looks_s: list[float] = []
        self.has_more = cycles > 0
        self.someone_waits = someone_waits
        self._clock, self._lasting_s, self._start_s = clock, [*lasting_s], start_s
        self._look_s, self._cycles = look_s, cycles

    @property
    def controller(self) -> Controller:
        """As the loop takes it."""
        return cast(Controller, self)

    def cycle(self) -> None:
        self.begun_s.append(self._clock())
        self._clock.sleep(self._lasting_s.pop(0) if len(self._lasting_s) > 1 else self._lasting_s[0])
        self.has_more = len(self.begun_s) < self._cycles

    def close_gates(self) -> bool:
        self.looks_s.append(self._clock())
        self._clock.sleep(self._look_s)
        return self._clock() < self._start_s
