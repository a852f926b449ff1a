"""The monitor: a node's use by everybody, and each job's part of it by its processes."""

import subprocess
import sys
import time

import psutil
import pytest
from fake_nvml import NVML_ERROR_NOT_SUPPORTED, Device, FakeNvml

from muri.profiler.resource_usage import monitor as monitor_module
from muri.profiler.resource_usage.monitor import Monitor

BUSY = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "while True: pass"])]
file = open(sys.argv[1], "wb", buffering=0)
print("at work", flush=True)
while True:
    file.write(bytes(4 << 20))
    file.flush()
    time.sleep(0.05)
"""


@pytest.fixture
def busy(tmp_path):
    """A script that writes a file, with a child that keeps a core busy; and one that sleeps."""
    script = subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path / "out")], stdout=subprocess.PIPE)
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert script.stdout.readline() == b"at work\n"
    yield {"101": script.pid, "102": idle.pid}
    for process in (*psutil.Process(script.pid).children(), script, idle):
        process.kill()
    script.wait()
    idle.wait()


def looks(monitor: Monitor, jobs, until):
    """Look until the figures are there; the machine may be busy with other things."""
    found = monitor.look(jobs)
    deadline_s = time.monotonic() + 60
    while found is None or not until(found):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.2)
        found = monitor.look(jobs) or found
    return found


def test_each_job_is_to_blame_for_what_its_processes_use(busy, monkeypatch):
    monkeypatch.setattr(monitor_module, "EVERY_S", 0.1)
    monitor = Monitor(FakeNvml())
    use = looks(monitor, busy, lambda seen: (seen.jobs["101"].cpu_cores or 0) > 0.1)
    assert use.jobs["102"].cpu_cores < use.jobs["101"].cpu_cores
    assert use.jobs["101"].mem_gib > 0.003
    assert use.node.cpu_cores >= 0.5 * use.jobs["101"].cpu_cores
    assert use.node.cpu_count >= 1
    assert use.node.mem_gib > 0
    assert use.node.network_mib_per_s >= 0
    looks(monitor, busy, lambda seen: (seen.jobs["101"].disk_mib_per_s or 0) > 0)
    monitor.close()


def test_it_looks_no_more_often_than_it_may(busy):
    monitor = Monitor(FakeNvml())
    assert monitor.look(busy) is None  # the first look: rates come with the second
    assert monitor.look(busy) is None  # it is not time
    assert set(monitor.look({"101": busy["101"]}).jobs) == {"101"}  # somebody has gone


def test_gpus_are_shared_out_by_process_and_counted_in_whole(busy, monkeypatch):
    monkeypatch.setattr(monitor_module, "EVERY_S", 0.1)
    script, idle = busy["101"], busy["102"]
    first = Device("GPU-a", utilisation=80, used_mib=3072, minor=2, processes={script: 1 << 30, 4: 1 << 30},
                   samples=[(5, script, 30), (6, script, 50), (6, 4, 20)])  # fmt: skip
    second = Device("GPU-b", utilisation=10, used_mib=1024, minor=3, processes={idle: 1 << 29})
    monitor = Monitor(FakeNvml(first, second))
    use = looks(monitor, busy, lambda seen: True)
    assert {number: (gpu.utilisation, gpu.mem_gib) for number, gpu in use.node.gpus.items()} == {
        2: (0.8, 3.0), 3: (0.1, 1.0)}  # fmt: skip
    assert (use.jobs["101"].gpu_mem_gib, use.jobs["102"].gpu_mem_gib) == (1.0, 0.5)
    first.samples.append((9, script, 90))
    use = looks(monitor, busy, lambda seen: seen.jobs["101"].gpu_utilisation)
    assert use.jobs["101"].gpu_utilisation == pytest.approx(0.9)  # samples that were read do not count again
    assert use.jobs["102"].gpu_utilisation == 0.0


def test_what_cannot_be_read_is_none_and_the_rest_goes_on(busy, monkeypatch):
    monkeypatch.setattr(monitor_module, "EVERY_S", 0.1)
    refuses = {"samples": NVML_ERROR_NOT_SUPPORTED, "utilisation": NVML_ERROR_NOT_SUPPORTED}
    monitor = Monitor(FakeNvml(Device("GPU-a", refuses=refuses, processes={busy["101"]: 1 << 30})))
    use = looks(monitor, busy, lambda seen: True)
    assert (use.node.gpus[0].utilisation, use.node.gpus[0].mem_gib) == (None, 1.0)
    assert (use.jobs["101"].gpu_utilisation, use.jobs["101"].gpu_mem_gib) == (None, 1.0)
    without = Monitor(FakeNvml())
    assert list(without.notes) == ["the NVIDIA driver finds no GPU on this node"]
    use = looks(without, busy, lambda seen: True)
    assert use.node.gpus == {}
    assert use.jobs["101"].gpu_mem_gib is None
    assert use.to_dict()["node"]["gpus"] == {}


def test_a_job_that_ended_costs_the_others_nothing(busy, monkeypatch):
    monkeypatch.setattr(monitor_module, "EVERY_S", 0.1)
    monitor = Monitor(FakeNvml())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    use = looks(monitor, {**busy, "103": ended.pid}, lambda seen: True)
    assert use.jobs["103"].gpu_mem_gib is None
    use = looks(monitor, {"102": busy["102"]}, lambda seen: set(seen.jobs) == {"102"})
    assert use.jobs["102"].mem_gib > 0
