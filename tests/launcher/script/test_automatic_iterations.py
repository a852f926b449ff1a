"""Where automatic stages begin and end iterations, and whether reading samples is load or preprocess."""

from collections import defaultdict

import pytest

from muri.launcher.job.stage_clock import LOAD, PREPROCESS, StageClock
from muri.launcher.script.hooks import MOST_ACCUMULATED, MOST_BACKWARDS, Iterations


class Loop:
    """Plays what hooks see of a script, told in words: an event, or `event:name` of one of several objects."""

    def __init__(self) -> None:
        self.clock = StageClock()
        self.seen = Iterations(self.clock)

    def play(self, words: str) -> int:
        """Play the events; returns the iterations by then."""
        objects: defaultdict[tuple[bool, str], object] = defaultdict(object)
        for word in words.split():
            event, _, name = word.partition(":")
            getattr(self, event)(objects[event == "step", name])
        return self.clock.iterations

    def ask(self, loader: object) -> None:
        self.seen.ask(loader)

    def end(self, loader: object) -> None:
        """No batch was left."""
        self.seen.ask(loader)
        self.seen.over(id(loader))

    def gone(self, loader: object) -> None:
        self.seen.over(id(loader))

    def call(self, module: object, *, evaluated: bool = False) -> None:
        self.seen.called(module, evaluated=evaluated)
        self.seen.work(evaluated=evaluated)

    def eval(self, module: object) -> None:
        self.call(module, evaluated=True)

    def back(self, _: object) -> None:
        self.seen.backward()
        self.seen.work(trained=True)

    def made(self, _: object) -> None:
        """The script makes an optimizer."""
        self.seen.made()

    def step(self, optimizer: object) -> None:
        self.seen.work(trained=True)
        self.seen.stepped(optimizer)

    def mark(self, _: object) -> None:
        """The script says itself where an iteration ends."""
        self.clock.step()

    def close(self, _: object) -> None:
        self.seen.close()


TRAIN = "call back step "
BY_HAND = "call call:criterion back "
"""Without an optimizer the script updates parameters itself."""

COURSES = {
    "epochs with validation": (2 * (5 * f"ask {TRAIN}" + "end " + 3 * "ask:other eval " + "end:other "), 10),
    "validation inside the loop": (4 * f"ask {TRAIN} ask:other eval ask:other eval end:other " + "end", 4),
    "accumulation with a loader counts batches": (2 * (2 * "ask call back " + f"ask {TRAIN}") + "end", 6),
    "two loaders of one iteration": (4 * f"ask ask:other {TRAIN}" + "ask", 4),
    "a batch fetched ahead": ("ask " + 4 * f"ask {TRAIN}" + f"end {TRAIN}", 5),
    "a loop that is left": (f"ask {TRAIN} gone close", 1),
    "no loader: steps count": ("made " + 3 * TRAIN, 3),
    "no loader: accumulated gradients count once": ("made " + 2 * f"call back {TRAIN}" + "call back close", 2),
    "of two optimizers one counts": ("made " + 5 * "call back step:discriminator call back step:generator ", 5),
    "no optimizer: the module that came first begins iterations": (5 * BY_HAND, 4),  # the last one has not ended
    "no optimizer: validation ends an iteration": (3 * BY_HAND + 10 * "eval ", 3),
    "no optimizer: validation does not count": (3 * BY_HAND + 10 * "eval " + 3 * BY_HAND, 5),
    "a teacher without gradients belongs to the iteration": (4 * f"eval:teacher {BY_HAND}" + "eval:teacher call", 4),
    "the first module is not called any more": (BY_HAND + (MOST_BACKWARDS + 4) * "call:new back ", 5),
    "backward passes of functions": (4 * "back ", 3),
    "an optimizer may step later": ("made " + 40 * BY_HAND, 0),
    "an optimizer steps late": ("made " + 40 * BY_HAND + "step", 1),
    "an optimizer never steps": ("made " + (MOST_ACCUMULATED + 10) * BY_HAND, 9),  # the first one was long
    "modules within a loader's iterations": (5 * f"ask {BY_HAND}" + "end", 5),
    "only the script ends iterations once it does": ("mark " + 4 * f"{TRAIN} ask {BY_HAND} end mark " + "close", 4),
}


@pytest.mark.parametrize("course", COURSES)
def test_iterations_are_told_apart(course: str) -> None:
    words, iterations = COURSES[course]
    assert Loop().play(words) == iterations


@pytest.mark.parametrize(("cpu_share", "stage"), [(0.0, LOAD), (0.3, LOAD), (0.6, PREPROCESS), (1.0, PREPROCESS)])
def test_reading_is_load_unless_the_cpu_is_busy(cpu_share: float, stage: int) -> None:
    pytest.importorskip("torch", reason="the hooks into loaders need torch")
    from muri.launcher.script.data_loading import RECENT_FETCHES, ReadKind

    kind = ReadKind()
    for _ in range(5):
        kind.add(0.1, 0.1 * cpu_share)
    assert kind.stage == stage
    for _ in range(2 * RECENT_FETCHES):
        kind.add(0.1, 0.042)
    assert kind.stage == stage, "between the thresholds it stays the same"
