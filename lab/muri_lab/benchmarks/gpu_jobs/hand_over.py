"""Holds the GPU for two milliseconds, again and again, and tells when it had it.

    muri run hand_over.py --log spans.txt --stop stop --enough 1000

A file like the log but with .enough comes after so many holds. The log comes in the end: each line has the begin and
the end of a stage `propagate`, in nanoseconds of the GPU's clock, or of the host's monotonic one where there is no GPU.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import muri

HOLD_S = 0.002
CYCLES_PER_S = 1.7e9  # Of a recent GPU, about: the hold need not be exact
MOST = 50_000


def host_spans(goes_on: Callable[[int], bool]) -> Iterable[tuple[int, int]]:
    """Sleep within the stage."""
    spans: list[tuple[int, int]] = []
    while goes_on(len(spans)):
        with muri.stage("propagate"):
            begin_ns = time.perf_counter_ns()
            time.sleep(HOLD_S)
            spans.append((begin_ns, time.perf_counter_ns()))
    return spans


def gpu_spans(goes_on: Callable[[int], bool]) -> Iterable[tuple[int, int]]:
    """Keep the GPU busy within the stage; its own clock is read before and after."""
    import torch
    from kernels import stamp

    times = torch.zeros(2 * MOST, dtype=torch.int64, device="cuda")
    done = 0
    while goes_on(done):
        with muri.stage("propagate"):
            stamp(times, 2 * done)
            torch.cuda._sleep(int(HOLD_S * CYCLES_PER_S))
            stamp(times, 2 * done + 1)
        done += 1
    torch.cuda.current_stream().synchronize()
    told = times[: 2 * done].tolist()
    return zip(told[::2], told[1::2], strict=True)


def main() -> None:
    """Hold the GPU until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--enough", type=int, required=True)
    parser.add_argument("--data", type=Path, help="not needed")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()

    def goes_on(done: int) -> bool:
        if done == options.enough:
            options.log.with_suffix(".enough").touch()
        return done < MOST and not options.stop.exists()

    spans = gpu_spans if options.device == "cuda" else host_spans
    options.log.write_text("".join(f"{begin_ns} {end_ns}\n" for begin_ns, end_ns in spans(goes_on)))


if __name__ == "__main__":
    main()
