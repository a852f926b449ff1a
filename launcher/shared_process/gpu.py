"""Members of one process share a GPU: a stream for each, and the GPU handed over by events.

The token of the stage `propagate` is passed on as soon as a member has queued its kernels. An event at the end of its
work goes with the token; the next holder's stream waits for it on the GPU, so the kernels of two members do not overlap
and no thread waits meanwhile. How far a member may run ahead of the GPU is bounded: one iteration, and one stretch
between two yield points within a long stage. Nothing here imports torch.

After an illegal memory access or a device-side assert, every later call into CUDA fails in the whole process. The
runtime then ends. Its members go back to the queue, whatever their scripts reported meanwhile, and the runtime names
those that may have caused the error, so that they run without partners.
"""

import ctypes
import gc
import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from muri.clock import GIB
from muri.launcher.job.script import chain_of
from muri.launcher.job.stage_clock import GpuTimes, HostPace, StageClock
from muri.launcher.sessions.setup import MemberSession
from muri.launcher.shared_process.state import SessionState
from muri.launcher.shared_process.threads_and_processes import at_thread_start

logger = logging.getLogger("muri.launcher")

MARK_INTERVAL_S: Final = 0.001
"""Yield points closer together than this are one: an event costs some microseconds."""

MEMORY_INTERVAL_S: Final = 5.0
"""How often a member's use of memory is looked up; a look takes milliseconds."""

PREPARATION_LIMIT_S: Final = 120.0

# CUDA's own words for the errors of which it says "leaves the process in an inconsistent state".
_STICKY: Final = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|illegal address|invalid program counter|invalid address space|hardware stack error|uncorrectable ECC error"
    r"|operation not supported on global/shared address space|launch timed out and was terminated"
)
_ACCELERATOR: Final = re.compile(r"(CUDA|HIP) error")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Work that one member queued while it held the token, and the event behind it."""

    member: str
    end: Any


@dataclass(frozen=True, slots=True)
class Interval:
    """A chunk of work in an iteration with times that are not read yet."""

    iteration: int
    asked: Any  # event before the wait for the previous holder's work
    begin: Any  # event behind that wait
    end: Any


class Device:
    """The GPU of the process, by an initialized `torch.cuda`; if members take turns, their kernels must not overlap."""

    def __init__(self, cuda: Any, *, takes_turns: bool = True) -> None:
        self.cuda: Final = cuda
        self._takes_turns = takes_turns
        self._lock = threading.Lock()
        self._chunks: deque[Chunk] = deque()

    @property
    def mem_gib(self) -> float:
        """Memory of the device."""
        return float(self.cuda.mem_get_info()[1]) / GIB

    def event(self) -> Any:
        """Return an event behind all work of the calling thread's stream."""
        event = self.cuda.Event(enable_timing=True, blocking=True)
        event.record(self.cuda.current_stream())
        return event

    def hand_over(self, member: str, end: Any) -> None:
        """Note the end of a member's work, before the token is passed on."""
        with self._lock:
            self._chunks.append(Chunk(member, end))
            while len(self._chunks) > 1 and self._chunks[0].end.query():
                self._chunks.popleft()

    def follow(self) -> None:
        """Let the calling thread's stream wait for the work of the last holder, where members take turns."""
        with self._lock:
            last = self._chunks[-1].end if self._chunks and self._takes_turns else None
        if last is not None:
            self.cuda.current_stream().wait_event(last)

    def suspects(self) -> list[str]:
        """Return the members that may have had work on the GPU when an error occurred, the earliest first."""
        with self._lock:
            return list(dict.fromkeys(chunk.member for chunk in self._chunks))

    def capturing(self) -> bool:
        """Whether the calling thread records a CUDA graph; events of others must not get into it."""
        return bool(self.cuda.is_current_stream_capturing())

    def used_gib(self, stream: Any) -> float:
        """Return the memory in use that was allocated on a stream: the allocator keeps a pool for each."""
        segments = self.cuda.memory_snapshot()
        return float(sum(s["allocated_size"] for s in segments if s["stream"] == stream.cuda_stream)) / GIB


class _Turn(threading.local):
    """A thread's use of the GPU, from its grant until it is passed on."""

    start: tuple[Any, Any] | None = None  # events before and behind the wait for the previous holder's work
    since_s: float = 0.0


class StreamPace(HostPace):
    """One member's use of the GPU; the pace of its clock."""

    counts_host_time = False

    def __init__(self, device: Device, member: str) -> None:
        self._device = device
        self._member = member
        self.stream: Final = device.cuda.Stream()
        self.gpu_mem_peak_gib: float = 0.0
        self._iteration = 0
        self._turn = _Turn()
        self._lock = threading.Lock()
        self._unread: deque[Interval] = deque()
        self._held_s = 0.0
        self._wait_s = 0.0
        self._looked_s = float("-inf")

    def enter_thread(self) -> None:
        """Let the calling thread's work go to the member's stream."""
        self._device.cuda.set_stream(self.stream)

    def before(self) -> None:
        """Wait for the member's own work of earlier iterations; nothing is held meanwhile."""
        self._read(lambda interval: interval.iteration < self._iteration)

    def taken(self) -> None:
        """Order the member's work behind that of the last holder."""
        self._turn.start = None
        if self._device.capturing():
            return
        asked = self._device.event()
        self._device.follow()
        self._turn.start = (asked, self._device.event())
        self._turn.since_s = time.perf_counter()

    def given(self) -> None:
        """Put an event behind the member's work, for the next holder to wait for."""
        start, self._turn.start = self._turn.start, None
        if start is None or self._device.capturing():
            return
        end = self._device.event()
        self._device.hand_over(self._member, end)
        with self._lock:
            asked, begin = start
            self._unread.append(Interval(self._iteration, asked, begin, end))

    def at_yield_point(self) -> bool:
        """Close the stretch of work since the last yield point; False when it is too short to matter.

        The thread waits for the stretch before it, so that the GPU always has one queued and never two.
        """
        if self._turn.start is None or time.perf_counter() - self._turn.since_s < MARK_INTERVAL_S:
            return False
        self.given()
        newest = self._unread[-1] if self._unread else None
        self._read(lambda interval: interval is not newest)
        return True

    def iteration_ended(self) -> GpuTimes:
        """The times read since the last call; those of the iteration that ends come one later."""
        self._iteration += 1
        if time.monotonic() - self._looked_s >= MEMORY_INTERVAL_S:
            self._looked_s = time.monotonic()
            self.gpu_mem_peak_gib = max(self.gpu_mem_peak_gib, self._device.used_gib(self.stream))
        with self._lock:
            times = GpuTimes(self._held_s, self._wait_s)
            self._held_s = self._wait_s = 0.0
        return times

    def close(self) -> None:
        """The session ends: wait for its work, so that its memory can be given back."""
        self.stream.synchronize()

    def _read(self, wanted: Any) -> None:
        while True:
            with self._lock:
                if not self._unread or not wanted(self._unread[0]):
                    return
                interval = self._unread.popleft()
            interval.end.synchronize()
            with self._lock:
                self._held_s += interval.begin.elapsed_time(interval.end) / 1e3
                self._wait_s += interval.asked.elapsed_time(interval.begin) / 1e3


class Preparation:
    """Makes the device once, before the first session runs; see `prepare`."""

    def __init__(self) -> None:
        self.device: Device | None = None
        self._done = threading.Event()
        self._expected = False
        self._takes_turns = True

    def expect(self, *, takes_turns: bool = True) -> None:
        """Say that `prepare` will be called: sessions wait for it, and so for the modules that are loaded ahead."""
        self._takes_turns = takes_turns
        self._expected = True

    def prepare(self) -> None:
        """Initialize CUDA if there is a GPU; without one, members wait for their own work as alone."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            if cuda is not None and cuda.is_available():
                cuda.init()
                self.device = Device(cuda, takes_turns=self._takes_turns)
                at_thread_start(_enter_thread)
                logger.info("GPU %s: a stream for each member", cuda.get_device_name())
        except Exception as error:  # the scripts will report a GPU that does not work
            logger.warning("the GPU cannot be prepared: %s", error)
        finally:
            self._done.set()

    def ready(self) -> Device | None:
        """The device, as soon as the runtime knows whether it has one."""
        if self._expected and not self._done.wait(PREPARATION_LIMIT_S):
            logger.warning("modules and the GPU were not ready within %g s", PREPARATION_LIMIT_S)
        return self.device


preparation: Final = Preparation()


def enter_session(session: SessionState) -> None:
    """Give a session a stream of its own, in the calling thread and in those that it will start."""
    device = preparation.ready()
    if device is not None and session.clock is not None:
        pace = session.clock.gpu = StreamPace(device, session.member)
        pace.enter_thread()


def _enter_thread(session: SessionState) -> None:
    pace = None if session.clock is None else session.clock.gpu
    if isinstance(pace, StreamPace):
        pace.enter_thread()


def give_memory_back(clock: StageClock) -> None:
    """Free all that a session left in this process's memory, however it ended."""
    gc.collect()
    device = preparation.device
    if device is not None and isinstance(clock.gpu, StreamPace):
        try:
            clock.gpu.close()
            device.cuda.empty_cache()
        except RuntimeError as error:  # the context is beyond use, which others find out
            logger.warning("GPU memory could not be given back: %s", error)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def sticky_text(error: BaseException, device: Device | None) -> str | None:
    """Return the text of a script's exception, or one of its causes, that ended the CUDA context, else None.

    The device is asked whether it still works. Without one the words decide.
    """
    for link in chain_of(error):
        text = str(link)
        if isinstance(link, RuntimeError) and _ACCELERATOR.search(text) and _STICKY.search(text):
            return text.splitlines()[0] if device is None or is_dead(device) else None
    return None


def is_dead(device: Device) -> bool:
    """Whether the CUDA context is beyond use: a synchronization fails, other than for lack of memory."""
    try:
        device.cuda.synchronize()
    except RuntimeError as error:
        return not isinstance(error, device.cuda.OutOfMemoryError)
    return False


class FaultWatch:
    """Looks at each session that ends, and ends the runtime after the first fault."""

    def __init__(self, running: Callable[[], list[MemberSession]], end_runtime: Callable[[], None]) -> None:
        self.fault: dict[str, Any] | None = None  # why the runtime can't go on, as the status file has it
        self._lock = threading.Lock()
        self._running, self._end_runtime = running, end_runtime

    def session_ended(self, session: MemberSession) -> None:
        """Called before the member's process learns of the end."""
        cause, device = session.fault, preparation.device
        if cause is None and device is not None and session.exit_code and is_dead(device):
            cause = "CUDA error: the context is beyond use, and the script did not say why"
        if cause is None:
            return
        session.condemned = True
        with self._lock:
            if self.fault is not None:
                return
            suspects = [] if device is None else device.suspects()
            culprits = list(dict.fromkeys([session.member, *suspects]))
            self.fault = {"cause": cause, "culprits": culprits}
        logger.error("%s: members are requeued; it may come from %s", cause, ", ".join(culprits))
        for other in self._running():
            other.condemned = True
        self._end_runtime()
