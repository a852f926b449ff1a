"""When a script is saved, and how long it waits for an earlier run of its job: real files, virtual time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from virtual_clock import VirtualClock

from muri.launcher.job.stage_clock import StageClock
from muri.launcher.script.checkpoint import RETRY_S, BoundaryCheckpointer, Functions
from muri.launcher.script.checkpoint_store import LOCK_TIMEOUT_S, CheckpointError, CheckpointStore, ManyRanks, OneRank

ITERATION_S = 0.5


class Script:
    """A loop that marks no stages, with iterations of half a second.

    Attributes:
        saved_s: When it was asked to write its state.
        broken: Its function that saves fails.
        silent: It writes nothing.
        store: Its checkpoints.
    """

    def __init__(self, place: Path) -> None:
        self.clock = VirtualClock()
        self.saved_s: list[float] = []
        self.broken = self.silent = False
        self.store = CheckpointStore(place, self.clock)
        functions = Functions(self._save, lambda path: None, every_s=30.0, every_iterations=None)
        self.checkpointer = BoundaryCheckpointer(functions, self.store, StageClock(), OneRank(), self.clock)

    def run_until(self, end_s: float) -> bool:
        """Whether it has to stop before that."""
        while self.clock() < end_s:
            self.clock.sleep(ITERATION_S)
            if self.checkpointer.own_boundary():
                return True
        return False

    def close(self) -> None:
        """Give the directory back."""
        self.checkpointer.close()

    def _save(self, path: Path) -> None:
        self.saved_s.append(self.clock())
        if self.broken:
            raise OSError(28, "No space left on device")
        if not self.silent:
            path.write_text("state")


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.close()


def test_a_script_is_saved_at_its_interval(script: Script) -> None:
    assert not script.run_until(100.0)
    assert script.saved_s == [30.0, 60.0, 90.0]


def test_a_save_that_failed_is_tried_again_after_a_while(script: Script) -> None:
    script.broken = True
    script.run_until(55.0)
    script.broken = False
    script.run_until(100.0)
    assert script.saved_s == [30.0, 30.0 + RETRY_S, 30.0 + 2 * RETRY_S, 30.0 + 3 * RETRY_S, 60.0 + 3 * RETRY_S]


def test_a_save_that_writes_nothing_is_no_checkpoint(script: Script) -> None:
    script.run_until(31.0)
    (saved,) = script.store.iterations()
    script.silent = True
    script.run_until(61.0)
    assert (script.store.iterations(), script.saved_s) == ([saved], [30.0, 60.0])


def test_a_script_that_cannot_be_saved_goes_on_until_it_can(script: Script) -> None:
    script.broken = True
    script.run_until(7.0)
    script.checkpointer.stop_asked = True
    assert not script.run_until(7.0 + RETRY_S)
    script.broken = False
    assert script.run_until(100.0)
    assert script.clock() == 7.5 + RETRY_S
    assert script.saved_s == [7.5, 7.5 + RETRY_S]


def test_a_run_waits_for_the_last_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    clock, earlier = VirtualClock(), CheckpointStore(tmp_path)

    def end() -> None:
        clock.sleep(42.0)
        earlier.close()

    clock.start(end)
    CheckpointStore(tmp_path, clock).close()
    assert 42.0 <= clock() < 42.2


def test_a_run_does_not_wait_for_ever(tmp_path: Path) -> None:
    clock, earlier = VirtualClock(), CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="another process keeps its checkpoints"):
        CheckpointStore(tmp_path, clock)
    assert LOCK_TIMEOUT_S <= clock() < LOCK_TIMEOUT_S + 0.2
    earlier.close()


class Beside:
    """PyTorch's process group as this rank sees it, with one other rank that always brings the same numbers."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, *others: int) -> None:
        self.others = torch.tensor(others)

    def new_group(self, backend: str) -> None: ...

    def get_rank(self) -> int:
        return 1

    def get_world_size(self) -> int:
        return 2

    def all_reduce(self, tensor: torch.Tensor, op: object, group: None) -> None:
        assert op == self.ReduceOp.MAX
        torch.maximum(tensor, self.others, out=tensor)


def test_ranks_resume_from_what_all_of_them_have() -> None:
    assert [ManyRanks(Beside(-20)).common(mine) for mine in (30, 20, 10, -1)] == [20, 20, 10, -1]


def test_a_checkpoint_that_one_rank_lacks_is_none() -> None:
    lacks_it, has_it = ManyRanks(Beside(1)), ManyRanks(Beside(0))
    assert [lacks_it.all_true(True), has_it.all_true(False), has_it.all_true(True)] == [False, False, True]
