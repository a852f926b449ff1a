"""Four real PyTorch jobs on the CPU: alone, as plain processes at once, and interleaved by the runtime.

    python -m muri_lab.benchmarks.interleaving_real                    # about ten minutes; leave the machine alone
    python -m muri_lab.benchmarks.interleaving_real --seconds 6 --rounds 1 --json
    python -m muri_lab.benchmarks.interleaving_real --auto-s 600 --ways plain-passive processes:fair processes:plain

The jobs are the scripts in real_jobs/, the same for every way of running them, with PyTorch's defaults. Their network
is slow: a veth pair into a network namespace, its rate limited by tc (tbf). Ways "plain…" are a user's own, without
Muri; the others are a discipline, with the members as processes.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from muri_lab.benchmarks.bars import describe_machine
from muri_lab.benchmarks.job_runs import Alone, Setting, measure_in_turns, run_traced, running, write_random_file
from muri_lab.benchmarks.real_report import Case, Changes, Throughput, print_report
from muri_lab.benchmarks.runtime_process import BenchmarkError

JOBS = ("storage", "cpu", "gpu", "network")
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
# A user's means without Muri. OpenMP's threads spin while they wait, which matters when processes share cores.
WITHOUT_MURI: Mapping[str, Mapping[str, str]] = {
    "plain": {},
    "plain-passive": PASSIVE,
    "plain-one-thread": {"OMP_NUM_THREADS": "1"},
}
# The network job starts its peer, which no thread may.
WITH_MURI = tuple(f"processes:{discipline}" for discipline in ("fair", "auto", "plain"))
WAYS = (*WITHOUT_MURI, *WITH_MURI)
AUTO = "processes:auto"
SCRIPTS = Path(__file__).parent / "real_jobs"
DATA_MIB = 256
RATE_MBIT = 100
ALONE_S = 10.0  # Window of each job alone beside a long run of `auto`


@dataclass(frozen=True)
class Link:
    """How the network job reaches its peer."""

    description: str  # What limits the rate, for the report
    arguments: tuple[str, ...] = ()  # Options of the network job


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


def run_together(setting: Setting, way: str, solo_s: Mapping[str, float]) -> dict[str, float]:
    """Normalized throughput of each job, all at once."""
    return _run_together(setting, way, solo_s)[0]


def _run_together(setting: Setting, way: str, solo_s: Mapping[str, float]) -> tuple[dict[str, float], Changes]:
    with running(setting) as run:
        if way in WITHOUT_MURI:
            for job in JOBS:
                run.start_job(job, **WITHOUT_MURI[way])
        else:
            run.start_interleaved(solo_s, discipline=way.removeprefix("processes:"), isolation="process")
        return {job: rate * solo_s[job] for job, rate in run.measure().items()}, run.changes


def run_alone(setting: Setting, job: str) -> Alone:
    """A job's iteration time and shares with PyTorch's defaults, and the cores that it needs if no thread spins."""
    seconds, shares, _ = run_traced(setting, job)
    with running(setting) as run:
        run.start_job(job, **PASSIVE)
        rate = run.measure()[job]
        return Alone(seconds, shares, run.cores_used[job] / rate / seconds)


def measure(seconds: float, rounds: int, ways: Sequence[str], auto_s: float = 0.0, data: Path | None = None) -> Case:
    """Run all jobs in all ways, the ways in turn, so that a disturbance hits all alike."""
    with tempfile.TemporaryDirectory(prefix="muri-data-", dir=data or Path.cwd()) as name, slow_link(RATE_MBIT) as link:
        write_random_file(Path(name) / "samples.bin", DATA_MIB)
        own = {"network": link.arguments}
        scripts = {job: (str(SCRIPTS / f"{job}.py"), *own.get(job, ())) for job in JOBS}
        setting = Setting(Path(name), scripts, seconds)
        if auto_s:
            return _measure_auto(setting, link.description, rounds, ways, auto_s)
        return measure_in_turns(setting, link.description, rounds, ways, run_alone, run_together)


def _measure_auto(setting: Setting, link: str, rounds: int, ways: Sequence[str], auto_s: float) -> Case:
    """Let `auto` run for long, in the middle of the rounds: the machine is not as fast in each quarter of an hour."""
    case = measure_in_turns(replace(setting, seconds=ALONE_S), link, 1, (), run_alone, run_together)
    speeds: dict[str, list[Mapping[str, float]]] = {way: [] for way in ways}

    def run_all_ways() -> None:
        for _ in range(rounds):
            for way in ways:
                speeds[way].append(run_together(setting, way, case.solo_iteration_s))

    run_all_ways()
    auto, changes = _run_together(replace(setting, seconds=auto_s), AUTO, case.solo_iteration_s)
    run_all_ways()
    case.auto_changes.extend(changes)
    case.throughputs.update({way: Throughput.of(way, each) for way, each in speeds.items()})
    case.throughputs[f"{AUTO} {auto_s:g} s"] = Throughput.of(AUTO, [auto])
    return case


def main() -> int:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="window of each run (default: 12)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is run (default: 3)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument(
        "--auto-s", type=float, default=0.0, help="run auto for so long, the rounds before and after it"
    )
    parser.add_argument("--data", type=Path, help="directory on the disk to read from (default: here)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs, link and files are cleared away
    try:
        case = measure(options.seconds, options.rounds, options.ways, options.auto_s, options.data)
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"machine": describe_machine(), "real_pytorch_cpu": case.to_json()}, indent=1))
    else:
        print_report(case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
