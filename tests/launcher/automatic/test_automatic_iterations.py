"""Where automatic stages begin and end iterations, and whether reading samples is load or preprocess."""

from collections.abc import Callable

import pytest

from muri.launcher.automatic.watch import (
    LOAD,
    MOST_ACCUMULATED,
    MOST_BACKWARDS,
    PREPROCESS,
    Iterations,
    stages_wanted,
)
from muri.launcher.job.stage_clock import StageClock


class Loop:
    """Plays what hooks see of a training loop."""

    def __init__(self) -> None:
        self.clock = StageClock()
        self.seen = Iterations(self.clock)
        self.optimizer = object()

    def train(self, optimizer: object | None = None, *, step: bool = True) -> None:
        self.seen.work()
        self.seen.work(trained=True)
        if step:
            self.seen.work(trained=True)
            self.seen.stepped(optimizer or self.optimizer)

    def validate(self, batches: int) -> None:
        loader = object()
        for _ in range(batches):
            self.seen.ask(loader)
            self.seen.work(evaluated=True)
        self.seen.ask(loader)
        self.seen.exhausted(loader)

    def epoch(self, batches: int, loader: object, body: Callable[[], None]) -> None:
        for _ in range(batches):
            self.seen.ask(loader)
            body()
        self.seen.ask(loader)
        self.seen.exhausted(loader)


def test_batches_of_epochs_count_and_validation_does_not() -> None:
    loop = Loop()
    for _ in range(2):
        loop.epoch(5, object(), loop.train)
        loop.validate(3)
    assert loop.clock.iterations == 10


def test_validation_inside_the_loop_does_not_count() -> None:
    loop = Loop()

    def body() -> None:
        loop.train()
        loop.validate(2)

    loop.epoch(4, object(), body)
    assert loop.clock.iterations == 4


def test_gradient_accumulation_with_a_loader_counts_batches() -> None:
    loop = Loop()
    steps = iter([False, False, True] * 2)
    loop.epoch(6, object(), lambda: loop.train(step=next(steps)))
    assert loop.clock.iterations == 6


def test_two_loaders_of_one_iteration_are_one() -> None:
    loop = Loop()
    first, second = object(), object()
    for _ in range(4):
        loop.seen.ask(first)
        loop.seen.ask(second)
        loop.train()
    loop.seen.ask(first)
    assert loop.clock.iterations == 4


def test_one_batch_fetched_ahead_counts_as_often_as_it_is_trained_on() -> None:
    loop = Loop()
    loader = object()
    loop.seen.ask(loader)
    for _ in range(4):
        loop.seen.ask(loader)
        loop.train()
    loop.seen.ask(loader)
    loop.seen.exhausted(loader)
    loop.train()
    assert loop.clock.iterations == 5


def test_without_a_loader_steps_count() -> None:
    loop = Loop()
    for _ in range(3):
        loop.train()
    assert loop.clock.iterations == 3


def test_without_a_loader_accumulated_gradients_count_once() -> None:
    loop = Loop()
    for _ in range(2):
        loop.train(step=False)
        loop.train()
    loop.train(step=False)
    loop.seen.close()
    assert loop.clock.iterations == 2


def test_of_two_optimizers_one_ends_the_iterations() -> None:
    loop = Loop()
    generator, discriminator = object(), object()
    for _ in range(5):
        loop.train(discriminator)
        loop.train(generator)
    assert loop.clock.iterations == 5


class ManualLoop(Loop):
    """A loop without loader and optimizer: modules are called, then backward, then the script updates parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.criterion = object(), object()

    def call(self, module: object, *, evaluated: bool = False) -> None:
        self.seen.called(module, evaluated=evaluated)
        self.seen.work(evaluated=evaluated)

    def backward(self) -> None:
        self.seen.backward()
        self.seen.work(trained=True)

    def iterate(self) -> None:
        self.call(self.model)
        self.call(self.criterion)
        self.backward()


def test_without_loader_and_optimizer_the_module_that_came_first_begins_iterations() -> None:
    loop = ManualLoop()
    for _ in range(5):
        loop.iterate()
    assert loop.clock.iterations == 4  # the last one has not ended


def test_validation_ends_an_iteration_and_is_none() -> None:
    loop = ManualLoop()
    for _ in range(3):
        loop.iterate()
    for _ in range(10):
        loop.call(loop.model, evaluated=True)
    assert loop.clock.iterations == 3
    for _ in range(3):
        loop.iterate()
    assert loop.clock.iterations == 5


def test_teacher_without_gradients_belongs_to_the_iteration() -> None:
    loop, teacher = ManualLoop(), object()
    for _ in range(4):
        loop.call(teacher, evaluated=True)
        loop.iterate()
    loop.call(teacher, evaluated=True)
    loop.call(loop.model)
    assert loop.clock.iterations == 4


def test_another_module_begins_iterations_when_the_first_one_is_not_called_any_more() -> None:
    loop = ManualLoop()
    loop.iterate()
    loop.model = object()
    for _ in range(MOST_BACKWARDS + 4):
        loop.call(loop.model)
        loop.backward()
    assert loop.clock.iterations == 5


def test_backward_alone_tells_iterations_of_functions_apart() -> None:
    loop = ManualLoop()
    for _ in range(4):
        loop.backward()
    assert loop.clock.iterations == 3


def test_modules_tell_nothing_where_an_optimizer_may_step_later() -> None:
    loop = ManualLoop()
    loop.seen.made()
    for _ in range(40):  # accumulated gradients
        loop.iterate()
    assert loop.clock.iterations == 0
    loop.seen.stepped(loop.optimizer)
    assert loop.clock.iterations == 1


def test_optimizer_that_never_steps_ends_nothing() -> None:
    loop = ManualLoop()
    loop.seen.made()
    for _ in range(MOST_ACCUMULATED + 10):
        loop.iterate()
    assert loop.clock.iterations == 9  # the first one was long


def test_modules_tell_nothing_within_a_loaders_iterations() -> None:
    loop = ManualLoop()
    loop.epoch(5, object(), loop.iterate)
    assert loop.clock.iterations == 5


def test_a_step_of_the_script_ends_an_iteration_and_nothing_else_does() -> None:
    loop = ManualLoop()
    loop.clock.step()
    for _ in range(4):
        loop.train()
        loop.epoch(2, object(), loop.iterate)
        loop.clock.step()
    loop.seen.close()
    assert loop.clock.iterations == 4


def test_loop_left_with_break_counts_its_last_iteration() -> None:
    loop = Loop()
    loader = object()
    loop.seen.ask(loader)
    loop.train()
    loop.seen.forgotten(id(loader))
    loop.seen.close()
    assert loop.clock.iterations == 1


@pytest.mark.parametrize(("cpu_share", "stage"), [(0.0, LOAD), (0.3, LOAD), (0.6, PREPROCESS), (1.0, PREPROCESS)])
def test_reading_is_load_unless_the_cpu_is_busy(cpu_share: float, stage: int) -> None:
    pytest.importorskip("torch", reason="the hooks into loaders need torch")
    from muri.launcher.automatic.data_loading import ReadKind

    kind = ReadKind()
    for _ in range(5):
        kind.add(0.1, 0.1 * cpu_share)
    assert kind.stage == stage


def test_reading_keeps_its_kind_between_the_thresholds() -> None:
    pytest.importorskip("torch", reason="the hooks into loaders need torch")
    from muri.launcher.automatic.data_loading import RECENT_FETCHES, ReadKind

    kind = ReadKind()
    kind.add(0.1, 0.09)
    for _ in range(2 * RECENT_FETCHES):
        kind.add(0.1, 0.042)
    assert kind.stage == PREPROCESS
    for _ in range(2 * RECENT_FETCHES):
        kind.add(0.1, 0.02)
    assert kind.stage == LOAD


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, True), ({"MURI_AUTOMATIC": "1"}, True), ({"MURI_AUTOMATIC": "0"}, False)]
)
def test_environment_turns_hooks_off(environment: dict[str, str], expected: bool) -> None:
    assert stages_wanted(environment) is expected
