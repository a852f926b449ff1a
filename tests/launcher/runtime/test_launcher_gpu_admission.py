"""Who is let in by GPU memory, which the driver tells, and that errors for want of it cost only their member."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from launcher_harness import LOOP, Launcher, ends
from polling import until

from muri.clock import MIB
from muri.group_spec import MemberSpec
from muri.launcher.runtime.admission import CONTEXT_GIB, START_S, MemoryAdmission, total_gib
from muri.launcher.runtime.member_table import MemberTable


class Group:
    """Members that run, by the isolation that they have."""

    def __init__(self, need_gib: dict[str, float], device_gib: float | None) -> None:
        self.need_gib, self.device_gib = need_gib, device_gib
        self.sessions: dict[str, SimpleNamespace] = {}
        self.now_s = 0.0
        self.measured_gib: dict[str, float] = {}
        self.threads = self
        self.admission = MemoryAdmission(cast(MemberTable, self), lambda: self.now_s)

    def running(self) -> list[SimpleNamespace]:
        return list(self.sessions.values())

    def spec_of(self, member: str) -> MemberSpec:
        return MemberSpec(member, gpu_mem_gib=self.need_gib.get(member))

    def gpu_mem_gib(self) -> float | None:
        return self.device_gib

    def measured_gpu_mem_gib(self) -> dict[str, float]:
        return self.measured_gib

    def start(self, member: str, isolation: str = "thread") -> None:
        self.sessions[member] = SimpleNamespace(member=member, isolation=isolation)


NEED = {"1": 4.0, "2": 3.0, "3": 1.0}


def test_member_that_does_not_fit_beside_the_others_is_refused_with_figures() -> None:
    group = Group(NEED, 7.0)
    group.start("1")
    refusal = group.admission.refusal("2")
    assert refusal is not None
    assert refusal["kind"] == "memory"
    assert "job 2 needs 3.0 GiB" in refusal["reason"]
    assert "4.5 of 7.0 GiB" in refusal["reason"]
    assert group.admission.refusal("3") is None


@pytest.mark.parametrize(
    ("need_gib", "device_gib", "runs", "measured_gib", "asks", "fits"),
    [
        (NEED, 7.0 + CONTEXT_GIB, "thread", {}, "2", True),
        (NEED, 7.0 + CONTEXT_GIB, "process", {}, "2", False),
        (NEED, 7.5, "thread", {"1": 4.5}, "2", False),
        ({"1": 40.0}, 8.0, "", {}, "1", True),
        (NEED, 1.0, "thread", {}, "9", True),
        (NEED, None, "thread", {}, "2", True),
    ],
    ids=["exact fit", "a process has a context of its own", "measured", "the first", "unknown need", "unknown device"],
)
def test_who_is_let_in_beside_member_1(need_gib, device_gib, runs, measured_gib, asks, fits) -> None:
    group = Group(need_gib, device_gib)
    group.measured_gib |= measured_gib
    if runs:
        group.start("1", runs)
    assert (group.admission.refusal(asks) is None) == fits


def test_two_that_come_at_once_are_not_both_let_in() -> None:
    group = Group({"1": 5.0, "2": 5.0}, 8.0)
    assert group.admission.refusal("1") is None
    assert group.admission.refusal("2") is not None
    group.start("1")
    assert group.admission.refusal("2") is not None
    del group.sessions["1"]
    assert group.admission.refusal("2") is None


def test_a_member_that_was_let_in_and_does_not_start_gives_its_memory_up() -> None:
    group = Group({"1": 5.0, "2": 5.0}, 8.0)
    assert group.admission.refusal("1") is None
    group.now_s += START_S - 1
    assert group.admission.refusal("2") is not None
    group.now_s += 1
    assert group.admission.refusal("2") is None


HUNGRY = """
    import muri
    kept = bytearray(300 << 20)
    with muri.stage("propagate"):
        more = {more}
"""


WANTS = {
    "bytearray(1 << 50)": "MemoryError",
    "__import__('torch').empty(1 << 50)": "can't allocate memory",
    "(_ for _ in ()).throw(__import__('torch').OutOfMemoryError('CUDA out of memory'))": "OutOfMemoryError",
}


def test_want_of_memory_ends_one_member_and_its_memory_goes_back(launcher: Launcher) -> None:
    runtime = launcher.threads("101", "102", "103", "104", options=("--preload", "torch"))
    assert ends(launcher.member("104", launcher.script("import torch", "warm.py"))) == 0
    memory = psutil.Process(runtime.pid).memory_info
    before = memory().rss
    other = launcher.member("104", launcher.script(LOOP, "loop.py"), 200)
    for job, (more, error) in zip(("101", "102", "103"), WANTS.items(), strict=True):
        assert ends(launcher.member(job, launcher.script(HUNGRY.format(more=more)))) == 1
        assert error in launcher.err(job)
        until(lambda: memory().rss < before + 100 * MIB, "the memory to go back")
    assert ends(other) == 0
    assert "fault" not in launcher.status()


DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal; }
int cuDeviceTotalMem_v2(size_t *total, int device) { *total = (size_t)80 << 30; return device == 7 ? 0 : 101; }
"""


def make_driver(folder: Path, error: int) -> None:
    source = folder / "driver.c"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", f"-DINIT={error}", "-o", folder / "libcuda.so.1", source], check=True)


@pytest.mark.parametrize(("error", "found_gib"), [(0, 80.0), (100, None)])
def test_the_driver_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, found_gib: float | None
) -> None:
    make_driver(tmp_path, error)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert total_gib() == found_gib


def test_refused_member_goes_back_to_the_queue(launcher: Launcher) -> None:
    make_driver(launcher.folder, 0)
    launcher.environment["LD_LIBRARY_PATH"] = str(launcher.folder)
    launcher.threads("101", "102", options=("--gpu-mem-gib", "101=60,102=60"))
    script = launcher.script("import time; print('started', flush=True); time.sleep(1000)")
    launcher.member("101", script)
    launcher.says("101")
    launcher.member("102", script)
    until(lambda: "requeueing job 102" in launcher.err("102"), "the refusal")
    assert "job 102 needs 60.0 GiB of GPU memory" in launcher.err("102")
    assert launcher.out("102") == ""
