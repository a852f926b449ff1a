"""Hand-over of the GPU by events, against a stand-in for torch.cuda. A real GPU was not at hand."""

import sys
from types import SimpleNamespace

import pytest
from fake_cuda import FakeCuda, GpuMember, Granting, OutOfMemoryError, module

from muri.launcher.job.stage_clock import StageClock
from muri.launcher.shared_process import gpu
from muri.launcher.shared_process.gpu import Device

GPU = 2


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(cuda: FakeCuda) -> Device:
    return Device(cuda)


def test_kernels_of_members_do_not_overlap_and_the_host_does_not_wait(device: Device, cuda: FakeCuda) -> None:
    one, two = GpuMember(device, cuda, "1"), GpuMember(device, cuda, "2")
    one.iterate(0.3)
    two.iterate(0.2)
    assert cuda.host_waits_s == []
    assert one.pace.stream.spans == [(0.0, 0.3)]
    assert two.pace.stream.spans == [(0.3, pytest.approx(0.5))]
    assert cuda.default.spans == []


def test_member_runs_ahead_by_one_iteration_at_most(device: Device, cuda: FakeCuda) -> None:
    one = GpuMember(device, cuda, "1")
    for _ in range(5):
        one.iterate(1.0)
    assert one.pace.stream.end_s - cuda.now_s == pytest.approx(1.0)
    assert sum(cuda.host_waits_s) == pytest.approx(4.0)


def test_times_come_from_the_gpu_one_iteration_later(device: Device, cuda: FakeCuda) -> None:
    one, two = GpuMember(device, cuda, "1"), GpuMember(device, cuda, "2")
    for _ in range(4):
        one.iterate(0.3)
        two.iterate(0.2)
    assert [record.stage_s[GPU] for record in one.records] == pytest.approx([0.0, 0.3, 0.3])
    assert [record.stage_s[GPU] for record in two.records] == pytest.approx([0.0, 0.2, 0.2])
    assert two.records[1].wait_s[GPU] == pytest.approx(0.3)
    assert one.clock.stage_s[GPU] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("interval_s", "ahead_s", "unread"), [(0.0, 0.1, 2), (60.0, 1.0, 1)], ids=["far yield points", "close ones"]
)
def test_long_stage_is_never_more_than_two_stretches_ahead_and_close_yield_points_cost_nothing(
    device: Device, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, interval_s: float, ahead_s: float, unread: int
) -> None:
    monkeypatch.setattr(gpu, "MARK_INTERVAL_S", interval_s)
    one = GpuMember(device, cuda, "1")
    one.iterate(1.0, pieces=10)
    assert one.pace.stream.end_s - cuda.now_s == pytest.approx(ahead_s)
    assert len(one.pace._unread) <= unread


def test_graph_capture_sees_no_foreign_events(device: Device, cuda: FakeCuda) -> None:
    one = GpuMember(device, cuda, "1")
    cuda.graph = True
    one.iterate(1.0)
    assert list(device._chunks) == []
    assert len(one.pace._unread) == 0


def test_memory_is_told_apart_by_stream(device: Device, cuda: FakeCuda) -> None:
    one, two = GpuMember(device, cuda, "1"), GpuMember(device, cuda, "2")
    cuda.segments = [
        {"stream": one.pace.stream.cuda_stream, "allocated_size": 1 << 30},
        {"stream": one.pace.stream.cuda_stream, "allocated_size": 1 << 29},
        {"stream": two.pace.stream.cuda_stream, "allocated_size": 1 << 28},
        {"stream": 0, "allocated_size": 1 << 32},
    ]
    for member in (one, two):
        member.iterate(0.1)
        member.clock.end_iteration()
    assert one.pace.gpu_mem_peak_gib == 1.5
    assert two.pace.gpu_mem_peak_gib == 0.25
    assert device.mem_gib == 8.0


STICKY = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


@pytest.mark.parametrize(
    ("error", "sticky"),
    [
        (RuntimeError(STICKY), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("HIP error: unspecified launch failure"), True),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), False),
        (RuntimeError("CUDA error: invalid argument"), False),
        (ValueError(STICKY), False),
        (RuntimeError("expected scalar type Float"), False),
    ],
)
def test_errors_that_end_the_context_are_recognized(error: Exception, sticky: bool, device: Device) -> None:
    assert (gpu.sticky_text(error, None) is not None) == sticky
    assert gpu.sticky_text(error, device) is None, "the device still works"
    device.cuda.broken = STICKY
    assert (gpu.sticky_text(error, device) is not None) == sticky


def test_error_is_recognized_behind_another() -> None:
    error = ValueError("training failed")
    error.__cause__ = RuntimeError(STICKY)
    assert gpu.sticky_text(error, None) == STICKY.splitlines()[0]


def test_device_that_is_only_full_is_not_dead(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device.cuda, "synchronize", full)
    assert not gpu.is_dead(device)


def test_suspects_are_those_whose_work_is_not_known_to_be_done(device: Device, cuda: FakeCuda) -> None:
    members = [GpuMember(device, cuda, name) for name in ("1", "2", "3")]
    members[0].iterate(0.1)
    cuda.now_s = 5.0
    members[1].iterate(0.1)
    members[2].iterate(0.1)
    cuda.broken = STICKY
    assert device.suspects() == ["2", "3"]


def test_the_first_fault_condemns_all_members_and_ends_the_runtime_once(
    device: Device, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.preparation, "device", device)
    for name in ("2", "3"):
        GpuMember(device, cuda, name).iterate(0.1)
    sessions = [SimpleNamespace(member=name, fault=None, exit_code=1, condemned=False) for name in ("1", "2", "3")]
    ends: list[None] = []
    watch = gpu.FaultWatch(lambda: sessions[1:], lambda: ends.append(None))
    watch.session_ended(sessions[0])
    assert (watch.fault, ends, sessions[0].condemned) == (None, [], False), "the device still works"
    sessions[0].fault = cuda.broken = STICKY.splitlines()[0]
    for session in sessions[:2]:
        watch.session_ended(session)
    assert watch.fault == {"cause": STICKY.splitlines()[0], "culprits": ["1", "2", "3"]}
    assert ([session.condemned for session in sessions], ends) == ([True, True, True], [None])


def test_a_process_without_a_gpu_has_no_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", module(cuda))
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    preparation = gpu.Preparation()
    preparation.expect()
    preparation.prepare()
    assert (preparation.ready(), preparation.device) == (None, None)


def test_preparation_makes_a_stream_for_each_session_and_its_threads(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", module(cuda))
    started: list[object] = []
    monkeypatch.setattr("muri.launcher.shared_process.threads_and_processes._at_start", started)
    preparation = gpu.Preparation()
    preparation.prepare()
    monkeypatch.setattr(gpu, "preparation", preparation)
    sessions = [SimpleNamespace(member=name, clock=StageClock(Granting())) for name in ("1", "2")]
    streams = []
    for session in sessions:
        gpu.enter_session(session)  # type: ignore[arg-type]
        streams.append(cuda.current_stream())
    assert len({id(stream) for stream in streams} | {id(cuda.default)}) == 3
    (at_start,) = started
    at_start(sessions[0])  # type: ignore[operator]
    assert cuda.current_stream() is streams[0]


def test_gpu_that_cannot_be_initialized_leaves_sessions_as_they_are(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch", module(cuda))
    cuda.broken = "CUDA driver initialization failed"
    preparation = gpu.Preparation()
    preparation.prepare()
    assert preparation.ready() is None
    assert "cannot be prepared" in caplog.text


def test_memory_goes_back_after_a_session(device: Device, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.preparation, "device", device)
    one = GpuMember(device, cuda, "1")
    one.iterate(1.0)
    gpu.give_memory_back(one.clock)
    assert cuda.now_s == pytest.approx(1.0), "the member's work was waited for"
    assert cuda.emptied == 1
    cuda.broken = STICKY
    one.pace.stream.end_s = 2.0
    gpu.give_memory_back(one.clock)  # a broken device does not keep a session from ending
