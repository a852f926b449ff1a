"""How a stage clock keeps pace with a GPU, whose kernels run later than they are asked for."""

import sys
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """What a member's finished work on the GPU took.

    Attributes:
        held_s: Seconds that its kernels had the GPU.
        wait_s: Seconds that they waited there for another member's.
    """

    held_s: float = 0.0
    wait_s: float = 0.0


_NO_TIMES = GpuTimes()


class GpuPace(Protocol):
    """Called by the clock around the stage `propagate`; never while the arbiter's state changes.

    Attributes:
        counts_host_time: Whether the stage lasts as long as the thread is in it. Otherwise
            `iteration_ended` tells how long the GPU was busy.
        gpu_mem_peak_gib: Most GPU memory that the member was seen to use, None where nobody looks.
    """

    @property
    def counts_host_time(self) -> bool:
        """See the class."""

    @property
    def gpu_mem_peak_gib(self) -> float | None:
        """See the class."""

    def before(self) -> None:
        """The GPU is about to be asked for; nothing is held."""

    def taken(self) -> None:
        """The GPU was granted."""

    def given(self) -> None:
        """The GPU is about to be passed on."""

    def at_yield_point(self) -> bool:
        """The GPU may be passed on within a stage, if this returns True; `taken` follows then."""

    def iteration_ended(self) -> GpuTimes:
        """What has become known since the last call."""


class HostPace:
    """The thread waits for the GPU before it passes it on: for scripts alone, and without streams."""

    counts_host_time = True
    gpu_mem_peak_gib: float | None = None

    def before(self) -> None:
        """Nothing is left running from before."""

    def taken(self) -> None:
        """Nobody else's work is running."""

    def given(self) -> None:
        """Wait for the GPU."""
        wait_for_gpu()

    def at_yield_point(self) -> bool:
        """Wait for the GPU; others may have it then."""
        wait_for_gpu()
        return True

    def iteration_ended(self) -> GpuTimes:
        """Nothing that the clock does not know."""
        return _NO_TIMES


class FreePace(HostPace):
    """Nobody waits for anything: for scripts that are alone and not measured."""

    def given(self) -> None:
        """Nobody is there to pass it on to."""

    def at_yield_point(self) -> bool:
        """Nobody is there to pass it on to."""
        return False


def wait_for_gpu() -> None:
    """Wait until the GPU has done what this thread asked of it.

    Kernels run asynchronously: without this a stage would seem to end when its kernels are
    queued, and the GPU would be passed on while it is still busy.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized() and not cuda.is_current_stream_capturing():
        cuda.current_stream().synchronize()
