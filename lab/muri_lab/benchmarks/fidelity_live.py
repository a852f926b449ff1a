"""Runs a workload of `fidelity_workloads.py` on a sandbox, a real Slurm, and notes what became of each job."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from muri.slurm_plugin.records.cluster import Snapshot, parse_snapshot
from muri.slurm_plugin.records.roles import Role, view_of
from muri_lab.benchmarks.fidelity_workloads import USERS, Workload, WorkloadJob
from sandbox import lifecycle
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.support import Progress

INTERVAL_S: Final = 5.0
STATE_DIR: Final = "/var/lib/muri"

_TRAIN_PY: Final = """\
import json, os, sys, time
import muri

stages, iterations, piece_s = json.loads(sys.argv[1]), int(sys.argv[2]), 0.02
names, debts = ("load", "preprocess", "propagate", "synchronize"), [0.0] * 4
first_s = time.time()

def work(stage):
    left_s = stages[stage]
    while left_s > 1e-9:
        piece = min(piece_s, left_s)
        begin_s = time.perf_counter()
        time.sleep(max(0.0, piece - debts[stage]))
        debts[stage] += time.perf_counter() - begin_s - piece
        left_s -= piece
        if left_s > 1e-9:
            muri.yield_point()

for _ in range(iterations):
    for stage, name in enumerate(names):
        if stages[stage]:
            with muri.stage(name):
                work(stage)
if os.environ.get("SLURM_PROCID", "0") == "0":
    with open(os.path.expanduser(f"~/times/{os.environ['SLURM_JOB_ID']}"), "a") as file:
        file.write(f"trained {first_s} {time.time()}\\n")
"""

_TRAIN_SH: Final = """\
#!/bin/sh
echo "begun $(date +%s.%N)" >> ~/times/$SLURM_JOB_ID
if [ "$SLURM_NTASKS" -gt 1 ]; then
    srun --unbuffered muri run ~/train.py "$@"
else
    muri run ~/train.py "$@"
fi
code=$?
echo "ended $(date +%s.%N)" >> ~/times/$SLURM_JOB_ID
exit $code
"""

_SUBMIT_PY: Final = """\
import json, subprocess, sys, time

start_s, jobs = float(sys.argv[1]), json.load(open("jobs.json"))
for number, submit_s, command in jobs:
    time.sleep(max(0.0, start_s + submit_s - time.time()))
    begun_s = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(json.dumps([number, int(done.stdout.split(";")[0]), begun_s, time.time()]), flush=True)
"""

_KNOW_PY: Final = """\
import json, sys
from pathlib import Path
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.private_files import make_private_directory

folder = Path(sys.argv[1])
make_private_directory(folder)
with ProfileStore(folder / "profiles.db") as store:
    for model, gpu_count, stages in json.loads(sys.argv[2]):
        key = ProfileKey(model, 8, gpu_count, "gpu")
        store.put(StageProfile(key, *stages, iteration_s=sum(stages), iterations=20))
"""


_TRY_PY: Final = """\
import sys
from dataclasses import asdict
from pathlib import Path
from muri.files import atomic_json
from muri.slurm_plugin.controller.assemble import open_gateway
from muri.slurm_plugin.gateway.gpu_removal import place_for
from muri.slurm_plugin.records.limits import NOT_TRIED

gateway = open_gateway()
snapshot = gateway.snapshot()
found = gateway.gpu_removal(NOT_TRIED, place_for(snapshot.nodes, ()), None, snapshot.taken_s)
atomic_json(Path(sys.argv[1]), asdict(found), mode=0o600)
"""


@dataclass(frozen=True, slots=True)
class JobRun:
    """What became of a job; times in seconds from the workload's start."""

    submit_s: float  # When it was submitted
    start_s: float  # When its batch script began, of the last run
    first_s: float  # When its training script began
    trained_s: float  # When that ended
    end_s: float  # When its batch script ended
    member: bool  # Whether it ran in a group
    runs: int  # How often its batch script ran

    @property
    def jct_s(self) -> float:
        """Job completion time."""
        return self.end_s - self.submit_s


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a workload."""

    jobs: tuple[JobRun, ...]  # By their numbers in the workload
    groups: tuple[tuple[int, ...], ...]  # Numbers of the members of each group, in the order in which they were started
    start_s: float  # The workload's start, in seconds since the epoch: slurmctld's ticks are at whole seconds
    cycle_s: float  # When one of the controller's cycles before that began, likewise; 0 without a controller

    @property
    def average_jct_s(self) -> float:
        """Mean job completion time."""
        return sum(job.jct_s for job in self.jobs) / len(self.jobs)

    @property
    def makespan_s(self) -> float:
        """From the first submission to the last end."""
        return max(job.end_s for job in self.jobs) - min(job.submit_s for job in self.jobs)


def config_of(workload: Workload) -> dict[str, Any]:
    """Return the keys of muri.yaml, the same as the twin's."""
    recorded = {"profiling": {"mode": "dry-run"}, "events": {"enabled": False}}  # as the recorded runs had it
    return {"interval_s": INTERVAL_S, "lease_s": 300, **recorded, **workload.config}


@contextmanager
def cluster(workload: Workload, suite: str = "forky") -> Iterator[Driver]:
    """Start a sandbox for a workload, with its profiles known."""
    name = "fidelity"
    shape = Shape(workload.node_count, workload.gpus_per_node, cpus_per_node=64)
    lifecycle.down(name, Progress())
    lifecycle.up(name, SUITES[suite], shape, Progress())
    try:
        driver = Driver.of(name)
        _prepare(driver, workload)
        yield driver
    finally:
        lifecycle.down(name, Progress())


def _prepare(driver: Driver, workload: Workload) -> None:
    config = {**config_of(workload), "state_dir": STATE_DIR, "status_dir": f"{STATE_DIR}-status"}
    driver.write("/etc/muri/muri.yaml", json.dumps(config), user="root", mode="0644")
    counts = {job.gpu_count for job in workload.jobs}
    models = {} if workload.is_cold else workload.models
    known_on(driver, [[model, count, stages] for model, stages in models.items() for count in sorted(counts)])
    for user in USERS:
        driver.write("train.py", _TRAIN_PY, user=user)
        driver.write("train.sh", _TRAIN_SH, user=user)
        driver.run("mkdir", "-p", f"/home/{user}/times", user=user)


def known_on(driver: Driver, known: Sequence[Sequence[Any]]) -> None:
    """Tell a sandbox's controller profiles, and whether GPUs can be taken away."""
    driver.run("python", "-c", _KNOW_PY, STATE_DIR, json.dumps(known), user="root")
    driver.run("python", "-c", _TRY_PY, f"{STATE_DIR}/gpu-removal.json", user="root")


def mark_of(job: WorkloadJob, workload: Workload, unit: str = "s") -> str:
    """Return what its user tells Muri of a job; in AdminComment its duration has no unit."""
    duration_s = max(1, round(job.iterations * sum(workload.models[job.model])))
    return f"model={job.model},batch-size=8" + (f",duration={duration_s}{unit}" if workload.tells_durations else "")


def command_of(job: WorkloadJob, workload: Workload, *, with_muri: bool = True) -> list[str]:
    """Return the sbatch command of a job, for Muri or for Slurm alone."""
    stages = workload.models[job.model]
    wide = ["--nodes", str(job.node_count), "--ntasks-per-node", str(job.gpus_per_node)] if job.gpu_count > 1 else []
    return [
        "sbatch", "--parsable", "--output=/dev/null", "--time=10", *wide, f"--gres=gpu:{job.gpus_per_node}",
        *([f"--muri={mark_of(job, workload)}"] if with_muri else []),
        f"/home/{job.user}/train.sh", json.dumps(stages, separators=(",", ":")), str(job.iterations),
    ]  # fmt: skip


def run_live(workload: Workload, log: Path, *, with_muri: bool = True) -> Run:
    """Run a workload on a sandbox."""
    with cluster(workload) as driver:
        for user in USERS:
            jobs = [
                (number, job.submit_s, command_of(job, workload, with_muri=with_muri))
                for number, job in enumerate(workload.jobs)
                if job.user == user
            ]
            driver.write("jobs.json", json.dumps(jobs), user=user)
        with controller(driver, log) if with_muri else nullcontext():
            cycle_s = json.loads(driver.read(f"{STATE_DIR}/status.json"))["cycle_s"] if with_muri else 0.0
            start_s = time.time() + 1.0
            submitters = [driver.popen("python", "-c", _SUBMIT_PY, str(start_s), user=user) for user in USERS]
            told = [line for each in submitters for line in _output_of(each).splitlines()]
            ids: dict[int, int] = {}
            submitted_s: dict[int, float] = {}
            for number, job_id, before_s, _ in map(json.loads, told):
                ids[job_id], submitted_s[number] = number, before_s
            _wait(driver, frozenset(ids))
            snapshot = parse_snapshot(driver.run("muri", "plan", "--save", "-", user="root").stdout)
        times = {user: driver.run("sh", "-c", "cd ~/times && grep . *", user=user).stdout for user in USERS}
    return _run_of(ids, submitted_s, snapshot, _times(times.values()), start_s, cycle_s)


def _output_of(process: Any) -> str:
    out, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"submitting failed: {errors}")
    return str(out)


@contextmanager
def controller(driver: Driver, log: Path) -> Iterator[None]:
    """Have a controller at work, and write its log in the end."""
    process = driver.popen("sh", "-c", f"exec muri-controller --interval {INTERVAL_S:g} 2>&1 >/dev/null", user="root")
    try:
        status = ("test", "-e", f"{STATE_DIR}/status.json")
        driver.wait_until(lambda: driver.run(*status, user="root", check=False).returncode == 0, "the first cycle")
        yield
    finally:
        process.terminate()
        log.write_text("".join(process.communicate()))


def _wait(driver: Driver, ids: frozenset[int]) -> None:
    """Wait until all jobs have ended, asking seldom: the jobs need the few cores."""
    end_s = time.monotonic() + 900
    while time.monotonic() < end_s:
        time.sleep(4)
        left = driver.run("squeue", "--noheader", "--format=%i", user="root").stdout.split()
        if not ids & set(map(int, left)):
            return
    raise TimeoutError("the jobs did not end within 15 minutes")


def _times(texts: Any) -> dict[int, list[list[str]]]:
    """What the scripts noted, by job id."""
    found: dict[int, list[list[str]]] = {}
    for line in "".join(texts).splitlines():
        job_id, _, words = line.partition(":")
        found.setdefault(int(job_id), []).append(words.split())
    return found


def _run_of(
    ids: Mapping[int, int], submitted_s: Mapping[int, float], snapshot: Snapshot,
    times: Mapping[int, list[list[str]]], start_s: float, cycle_s: float,
) -> Run:  # fmt: skip
    view = view_of(snapshot)
    pilots = [tag for job in view.jobs.values() if job.role is Role.PILOT and (tag := job.pilot_tag) is not None]
    groups = [tuple(sorted(ids[each] for each in pilot.members if each in ids)) for pilot in pilots]
    members = {number for group in groups for number in group}
    jobs: dict[int, JobRun] = {}
    for job_id, number in ids.items():
        lines = times[job_id]
        last = {words[0]: [float(word) - start_s for word in words[1:]] for words in lines}
        times_s = (submitted_s[number] - start_s, *last["begun"], *last["trained"], *last["ended"])
        runs = sum(words[0] == "begun" for words in lines)
        jobs[number] = JobRun(*(round(each, 3) for each in times_s), number in members, runs)
        if view.jobs[job_id].state.value != "COMPLETED":
            raise RuntimeError(f"job {job_id} ended as {view.jobs[job_id].state}")
    return Run(tuple(jobs[number] for number in sorted(jobs)), tuple(groups), start_s, cycle_s)


def dump(run: Run) -> dict[str, Any]:
    """A run as plain values."""
    return asdict(run)


def load(values: Mapping[str, Any]) -> Run:
    """Read what `dump` gave."""
    jobs, groups = tuple(JobRun(**job) for job in values["jobs"]), tuple(map(tuple, values["groups"]))
    return Run(jobs, groups, values["start_s"], values["cycle_s"])
