"""Stands in for `torch.cuda`: streams, events and time as CUDA defines them, in a model of one GPU.

Work is queued on streams with a duration and done when `advance` moves the clock. An event is done
when everything queued before it on its stream is; a stream that waits for an event starts later.
"""

import threading
from types import SimpleNamespace

from muri.launcher.job.stage_clock import Gate, IterationRecord, StageClock
from muri.launcher.shared_process.gpu import Device, StreamPace
from muri.profiler.records import STAGES


class OutOfMemoryError(RuntimeError):
    """As torch.OutOfMemoryError."""


class Stream:
    """Knows when the work it was given so far ends."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda = cuda
        self.cuda_stream = id(self)
        self.end_s = 0.0
        self.spans: list[tuple[float, float]] = []

    def wait_event(self, event: "Event") -> None:
        """Later work starts after the event."""
        self.end_s = max(self.end_s, event.at_s)

    def synchronize(self) -> None:
        """Wait for the work."""
        self.cuda.wait_until(self.end_s)


class Event:
    """A point on a stream."""

    def __init__(self, cuda: "FakeCuda", **_options: bool) -> None:
        self.cuda = cuda
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        """Behind the stream's work, but not before now."""
        stream.end_s = max(stream.end_s, self.cuda.now_s)
        self.at_s = stream.end_s

    def query(self) -> bool:
        """Whether it is done."""
        self.cuda.check()
        return self.at_s <= self.cuda.now_s

    def synchronize(self) -> None:
        """Wait for it."""
        self.cuda.wait_until(self.at_s)

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds to another event; both must be done."""
        assert self.query()
        assert other.query()
        return (other.at_s - self.at_s) * 1e3


class FakeCuda:
    """The module."""

    OutOfMemoryError = OutOfMemoryError

    def __init__(self) -> None:
        self.now_s = 0.0
        self.host_waits_s: list[float] = []
        self.broken = ""
        self.emptied = 0
        self.graph = False
        self.segments: list[dict[str, object]] = []
        self.default = Stream(self)
        self.local = threading.local()

    def is_available(self) -> bool:
        return True

    def init(self) -> None:
        self.check()

    def get_device_name(self) -> str:
        return "stand-in"

    def Stream(self) -> Stream:  # noqa: N802 (as in torch)
        return Stream(self)

    def Event(self, **options: bool) -> Event:  # noqa: N802 (as in torch)
        return Event(self, **options)

    def current_stream(self) -> Stream:
        return getattr(self.local, "stream", self.default)

    def set_stream(self, stream: Stream) -> None:
        self.local.stream = stream

    def is_current_stream_capturing(self) -> bool:
        return self.graph

    def synchronize(self) -> None:
        self.check()

    def empty_cache(self) -> None:
        self.emptied += 1

    def mem_get_info(self) -> tuple[int, int]:
        return (1 << 30, 8 << 30)

    def memory_snapshot(self) -> list[dict[str, object]]:
        return self.segments

    def check(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def wait_until(self, at_s: float) -> None:
        """The host waits: time goes on."""
        self.check()
        if at_s > self.now_s:
            self.host_waits_s.append(at_s - self.now_s)
            self.now_s = at_s

    def kernel(self, duration_s: float) -> None:
        """Queue work on the calling thread's stream."""
        stream = self.current_stream()
        start_s = max(stream.end_s, self.now_s)
        stream.end_s = start_s + duration_s
        stream.spans.append((start_s, stream.end_s))


def module(cuda: FakeCuda) -> SimpleNamespace:
    """A `torch` that holds it."""
    return SimpleNamespace(cuda=cuda)


class GpuMember:
    """A clock whose GPU stages go to a stream of a stand-in; its arbiter grants everything at once."""

    def __init__(self, device: Device, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.records: list[IterationRecord] = []
        self.pace = StreamPace(device, name)
        self.clock = StageClock(Granting(), now=lambda: cuda.now_s)
        self.clock.on_record = self.records.append
        self.clock.gpu = self.pace

    def iterate(self, kernel_s: float, pieces: int = 1) -> None:
        """One iteration, with yield points between the pieces of its GPU stage."""
        self.pace.enter_thread()
        self.clock.ask_batch()
        self.clock.enter(STAGES.index("propagate"))
        for _ in range(pieces):
            self.cuda.kernel(kernel_s / pieces)
            self.clock.yield_point()
        self.clock.leave()


class Granting(Gate):
    """A gate that never lets anybody wait."""

    asks = True
