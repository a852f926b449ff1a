"""Use of real processes: CPU, memory, disk, and a thread that delays no other."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from polling import until

from muri.profiler import usage as usage_module
from muri.profiler.usage import HostReader, HostReading, Sample, Sampler, Usage

BURN = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass\n"


def start(code):
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def go_on(process):
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()


def cpu_s(usage):
    return sum(sample.cpu_cores * sample.over_s for sample in usage)


def test_cpu_of_children_counts_also_when_they_have_ended(monkeypatch):
    monkeypatch.setattr(usage_module, "SAMPLE_EVERY_S", 0.05)
    child = BURN.format(s=0.3)
    code = f"import subprocess, sys\ninput()\nsubprocess.run([sys.executable, '-c', {child!r}])\n"
    with start(code + "print(1, flush=True)\ninput()") as process:
        with Sampler(process.pid) as running:
            until(lambda: running._before is not None, "the first sample")  # what is used from now on counts
            go_on(process)  # the child has ended then
        usage = running.stop()
        all_s = sum(psutil.Process(process.pid).cpu_times()[:4])
        process.communicate(b"\n")
    assert 0.28 <= round(cpu_s(usage), 6) <= round(all_s, 6)
    assert usage.peak("host_mem_gib") > 0.003


def test_a_process_that_has_ended_has_no_known_memory():
    with start("") as process:
        process.stdout.read()
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "its end")
        assert HostReader(process.pid).read().mem_gib is None


def test_a_child_whose_parent_ended_is_still_followed():
    child = "import sys; sys.stdin.readline()\n" + BURN.format(s=0.2) + "print(2, flush=True); sys.stdin.readline()"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\nprint(1, flush=True)\ninput()"
    with start(code) as process:
        process.stdout.readline()
        reader = HostReader(process.pid)
        before = reader.read()
        assert len(reader.pids) == 2
        parent_s = sum(psutil.Process(process.pid).cpu_times()[:2])
        process.send_signal(9)
        process.wait()
        go_on(process)
        after = reader.read()
        process.stdin.close()
    assert after.cpu_s - before.cpu_s >= 0.2 - parent_s - 0.03  # in steps of 0.01


def test_a_total_does_not_fall_while_an_ended_child_is_not_waited_for(monkeypatch):
    used_s, read_mib = iter([3.0, 1.0, 4.0]), iter([3, 1, 4])
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: (next(used_s), 0.0, 0.0, 0.0))
    monkeypatch.setattr(
        psutil.Process,
        "io_counters",
        lambda self: SimpleNamespace(read_bytes=next(read_mib) << 20, write_bytes=1 << 20),
    )
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    reader = HostReader(os.getpid())
    found = [reader.read() for _ in range(3)]
    assert [reading.cpu_s for reading in found] == [3.0, 3.0, 4.0]
    assert [reading.disk_mib for reading in found] == [4.0, 4.0, 5.0]


def test_given_processes_are_counted_from_then_on_and_stay_in_the_totals_after_their_end(monkeypatch):
    used_s = {1: 5.0, 2: 100.0, 3: 40.0}

    class Process:
        def __init__(self, pid):
            self.pid = pid

        def cpu_times(self):
            if self.pid not in used_s:
                raise psutil.NoSuchProcess(self.pid)
            return (used_s[self.pid], 0.0, 0.0, 0.0)

        def io_counters(self):
            return SimpleNamespace(read_bytes=int(self.cpu_times()[0]) << 20, write_bytes=0)

        def memory_info(self):
            return SimpleNamespace(rss=1 << 20)

        def memory_full_info(self):
            return SimpleNamespace(rss=1 << 20, pss=1 << 20)

        def children(self, recursive):
            return []

    monkeypatch.setattr(psutil, "pids", lambda: [*used_s])
    monkeypatch.setattr(psutil, "Process", Process)
    reader = HostReader(1)
    assert reader.read().cpu_s == 5.0
    reader.follow([1, 2])
    assert reader.read().cpu_s == 5.0  # earlier use is not of this time
    used_s[1], used_s[2] = 6.0, 103.0
    assert reader.read().cpu_s == 9.0
    del used_s[2]
    reader.follow([1, 3])
    assert reader.read().cpu_s == 9.0
    used_s[3] = 41.0
    found = reader.read()
    assert (found.cpu_s, found.disk_mib) == (10.0, 10.0)


def test_memory_that_processes_share_counts_once():
    code = (
        "import os, time\ndata = bytearray(os.urandom(1 << 20)) * 200\n"
        "for _ in range(3):\n    if os.fork() == 0:\n        time.sleep(600)\n        os._exit(0)\n"
        "print(1, flush=True)\ninput()"
    )
    with start(code) as process:
        process.stdout.readline()
        found = HostReader(process.pid).read()
        children = [item for item in psutil.Process(process.pid).children() if item.kill() is None]
        process.communicate(b"\n")
    assert len(children) == 3
    assert 0.18 < found.mem_gib < 0.3  # four times that is resident


def test_without_permission_disk_is_unknown_from_then_on_and_memory_is_estimated(monkeypatch):
    def refuse(self):
        raise psutil.AccessDenied(self.pid)

    with start("input()") as child:
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "io_counters", refuse)
            patched.setattr(psutil.Process, "memory_full_info", refuse)
            reader = HostReader(os.getpid())
            assert reader.read().disk_mib is None
            assert reader.read().mem_gib > 0.01
        assert reader.read().disk_mib is None  # totals without one of the processes would be a false rate
        child.communicate(b"\n")


def test_an_ended_process_gives_no_error():
    process = start("pass")
    process.communicate()
    with Sampler(process.pid) as sampler:
        found = sampler.stop()
    assert cpu_s(found) == 0
    assert sampler.stop() == found


def test_the_thread_keeps_no_process_alive_and_delays_no_fork():
    code = (
        "import os, sys\nfrom muri.profiler.usage import Sampler\n"
        "running = Sampler(os.getpid()).__enter__()\npid = os.fork()\n"
        "pid == 0 and os._exit(7 if not running._thread.is_alive() else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


def test_costly_samples_are_taken_less_often(monkeypatch):
    """On a clock that moves only by a sample's own time: 20 ms of CPU time pay for 5 s."""
    clock_s, paused_s = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: clock_s[0], thread_time=lambda: clock_s[0])
    monkeypatch.setattr(usage_module, "time", clock)

    def slow_read(self):
        clock_s[0] += 0.02
        return HostReading(0.0, 0.1, 0.0)

    def wait(pause_s):
        paused_s.append(pause_s)
        return len(paused_s) > 3

    monkeypatch.setattr(HostReader, "read", slow_read)
    monkeypatch.setattr(Sampler, "_open_gpus", lambda self: None)
    running = Sampler(os.getpid())
    monkeypatch.setattr(running._ended, "wait", wait)
    monkeypatch.setattr(running._thread, "join", lambda _: None)
    running._run()
    assert paused_s[0] == 0.1  # the first reading is dear and not counted
    assert paused_s[1:] == pytest.approx([5.0 - 0.02, 10.0 - 0.04, 15.0 - 0.06])
    assert len(running.stop()) == 4


def test_a_failing_reader_ends_sampling_and_is_logged(monkeypatch, caplog):
    def fail(self):
        raise ValueError("nonsense in /proc")

    monkeypatch.setattr(HostReader, "read", fail)
    with Sampler(os.getpid()) as running:
        until(lambda: not running._thread.is_alive(), "the end of the thread")
    assert "sampling ended early: ValueError: nonsense in /proc" in caplog.text


def test_means_weigh_by_time_and_leave_out_what_was_not_read():
    usage = Usage((Sample(1.0, 1.0, cpu_cores=1.0), Sample(4.0, 3.0, cpu_cores=2.0, gpu_utilization=0.5)))
    assert usage.mean("cpu_cores") == pytest.approx(1.75)
    assert usage.mean("gpu_utilization") == 0.5
    assert usage.mean("host_mem_gib") is None
    assert usage.peak("cpu_cores") == 2.0
    assert usage.since(1.0).mean("cpu_cores") == 2.0
    assert Usage().mean("cpu_cores") is None
