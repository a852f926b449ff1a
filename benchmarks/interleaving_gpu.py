"""ResNet-18, GPT-2 small, A2C and VGG-16 on one GPU: alone, at once as plain processes, with MPS, and interleaved.

    python -m benchmarks.interleaving_gpu                     # about ten minutes; leave the GPU alone
    python -m benchmarks.interleaving_gpu --seconds 20 --rounds 1 --json
    python -m benchmarks.interleaving_gpu --smoke             # no GPU: each job in a tiny size on the CPU

Plain processes share the GPU by time-slicing. MPS is left out, and that is said, where
nvidia-cuda-mps-control is not installed. The network job's exchange goes over PCIe: one machine has no other.

The GPU's memory in use is watched as well: its peak with each job alone, and with all of them in each way.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.job_runs import Alone, Setting, measure_in_turns, run_traced, running, write_random_file
from benchmarks.machine import describe_machine
from benchmarks.real_report import Case, print_report
from benchmarks.runtime_process import BenchmarkError

JOBS = ("resnet18", "gpt2", "a2c", "vgg16")
WAYS = ("plain", "mps", "lockstep", "fair", "auto")
SCRIPT = Path(__file__).parent / "gpu_jobs" / "train.py"
DATA_MIB = 4096
SMOKE_ITERATIONS = 2
MPS_CONTROL = "nvidia-cuda-mps-control"
"""Comes with NVIDIA's driver."""
MEMORY_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
LINK = "gradients to host memory and back over PCIe"
IMAGES = "images.bin"


def run_alone(setting: Setting, job: str) -> Alone:
    """A job's iteration time and shares, from a run each: measuring stages waits for the GPU at their ends."""
    with running(setting) as run:
        run.start_job(job)
        rate = run.measure()[job]
    return Alone(1 / rate, run_traced(setting, job).shares)


def run_together(setting: Setting, way: str, solo_s: Mapping[str, float]) -> dict[str, float]:
    """Normalized throughput of each job, all at once."""
    with running(setting) as run, contextlib.ExitStack() as stack:
        if way in {"plain", "mps"}:
            environment = stack.enter_context(mps_daemon(run.folder)) if way == "mps" else {}
            for job in JOBS:
                run.start_job(job, **environment)
        else:
            run.start_interleaved(solo_s, discipline=way)
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


class GpuMemory:
    """Memory in use on the first GPU, that of other programs included.

    Attributes:
        peak_mib: The most that was seen during each run, by its name.
    """

    def __init__(self) -> None:
        self.peak_mib: dict[str, int] = {}

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Look twice a second while something runs."""
        over = threading.Event()
        watch = threading.Thread(target=self._look, args=(name, over), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def growth(self) -> dict[str, float]:
        """By way: how much more all jobs took at their peak than the largest of them alone."""
        largest = max(self.peak_mib[job] for job in JOBS)
        return {name: peak / largest - 1 for name, peak in self.peak_mib.items() if name not in JOBS}

    def _look(self, name: str, over: threading.Event) -> None:
        while True:
            said = subprocess.run(MEMORY_QUERY, check=True, capture_output=True, text=True).stdout
            self.peak_mib[name] = max(self.peak_mib.get(name, 0), int(said.split()[0]))
            if over.wait(0.5):
                return


def measure(seconds: float, rounds: int, ways: Sequence[str], data: Path, memory: GpuMemory) -> Case:
    """Run all jobs in all ways."""

    def alone(setting: Setting, job: str) -> Alone:
        with memory.watching(job):
            return run_alone(setting, job)

    def together(setting: Setting, way: str, solo_s: Mapping[str, float]) -> dict[str, float]:
        with memory.watching(way):
            return run_together(setting, way, solo_s)

    with tempfile.TemporaryDirectory(prefix="muri-data-", dir=data) as name:
        write_random_file(Path(name) / IMAGES, DATA_MIB)
        setting = Setting(Path(name), {job: (str(SCRIPT), job) for job in JOBS}, seconds)
        return measure_in_turns(setting, LINK, rounds, ways, alone, together)


def smoke() -> int:
    """Train each job for some iterations in a tiny size on the CPU.

    Returns:
        The iterations of all jobs together.

    Raises:
        BenchmarkError: One failed.
    """
    with tempfile.TemporaryDirectory(prefix="muri-gpu-") as name:
        log = Path(name) / "ends.log"
        write_random_file(Path(name) / IMAGES, 1)
        command = [
            sys.executable, str(SCRIPT), *JOBS, "--tiny", "--device", "cpu", "--iterations", str(SMOKE_ITERATIONS),
            "--log", str(log), "--stop", str(Path(name) / "stop"), "--data", name,
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        count = len(log.read_text().splitlines()) if log.exists() else 0
        if done.returncode != 0 or count != SMOKE_ITERATIONS * len(JOBS):
            raise BenchmarkError(f"the jobs ended with {done.returncode} after {count} steps: {done.stderr[-2000:]}")
        return count


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
        memory = GpuMemory()
        case = measure(options.seconds, options.rounds, options.ways, options.data, memory)
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    if options.json:
        found = {"one_gpu": case.to_json(), "peak_mib": memory.peak_mib, "memory_growth": memory.growth()}
        print(json.dumps({"machine": describe_machine(), "gpu": device, **found}, indent=1))
    else:
        print(device)
        print_report(case)
        for way, growth in memory.growth().items():
            print(f"GPU memory at its peak, {way}: {growth:+.0%} over the largest job alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
