"""Parts in which models train: their losses, their stage times, their speed together, and how soon jobs end."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from muri.policies.speed import Shape
from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.records import STAGES
from muri_lab.benchmarks.bounds import throughput_bound
from muri_lab.benchmarks.gpu_check.check import DETERMINISTIC, FAILURES, Check, Figures, only, report
from muri_lab.benchmarks.job_runs import PYTHON, WARM_ITERATIONS, Run, Setting, running
from muri_lab.benchmarks.runtime_process import MURI_RUN, BenchmarkError

MPS_CONTROL = "nvidia-cuda-mps-control"  # Comes with NVIDIA's driver
MPS_PLACES = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin")
MPS_LIMIT_S = 10.0
AUTO_S = 9.0  # `auto` needs some windows of five seconds to compare

IN_PLACE_LIMIT_S, IN_PLACE_ITERATIONS = 15.0, 60
"""A measurement ends at either limit, sure or not; warm-up takes 22 iterations at most."""

PROFILED_ITERATIONS = 5
SETS: Mapping[str, tuple[str, ...]] = {
    "bottlenecks": ("resnet18", "gpt2", "a2c", "vgg16"),
    "gpu-bound": ("gpt2", "gpt2"),
    "small": ("small",) * 4,
}
SHORT_S = 1.0
LONG = 1.8  # Iterations of the demo's long jobs, as a multiple of its short ones'


def losses(check: Check, figures: Figures) -> None:
    """Four members, as processes and as threads: are their losses those that they have alone, to the last digit?"""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic with it
    setting = check.setting({model: check.job(model, "--deterministic") for model in check.models})
    alone: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    for model in check.models:
        with running(setting) as run:
            run.start_job(model)
            rates |= run.measure()
            alone[model] = only(report(run, model))["losses"]
            figures.add("alone", {name: {"iterations_per_s": rate} for name, rate in rates.items()})
            _note_nondeterministic(run, model, figures)
    solo_s = {model: 1 / rate for model, rate in rates.items()}
    for isolation in ("process", "thread"):
        figures.add_measured(isolation, partial(_losses_together, setting, isolation, solo_s, alone))


def _losses_together(
    setting: Setting, isolation: str, solo_s: Mapping[str, float], alone: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    with running(setting) as run:
        run.start_interleaved(solo_s, *DETERMINISTIC, discipline="fair", isolation=isolation)
        speeds = {model: rate * solo_s[model] for model, rate in run.measure().items()}
        members = {
            model: {**compared(alone[model], only(report(run, model))["losses"]), "speed": speed}
            for model, speed in speeds.items()
        }
    return {"members": members, "total": sum(speeds.values())}


def _note_nondeterministic(run: Run, job: str, figures: Figures) -> None:
    told = [line.strip() for line in run.output(job).splitlines() if "deterministic" in line]
    if told:
        figures.add(f"not deterministic: {job}", told[0][:300])


def compared(alone: Sequence[float], together: Sequence[float]) -> dict[str, Any]:
    """How far two runs of one model have the same losses."""
    pairs = list(zip(alone, together, strict=False))
    if not pairs:
        raise BenchmarkError("no losses were told")
    differing = [index for index, (one, other) in enumerate(pairs) if one != other]
    return {
        "iterations": len(pairs),
        "same": not differing,
        "first_difference": differing[0] if differing else None,
        "largest_difference": max(abs(one - other) for one, other in pairs),
    }


def stages(check: Check, figures: Figures) -> None:
    """Stage times: as the script itself measures them, by PyTorch's profiler, by Muri's hooks, and in company."""
    models = (*check.models, "small")
    options = ("--seconds", str(0.8 * check.window_s), "--profile", str(PROFILED_ITERATIONS))
    with running(check.setting({"all": check.job(*models, *options)})) as run:
        run.start_job("all")
        _await_end(run, "all")
        alone = report(run, "all")
    kept = ("iteration_s", "stage_s", "profiler_s", "gpu_mib")
    figures.add("alone", {model: {name: alone[model][name] for name in kept} for model in models})
    hooks = {}
    for model in check.models[:1] if check.smoke else check.models:
        with running(check.setting({model: check.job(model, "--seconds", str(check.window_s / 2))})) as run:
            run.start_job(model, MURI_RUN, MURI_TIMING="1")
            _await_end(run, model)
            hooks[model] = only(report(run, model))["hooks_s"]
            figures.add("hooks", {name: _against(alone[name], found) for name, found in hooks.items()})
    figures.add_measured("in_place", partial(_in_place, check, alone))


def _await_end(run: Run, job: str) -> None:
    if run.process(job).wait() != 0:
        raise BenchmarkError(f"{job}: {run.output(job)}")


def _against(alone: Mapping[str, Any], found_s: Mapping[str, float]) -> dict[str, Any]:
    """Stage times, and the error of each in shares of the iteration alone; the GPU's also against the profiler's."""
    iteration_s, kernels_s = alone["iteration_s"], alone["profiler_s"].get("kernels")
    errors = {stage: (found_s[stage] - alone["stage_s"].get(stage, 0.0)) / iteration_s for stage in STAGES}
    return {
        "stage_s": dict(found_s),
        "errors": errors,
        "iteration_error": found_s["iteration"] / iteration_s - 1,
        "profiler_error": (found_s["propagate"] - kernels_s) / iteration_s if kernels_s else None,
    }


def _in_place(check: Check, alone: Mapping[str, Any]) -> dict[str, Any]:
    """Stage times of unknown models, measured while they train in company."""
    setting = check.setting({model: check.job(model) for model in check.models})
    with running(setting) as run:
        run.start_interleaved({}, discipline="fair", isolation="process")
        run.await_start()
        seconds, iterations = (0.5, 10) if check.smoke else (IN_PLACE_LIMIT_S, IN_PLACE_ITERATIONS)
        limit_s = time.monotonic() + seconds
        while not all(map(_is_measured, run.member_status().values())):
            least = min(len(run.ends_s(model)) for model in check.models)
            if time.monotonic() > limit_s and least >= iterations:
                break
            time.sleep(0.2)
        run.end()  # what is unsure by now is told at the end, with what confidence it has
        while any(each["state"] != "ended" for each in run.member_status().values()):
            time.sleep(0.1)
        members = run.member_status()
    return {
        model: _against(alone[model], _measured_s(each["measured"])) if _is_measured(each) else None
        for model, each in members.items()
    }


def _is_measured(member: Mapping[str, Any]) -> bool:
    return "iteration_s" in (member["measured"] or {})


def _measured_s(found: Mapping[str, Any]) -> dict[str, float]:
    measured = DryRunResult.from_dict(found)
    return {**dict(zip(STAGES, measured.stage_s, strict=True)), "iteration": measured.iteration_s}


def throughput(name: str) -> Callable[[Check, Figures], None]:
    """Return the part that measures the total normalized throughput of one of `SETS` in each of `WAYS`."""

    def part(check: Check, figures: Figures) -> None:
        models = SMOKE_SETS[name] if check.smoke else SETS[name]
        alone = check.alone()
        jobs = {f"{model}-{number}": model for number, model in enumerate(models, 1)}
        solo_s = {job: alone[model]["iteration_s"] for job, model in jobs.items()}
        shares = [_shares(alone[model]) for model in models]
        found: dict[str, Any] = {
            "models": models,
            "shares": shares,
            "lp_bound": lp_bound(shares, 1),
            "lp_bound_with_all_cores": lp_bound(shares, os.cpu_count() or 1),
            "ways": {},
        }
        for way in SMOKE_WAYS[name] if check.smoke else WAYS:
            seconds = AUTO_S if way == "process:auto" and not check.smoke else check.window_s
            try:
                found["ways"][way] = _together(check, jobs, solo_s, way, seconds)
            except FAILURES as error:
                found["ways"][way] = {"error": str(error)[-1000:]}
            figures.add(name, found)

    return part


WAYS = ("plain", "process:fair", "thread:fair", "process:auto", "process:lockstep", "mps")
"""Plain processes, CUDA's Multi-Process Service, or Muri's: the isolation of members and the discipline."""

SMOKE_WAYS = {"bottlenecks": ("thread:fair",), "gpu-bound": ("plain", "mps"), "small": ("process:auto",)}
SMOKE_SETS = {"bottlenecks": ("vgg16", "small"), "gpu-bound": ("vgg16",), "small": ("small",)}


def lp_bound(shares: Sequence[Sequence[float]], cores: int) -> float:
    """Return the largest sum of normalized speeds for shares of storage, CPU (so many cores), GPU and network."""
    storage, cpu, gpu, network = range(len(STAGES))
    scaled = [(each[storage], each[cpu] / cores, each[gpu], each[network]) for each in shares]
    return throughput_bound([Shape(share, 1.0) for share in scaled])


def _shares(alone: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(min(1.0, alone["stage_s"].get(stage, 0.0) / alone["iteration_s"]) for stage in STAGES)


def _together(
    check: Check, jobs: Mapping[str, str], solo_s: Mapping[str, float], way: str, seconds: float
) -> dict[str, Any]:
    setting = check.setting({job: check.job(model) for job, model in jobs.items()}, seconds)
    isolation, _, discipline = way.partition(":")
    with running(setting) as run, mps_daemon() if way == "mps" else nullcontext({}) as environment:
        if discipline:
            run.start_interleaved(solo_s, discipline=discipline, isolation=isolation)
        else:
            for job in jobs:
                run.start_job(job, **environment)
        speeds = {job: rate * solo_s[job] for job, rate in run.measure().items()}
        changes = [f"{at_s:g} s: {name}" for at_s, name, _ in run.changes]
    return {"members": speeds, "total": sum(speeds.values()), "disciplines": changes}


def mps_control() -> str | None:
    """Return the path of the program that starts CUDA's Multi-Process Service, or None."""
    return shutil.which(MPS_CONTROL) or shutil.which(MPS_CONTROL, path=os.pathsep.join(MPS_PLACES))


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """CUDA's Multi-Process Service with files of its own; yields what its clients' environment needs."""
    control = mps_control()
    if control is None:
        raise BenchmarkError(f"{MPS_CONTROL} is not installed")
    folder = Path.cwd() / f"mps-{os.getpid()}"  # a short path: it holds sockets
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in variables.values():
        Path(path).mkdir(parents=True)
    environment = os.environ | variables
    subprocess.run([control, "-d"], env=environment, check=True, timeout=MPS_LIMIT_S, stdin=subprocess.DEVNULL)
    try:
        yield variables
    finally:
        subprocess.run([control], env=environment, input=b"quit\n", check=False, timeout=MPS_LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)


def demo(*ways: str) -> Callable[[Check, Figures], None]:
    """Return the part that runs the demo's eight jobs in these ways, started by a loop in place of Slurm."""

    def part(check: Check, figures: Figures) -> None:
        alone = check.alone()
        jobs = _demo_jobs(check, alone)
        for way in ways[:1] if check.smoke else ways:
            slots, runtime = DEMO_WAYS[way]
            figures.add_measured(way, partial(_run_all, check, jobs, slots, runtime=runtime))

    return part


DEMO_WAYS = {"one by one": (1, False), "four at once": (4, False), "with Muri": (4, True)}
"""How many jobs run at once, and whether as members of a runtime."""


def _demo_jobs(check: Check, alone: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """A long and a short job of each kind, the long ones first, as in the demo."""
    short_s = 0.1 if check.smoke else SHORT_S
    jobs = {}
    for length, factor in (("long", LONG),) if check.smoke else (("long", LONG), ("short", 1.0)):
        for model in check.models[:1] if check.smoke else check.models:
            count = max(WARM_ITERATIONS, round(factor * short_s / alone[model]["iteration_s"]))
            jobs[f"{model}-{length}"] = check.job(model, "--iterations", str(count))
    return jobs


def _run_all(check: Check, jobs: Mapping[str, tuple[str, ...]], slots: int, *, runtime: bool) -> dict[str, Any]:
    """Start the next job whenever one has ended; all count as submitted at the begin."""
    waiting, at_work, jct_s, start_s = list(jobs), set[str](), dict[str, float](), dict[str, float]()
    with running(check.setting(jobs)) as run:
        if runtime:  # as shipped: processes, `auto`, and no model is known
            run.serve({}, discipline="auto", isolation="process")
        begin_s = time.monotonic()
        while waiting or at_work:
            while waiting and len(at_work) < slots:
                job = waiting.pop(0)
                start_s[job] = time.monotonic()
                run.start_member(job) if runtime else run.start_job(job, PYTHON)
                at_work.add(job)
            for job in [each for each in at_work if run.process(each).poll() is not None]:
                at_work.remove(job)
                jct_s[job] = time.monotonic() - begin_s
                if run.process(job).returncode != 0:
                    raise BenchmarkError(f"{job}: {run.output(job)}")
            time.sleep(0.02)
        firsts_s = [run.ends_s(job)[0] - start_s[job] for job in jobs]
    return {
        "jct_s": jct_s,
        "average_jct_s": sum(jct_s.values()) / len(jct_s),
        "makespan_s": max(jct_s.values()),
        "first_iteration_s": sum(firsts_s) / len(firsts_s),
    }
