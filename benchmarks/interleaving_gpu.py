"""ResNet-18, GPT-2 small, A2C and VGG-16 on one GPU: alone, at once as plain processes, with MPS, and interleaved.

    python -m benchmarks.interleaving_gpu                     # about ten minutes; leave the GPU alone
    python -m benchmarks.interleaving_gpu --seconds 20 --rounds 1 --json
    python -m benchmarks.interleaving_gpu --smoke             # no GPU: each job in a tiny size on the CPU

Plain processes share the GPU by time-slicing. MPS is left out, and that is said, where
nvidia-cuda-mps-control is not installed. The network job's exchange goes over PCIe: one machine has no other.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.interleaving_real import BenchmarkError, Run, Setting
from benchmarks.machine import describe_machine
from benchmarks.real_link import Link
from benchmarks.real_report import Case, Throughput, print_report

JOBS = ("resnet18", "gpt2", "a2c", "vgg16")
WAYS = ("plain", "mps", "lockstep", "fair", "auto")
SCRIPT = Path(__file__).parent / "gpu_jobs" / "train.py"
DATA_MIB = 4096
SMOKE_ITERATIONS = 2
MPS_CONTROL = "nvidia-cuda-mps-control"
"""Comes with NVIDIA's driver."""
LINK = Link("gradients to host memory and back over PCIe")


class GpuRun(Run):
    """Jobs of gpu_jobs/."""

    def start_job(self, job: str, prefix: Sequence[str], **environment: str) -> None:
        """Start one job by `prefix` and its script."""
        files = ["--log", str(self._folder / f"{job}.log"), "--stop", str(self._folder / "stop")]
        command = [*prefix, str(SCRIPT), job, *files, "--data", str(self._setting.data)]
        self._jobs[job] = self.spawn(command, job, **environment)


def run_alone(setting: Setting, job: str) -> tuple[float, tuple[float, ...]]:
    """A job's solo iteration time in seconds, and the share of it that it holds each resource when measured."""
    with tempfile.TemporaryDirectory(prefix="muri-gpu-") as name:
        rate = _one(setting, Path(name), job)
    with tempfile.TemporaryDirectory(prefix="muri-gpu-") as name:
        # Measuring stages waits for the GPU at their ends, so the time above is taken without.
        _one(setting, Path(name), job, MURI_TRACE=str(Path(name) / "trace.jsonl"))
        events = [json.loads(line) for line in (Path(name) / "trace.jsonl").read_text().splitlines()]
    elapsed_s = max(e["end_s"] for e in events) - min(e["start_s"] for e in events)
    stages = ("load", "preprocess", "propagate", "synchronize")
    shares = (sum(e["end_s"] - e["start_s"] for e in events if e["stage"] == stage) / elapsed_s for stage in stages)
    return 1 / rate, tuple(shares)


def _one(setting: Setting, folder: Path, job: str, **environment: str) -> float:
    run = GpuRun(setting, folder)
    try:
        run.start_job(job, [sys.executable], **environment)
        return run.measure()[job]
    finally:
        run.close()


def run_together(setting: Setting, way: str, solo_s: dict[str, float]) -> dict[str, float]:
    """Normalized throughput of each job, all at once."""
    with tempfile.TemporaryDirectory(prefix="muri-gpu-") as name, contextlib.ExitStack() as stack:
        run = GpuRun(setting, Path(name))
        stack.callback(run.close)
        if way in {"plain", "mps"}:
            environment = stack.enter_context(mps_daemon(Path(name))) if way == "mps" else {}
            for job in JOBS:
                run.start_job(job, [sys.executable], **environment)
        else:
            start_interleaved(run, Path(name), way, solo_s)
        return {job: rate * solo_s[job] for job, rate in run.measure().items()}


@contextlib.contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """CUDA's Multi-Process Service in a directory of its own; yields what its clients' environment needs."""
    directories = {"CUDA_MPS_PIPE_DIRECTORY": folder / "mps", "CUDA_MPS_LOG_DIRECTORY": folder / "mps-log"}
    for directory in directories.values():
        directory.mkdir()
    variables = {name: str(directory) for name, directory in directories.items()}
    subprocess.run([MPS_CONTROL, "-d"], env=os.environ | variables, check=True)
    try:
        yield variables
    finally:
        subprocess.run([MPS_CONTROL], env=os.environ | variables, input=b"quit\n", check=False)


def start_interleaved(run: GpuRun, folder: Path, discipline: str, solo_s: dict[str, float]) -> None:
    """Start a runtime and the jobs as its members."""
    ids = {job: str(101 + index) for index, job in enumerate(JOBS)}
    sockets, status = folder / "run", folder / "status.json"
    solo = ",".join(f"{ids[job]}={seconds:.6f}" for job, seconds in solo_s.items())
    command = [
        sys.executable, "-m", "muri.launcher.runtime", "--members", ",".join(ids.values()), "--run-dir", str(sockets),
        "--discipline", discipline, "--solo-iteration-s", solo, "--status-file", str(status),
    ]  # fmt: skip
    runtime = run.spawn(command, "runtime")
    while not status.exists():
        if runtime.poll() is not None:
            raise BenchmarkError(f"the runtime did not start: {(folder / 'runtime.out').read_text()}")
        time.sleep(0.1)
    for job, job_id in ids.items():
        prefix = [sys.executable, "-c", "from muri.cli import main; main()", "run"]
        run.start_job(job, prefix, SLURM_JOB_ID=job_id, MURI_RUN_DIR=str(sockets))


def measure(seconds: float, rounds: int, ways: Sequence[str], data: Path) -> Case:
    """Run all jobs in all ways, the ways in turn, so that a disturbance hits all alike."""
    with tempfile.TemporaryDirectory(prefix="muri-data-", dir=data) as name:
        write_images(Path(name), DATA_MIB)
        setting = Setting(Path(name), LINK, seconds)
        alone: dict[str, list[tuple[float, tuple[float, ...]]]] = {job: [] for job in JOBS}
        speeds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for job in JOBS:
                alone[job].append(run_alone(setting, job))
            solo_s = {job: median(result[0] for result in results) for job, results in alone.items()}
            for way in ways:
                speeds[way].append(run_together(setting, way, solo_s))
    shares = {job: tuple(map(mean, zip(*(result[1] for result in alone[job]), strict=True))) for job in JOBS}
    return Case(LINK.description, solo_s, shares, {way: Throughput.of(way, each) for way, each in speeds.items()})


def write_images(folder: Path, size_mib: int) -> None:
    """The file that the storage job reads from."""
    with (folder / "images.bin").open("wb") as file:
        for _ in range(size_mib):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())


def smoke() -> None:
    """Train each job for some iterations in a tiny size on the CPU.

    Raises:
        BenchmarkError: One failed.
    """
    with tempfile.TemporaryDirectory(prefix="muri-gpu-") as name:
        log = Path(name) / "ends.log"
        write_images(Path(name), 1)
        command = [
            sys.executable, str(SCRIPT), *JOBS, "--tiny", "--device", "cpu", "--iterations", str(SMOKE_ITERATIONS),
            "--log", str(log), "--stop", str(Path(name) / "stop"), "--data", name,
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        count = len(log.read_text().splitlines()) if log.exists() else 0
        if done.returncode != 0 or count != SMOKE_ITERATIONS * len(JOBS):
            raise BenchmarkError(f"the jobs ended with {done.returncode} after {count} steps: {done.stderr[-2000:]}")


def check_device() -> str:
    """The GPU's name.

    Raises:
        BenchmarkError: There is none.
    """
    if not torch.cuda.is_available():
        raise BenchmarkError(
            f"PyTorch {torch.__version__} finds no GPU here. Run this on a node with one (srun --gres=gpu:1 …) and "
            "PyTorch's CUDA build; --smoke trains every job in a tiny size on the CPU"
        )
    return str(torch.cuda.get_device_name())


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="window of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is run (default: 3)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--data", type=Path, default=Path(), help="directory on the disk to read from (default: here)")
    parser.add_argument("--smoke", action="store_true", help="only try each job on the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    options = parse_options()
    try:
        if options.smoke:
            smoke()
            print(f"{', '.join(JOBS)}: {SMOKE_ITERATIONS} iterations each on the CPU")
            return 0
        device = check_device()
        if "mps" in options.ways and shutil.which(MPS_CONTROL) is None:
            print(f"benchmark: {MPS_CONTROL} is not installed, MPS is left out", file=sys.stderr)
            options.ways.remove("mps")
        case = measure(options.seconds, options.rounds, options.ways, options.data)
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"machine": describe_machine(), "gpu": device, "one_gpu": case.to_json()}, indent=1))
    else:
        print(device)
        print_report(case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
