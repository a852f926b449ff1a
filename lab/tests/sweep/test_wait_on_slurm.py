"""How long a sweep waits for its tasks on Slurm, in virtual time."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from virtual_clock import VirtualClock

from muri_lab.sweep import on_slurm


def tasks_in(folder: Path) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(job_id=f"7_{number}", paths=SimpleNamespace(result_pickle=folder / f"{number}"))
        for number in range(2)
    ]


def wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, in_queue_s: float, *results_s: float
) -> tuple[float, list[int]]:
    """How long a wait takes for tasks that leave the queue at a time, and which it has seen to the end."""
    clock, ended, asked = VirtualClock(), list[int](), list[float]()
    tasks = tasks_in(folder)

    def in_queue(_: object) -> bool:
        asked.append(clock())
        return clock() < in_queue_s

    def write() -> None:
        for task, at_s in zip(tasks, results_s, strict=False):
            clock.sleep(at_s - clock())
            task.paths.result_pickle.touch()

    monkeypatch.setattr(on_slurm, "_in_queue", in_queue)
    clock.start(write)
    on_slurm._wait(tasks, lambda index, share: ended.append(index), clock)
    assert asked == [10.0 * number for number in range(1, len(asked) + 1)]
    return clock(), ended


def test_the_wait_ends_with_the_last_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(tmp_path, monkeypatch, 1000.0, 12.5, 99.5) == (101.0, [0, 1])


def test_a_result_may_come_later_than_the_end_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(tmp_path, monkeypatch, 15.0, 12.5, 44.5) == (46.0, [0, 1])


def test_the_wait_for_a_cancelled_task_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(tmp_path, monkeypatch, 15.0, 12.5) == (50.0, [0])
