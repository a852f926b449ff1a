"""The monitor: a node's use by everybody, and each job's part of it by its processes; in virtual time."""

import os
from types import SimpleNamespace

import psutil
import pytest
from fake_nvml import Device, FakeNvml

from muri.profiler import usage as monitor_module
from muri.profiler.usage import EVERY_S, HostReading, Monitor

SCRIPT, IDLE = 101, 102
JOBS = {"1": [SCRIPT], "2": [IDLE]}


class Machine:
    """Usage of a node and the processes of its jobs so far; time passes only where a test says so."""

    def __init__(self):
        self.now_s, self.look_costs_s, self.thread_s = 1000.0, 0.0, 0.0
        self.cpu = psutil.cpu_times()
        self.disk_mib = self.network_mib = 100.0
        self.jobs = {SCRIPT: HostReading(5.0, 0.5, 100.0), IDLE: HostReading(5.0, 0.2, 0.0)}

    def reader(self):
        followed = set()
        return SimpleNamespace(pids=followed, follow=followed.update, read=lambda: self.jobs[min(followed)])

    def cpu_times(self):
        self.thread_s += self.look_costs_s
        return self.cpu

    @property
    def clock(self):
        return SimpleNamespace(perf_counter=lambda: self.now_s, thread_time=lambda: self.thread_s)


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(monitor_module, "time", made.clock)
    monkeypatch.setattr(monitor_module, "HostReader", made.reader)
    monkeypatch.setattr(monitor_module, "psutil", SimpleNamespace(
        cpu_times=made.cpu_times, virtual_memory=psutil.virtual_memory))  # fmt: skip
    monkeypatch.setattr(monitor_module, "node_disk_mib", lambda: made.disk_mib)
    monkeypatch.setattr(monitor_module, "node_network_mib", lambda: made.network_mib)
    return made


def test_each_job_is_to_blame_for_what_its_processes_use(machine):
    monitor = Monitor(FakeNvml())
    assert monitor.look(JOBS) is None  # rates come with the second look
    machine.now_s += EVERY_S
    busy = machine.cpu
    machine.cpu = busy._replace(user=busy.user + 30, guest=busy.guest + 9, idle=busy.idle + 70, iowait=busy.iowait + 5)
    machine.disk_mib, machine.network_mib = 300.0, 150.0
    machine.jobs[SCRIPT] = HostReading(25.0, 0.75, 110.0)
    use = monitor.look(JOBS)
    assert (use.node.cpu_cores, use.node.disk_mib_per_s, use.node.network_mib_per_s) == pytest.approx((3, 20, 5))
    assert use.node.cpu_count >= 1
    assert use.node.mem_gib > 0
    script, idle = use.jobs["1"], use.jobs["2"]
    assert (script.cpu_cores, script.mem_gib, script.disk_mib_per_s) == (2.0, 0.75, 1.0)
    assert (idle.cpu_cores, idle.mem_gib, idle.disk_mib_per_s) == (0.0, 0.2, 0.0)


def test_it_looks_no_more_often_than_it_may_and_at_once_where_a_job_comes_or_goes(machine):
    monitor = Monitor(FakeNvml())
    monitor.look(JOBS)
    machine.now_s += EVERY_S - 1
    assert monitor.look(JOBS) is None
    use = monitor.look({"1": [SCRIPT]})
    assert set(use.jobs) == {"1"}
    machine.now_s += 1
    use = monitor.look(JOBS)
    assert use.jobs["2"].cpu_cores is None  # nothing is known of the time before it came
    machine.look_costs_s = 0.03
    machine.now_s += EVERY_S
    assert monitor.look(JOBS) is not None
    machine.now_s += 29
    assert monitor.look(JOBS) is None  # dear looks are rare: 0.1 % of a core
    machine.now_s += 1
    assert monitor.look(JOBS) is not None


def test_gpus_are_shared_out_by_process_and_counted_in_whole(machine):
    first = Device("GPU-a", utilization=80, used_mib=3072, minor=2, processes={SCRIPT: 1 << 30, 4: 1 << 30},
                   samples=[(5, SCRIPT, 30), (6, SCRIPT, 50), (6, 4, 20)])  # fmt: skip
    second = Device("GPU-b", utilization=10, used_mib=1024, minor=3, processes={IDLE: 1 << 29})
    library = FakeNvml(first, second)
    monitor = Monitor(library)
    monitor.look(JOBS)
    machine.now_s += EVERY_S
    first.samples.append((9, SCRIPT, 90))
    use = monitor.look(JOBS)
    assert {number: (gpu.utilization, gpu.mem_gib) for number, gpu in use.node.gpus.items()} == {
        2: (0.8, 3.0), 3: (0.1, 1.0)}  # fmt: skip
    assert (use.jobs["1"].gpu_mem_gib, use.jobs["2"].gpu_mem_gib) == (1.0, 0.5)
    assert use.jobs["1"].gpu_utilization == pytest.approx(0.9)  # samples that were read do not count again
    assert use.jobs["2"].gpu_utilization == 0.0
    monitor.close()
    assert library.open == 0


def test_what_cannot_be_read_is_none_and_the_rest_goes_on(machine):
    refuses = {"samples": FakeNvml.NVML_ERROR_NOT_SUPPORTED, "utilization": FakeNvml.NVML_ERROR_NOT_SUPPORTED}
    monitor = Monitor(FakeNvml(Device("GPU-a", refuses=refuses, processes={SCRIPT: 1 << 30})))
    without = Monitor(FakeNvml())
    assert list(without.notes) == ["the NVIDIA driver finds no GPU on this node"]
    monitor.look(JOBS)
    without.look(JOBS)
    machine.now_s += EVERY_S
    use = monitor.look(JOBS)
    assert (use.node.gpus[0].utilization, use.node.gpus[0].mem_gib) == (None, 1.0)
    assert (use.jobs["1"].gpu_utilization, use.jobs["1"].gpu_mem_gib) == (None, 1.0)
    use = without.look(JOBS)
    assert use.jobs["1"].gpu_mem_gib is None
    assert use.to_dict()["node"]["gpus"] == {}


def test_real_processes_are_read_and_one_that_ended_costs_the_others_nothing(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(monitor_module, "time", machine.clock)
    monitor, jobs = Monitor(FakeNvml()), {"1": [os.getpid()], "2": [2**22 + 1]}  # above the largest process id
    monitor.look(jobs)
    machine.now_s += EVERY_S
    use = monitor.look(jobs)
    assert use.jobs["1"].mem_gib > 0.003
    assert (use.jobs["2"].mem_gib, use.jobs["2"].gpu_mem_gib) == (None, None)
    assert use.node.cpu_cores >= 0
    assert use.node.network_mib_per_s >= 0
