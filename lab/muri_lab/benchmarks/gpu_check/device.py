"""Parts about the GPU itself: cost of a hand-over, memory, errors, and NVML's values."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import psutil

from muri.clock import KIB_PER_MIB, MIB, MIB_PER_GIB
from muri.launcher.run.client import RuntimeLostError
from muri.profiler.gpu_usage import GpuReader, GpuUnreadableError
from muri_lab.benchmarks.gpu_check.check import DETERMINISTIC, JOBS, Check, Figures, only, report
from muri_lab.benchmarks.job_runs import Run, running
from muri_lab.benchmarks.runtime_process import BenchmarkError

HOLDS = 800
SAMPLE_S = 0.1
GOES_ON = 50  # Iterations after which a partner counts as unharmed
BEFORE_FAILURE_S = 1.0
CONSEQUENCES_S = 20.0
NVML_S = 4.5

_CONTEXT = """
import sys, torch
torch.zeros(1, device=sys.argv[1])
print(torch.cuda.memory_reserved() if sys.argv[1] == "cuda" else 0, flush=True)
sys.stdin.read()
"""
"""A process that has a CUDA context and next to nothing in it."""


def hand_over(check: Check, figures: Figures) -> None:
    """How long the GPU rests between the work of one member and that of the next, which waits for it."""
    script = (str(JOBS / "hand_over.py"), "--enough", str(100 if check.smoke else HOLDS), *check.device)

    def between(members: int, isolation: str) -> dict[str, float]:
        jobs = {f"holder-{number}": script for number in range(1, members + 1)}
        with running(check.setting(jobs)) as run:
            preload = ("--preload", "") if check.smoke else ()
            run.start_interleaved({}, *preload, discipline="fair", isolation=isolation)
            _await_holds(run, list(jobs))
            run.end()
            return gaps([_spans(run, job) for job in jobs])

    figures.add_measured("alone", partial(between, 1, "process"))
    for isolation in ("process", "thread"):
        figures.add_measured(isolation, partial(between, 2, isolation))


def _await_holds(run: Run, jobs: Sequence[str]) -> None:
    """Wait until each job has held the GPU often enough, the last one beside the others."""
    while not all(run.log(job).with_suffix(".enough").exists() for job in jobs):
        for job in jobs:
            if run.process(job).poll() is not None:
                raise BenchmarkError(f"{job} ended too early: {run.output(job)}")
        time.sleep(0.05)


def _spans(run: Run, job: str) -> list[tuple[int, int]]:
    lines = [line.split() for line in run.log(job).read_text().splitlines()]
    if not lines:
        raise BenchmarkError(f"{job} never held the GPU: {run.output(job)}")
    return [(int(begin_ns), int(end_ns)) for begin_ns, end_ns in lines]


def gaps(spans: Sequence[Sequence[tuple[int, int]]]) -> dict[str, float]:
    """Return microseconds between holds of different members, given each member's holds as (begin, end) in ns."""
    holds = sorted((begin, end, member) for member, each in enumerate(spans) for begin, end in each)
    found = sorted(
        (after[0] - before[1]) / 1e3 for before, after in pairwise(holds) if len(spans) == 1 or before[2] != after[2]
    )
    if not found:
        raise BenchmarkError("the GPU never changed hands")
    overlaps = sum(each < 0 for each in found)
    middle, late = (found[int(share * (len(found) - 1))] for share in (0.5, 0.99))
    return {"count": len(found), "p50_us": middle, "p99_us": late, "overlapping": overlaps}


class PeakMemory:
    """The most memory that was in use on the first GPU, by everybody."""

    def __init__(self) -> None:
        self._reader = GpuReader({})
        self.mib = self.now_mib()  # The most so far

    def now_mib(self) -> float:
        """Memory in use now."""
        used_gib = next(iter(self._reader.each_gpu().values())).mem_gib
        if used_gib is None:
            raise BenchmarkError(f"NVML does not tell the memory in use: {'; '.join(self._reader.notes)}")
        return used_gib * MIB_PER_GIB

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look ten times a second while something runs."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(SAMPLE_S):
                self.mib = max(self.mib, self.now_mib())

        watch = threading.Thread(target=look, daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()


def memory(check: Check, figures: Figures) -> None:
    """GPU memory: the cost of a CUDA context, and four members together against the sum of their peaks."""
    models = check.models[:1] if check.smoke else check.models
    setting = check.setting({model: check.job(model) for model in models})

    def together(isolation: str) -> dict[str, Any]:
        peak = _peak()
        before_mib = peak.now_mib() if peak else 0.0
        with running(setting) as run, peak.watching() if peak else nullcontext():
            run.start_interleaved({}, discipline="fair", isolation=isolation)
            run.measure()
            told = {model: only(report(run, model))["gpu_mib"] for model in models}
        return {"members": told, "grown_mib": peak.mib - before_mib if peak else None}

    figures.add_measured("context_mib", partial(_contexts, check))
    for isolation in ("process", "thread"):
        figures.add_measured(isolation, partial(together, isolation))


def _peak() -> PeakMemory | None:
    try:
        return PeakMemory()
    except GpuUnreadableError:
        return None


def _contexts(check: Check) -> list[float] | None:
    """How much the memory in use grows by a first and by a second context, without what their tensors reserve."""
    peak, found = _peak(), []
    command = [sys.executable, "-c", _CONTEXT, "cpu" if check.smoke else "cuda"]
    processes = []
    try:
        for _ in range(1 if check.smoke else 2):
            before_mib = peak.now_mib() if peak else 0.0
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            told = process.stdout.readline()
            if not told:
                raise BenchmarkError("a process with nothing but a CUDA context ended")
            if peak:
                found.append(peak.now_mib() - before_mib - int(told) / MIB)
    finally:
        for process in processes:
            process.communicate("")
    return found if peak else None


def errors(check: Check, figures: Figures) -> None:
    """One member runs out of memory, another writes to where nothing is: what do their partners notice?"""
    partners, kinds = ("partner-1", "partner-2"), ("memory", "access")
    if check.smoke:
        partners = partners[:1]
    jobs = {name: check.job("small", "--deterministic") for name in partners}
    jobs |= {kind: check.job("small", "--deterministic", "--fail", kind) for kind in kinds}

    def provoke(isolation: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with running(check.setting(jobs)) as run:
            run.start_interleaved({}, *DETERMINISTIC, discipline="fair", isolation=isolation)
            run.await_start()
            for kind in kinds:
                run.log(kind).with_suffix(".fail").touch()
                code = run.process(kind).wait()
                ended_s = time.monotonic()
                _await_consequences(run, partners, ended_s, lost=code == RuntimeLostError.exit_code)
                found[kind] = {
                    "exit_code": code,
                    "said": run.output(kind).strip().splitlines()[-1:],
                    "fault": run.status().get("fault"),
                    "partners": {name: _noticed(run, name, ended_s) for name in partners},
                }
                figures.add(isolation, found)
            if all(run.process(name).poll() is None for name in partners):
                run.end(*partners)
                losses = [only(report(run, name))["losses"] for name in partners]
                found["partners_have_same_losses"] = all(len(set(each)) == 1 for each in zip(*losses, strict=False))
        return found

    for isolation in ("process", "thread"):
        figures.add_measured(isolation, partial(provoke, isolation))


def _await_consequences(run: Run, partners: Sequence[str], failed_s: float, *, lost: bool) -> None:
    """Wait until each partner has gone on for some iterations or has ended; where the runtime is lost, for its end."""

    def is_clear(name: str) -> bool:
        goes_on = not lost and sum(at_s > failed_s for at_s in run.ends_s(name)) >= GOES_ON
        return goes_on or run.process(name).poll() is not None

    def all_clear() -> bool:
        return all(map(is_clear, partners)) and not (lost and run.runtime and run.runtime.poll() is None)

    while not all_clear() and time.monotonic() < failed_s + CONSEQUENCES_S:
        time.sleep(0.05)


def _noticed(run: Run, name: str, failed_s: float) -> dict[str, Any]:
    """What became of a partner around the time of a failure."""
    ends_s = run.ends_s(name)
    around_s = [at_s for at_s in ends_s if failed_s - BEFORE_FAILURE_S <= at_s]
    return {
        "exit_code": run.process(name).poll(),
        "iterations_after": sum(at_s > failed_s for at_s in ends_s),
        "longest_iteration_s": max((after - before for before, after in pairwise(around_s)), default=None),
    }


def nvml(check: Check, figures: Figures) -> None:
    """NVML's figures of two processes, read as `muri top` does, beside the processes' own."""
    try:
        reader = GpuReader({})
    except GpuUnreadableError as error:
        figures.add("unreadable", str(error))
        return
    models = ("gpt2", "vgg16")
    with running(check.setting({model: check.job(model) for model in models})) as run:
        for model in models:
            run.start_job(model)
        run.await_start()
        owners = {model: _pids(run.process(model).pid) for model in models}
        everybody = frozenset().union(*owners.values())
        reader.by_owner(owners)
        begin_s, looks = time.monotonic(), []
        while time.monotonic() - begin_s < NVML_S:
            time.sleep(1.1)
            looks.append((_pcie_mib_per_s(), reader.read(everybody)[0]))
        shares = reader.by_owner(owners)
        passed_s = time.monotonic() - begin_s
        rates = {model: sum(at_s >= begin_s for at_s in run.ends_s(model)) / passed_s for model in models}
        run.end()
        told = {model: only(report(run, model)) for model in models}
    figures.add("pcie_mib_per_s", [pcie for pcie, _ in looks])
    figures.add("utilization", [utilization for _, utilization in looks])
    members = {
        model: {
            "utilization": shares[model][0],
            "mem_gib": shares[model][1],
            "reserved_gib": told[model]["gpu_mib"].get("reserved", 0.0) / MIB_PER_GIB,
            "iterations_per_s": rates[model],
            "stage_s": told[model]["stage_s"],
        }
        for model in models
    }
    figures.add("members", members)
    figures.add("notes", list(reader.notes))


def _pcie_mib_per_s() -> float | None:
    """Traffic of all GPUs in both directions, as NVML counts it over 20 ms; None where the GPU does not count it."""
    import pynvml

    devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    counters = (pynvml.NVML_PCIE_UTIL_RX_BYTES, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    try:
        kib = sum(pynvml.nvmlDeviceGetPcieThroughput(device, counter) for device in devices for counter in counters)
    except pynvml.NVMLError:
        return None
    return float(kib / KIB_PER_MIB)


def _pids(pid: int) -> frozenset[int]:
    return frozenset({pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))})
