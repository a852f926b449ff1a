"""A slow network link for the benchmark: a veth pair into a network namespace, its rate limited by tc (tbf)."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How the network job reaches its peer.

    Attributes:
        description: What limits the rate, for the report.
        arguments: Options of the network job.
    """

    description: str
    arguments: tuple[str, ...] = ()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _limit(rate_mbit: int, device: str, *prefix: str) -> None:
    limit = ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", "64k", "latency", "100ms"]
    subprocess.run([*prefix, "tc", "qdisc", "add", "dev", device, *limit], check=True, capture_output=True)


@contextmanager
def slow_link(rate_mbit: int) -> Iterator[Link]:
    """A link of that rate in each direction; plain loopback, and saying so, without root or tc."""
    number = os.getpid() % 16384
    namespace, near, far = f"muri-{number}", f"mri{number}a", f"mri{number}b"
    third, fourth = divmod(number * 4, 256)
    here, there = (f"10.231.{third}.{fourth + end}" for end in (1, 2))
    if os.geteuid() != 0 or not shutil.which("tc"):
        yield Link("loopback without a limit (tc needs root)")
        return
    try:
        _ip("netns", "add", namespace)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", namespace)
        _ip("addr", "add", f"{here}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", namespace, "addr", "add", f"{there}/30", "dev", far)
        _ip("-n", namespace, "link", "set", far, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _limit(rate_mbit, near)
        _limit(rate_mbit, far, "ip", "netns", "exec", namespace)
        yield Link(f"veth pair, {rate_mbit} Mbit/s by tc tbf", ("--address", here, "--namespace", namespace))
    finally:
        subprocess.run(["ip", "link", "del", near], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
