"""Hostile jobs among ordinary ones on a sandbox, a real Slurm, with the controller at work."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from muri_cluster import STAGES, MuriCluster

from sandbox.driver import Driver
from sandbox.support import SandboxError

GATEWAYS: Final = ("pyslurm", "command")
HERE: Final = Path(__file__).resolve().parent
_TESTS: Final = HERE.parents[2] / "tests"
_IMPORTS: Final = f"PYTHONPATH={HERE}:{_TESTS / 'hostile'}:{_TESTS / 'slurm_plugin'}"
_ENDED_S: Final = 3600.0

_COMMANDS: Final = (
    ("muri", "queue"),
    ("muri", "queue", "--json"),
    ("muri", "plan", "--save", "-"),
    ("muri-controller", "--dry-run"),
)

_SECRETS: Final = "import pathlib, re, sys; paths = [*pathlib.Path('/home/bob').rglob('*.out')]; " \
    "secrets = [pathlib.Path('/etc/shadow').read_bytes(), *(p.read_bytes() for p in " \
    "pathlib.Path('/etc/slurm').glob('*.key'))]; " \
    "found = [str(p) for p in paths for s in secrets if s[:40] and s[:40] in p.read_bytes()]; " \
    "print(len(paths)); print(*found, file=sys.stderr); sys.exit(bool(found))"  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    gateway: str  # The controller's way to Slurm
    failures: list[str] = field(default_factory=list)  # What must not happen, for people
    hostile: int = 0  # How many hostile jobs Slurm took
    ordinary: dict[int, str] = field(default_factory=dict)  # How each ordinary job ended
    cycles: int = 0  # How many cycles there were
    took_s: float = 0.0  # From the first submission to the last ordinary job's end


def submit_attacks(driver: Driver, seed: int, count: int, partition: str) -> list[int]:
    """Submit hostile jobs as bob; returns those that Slurm takes."""
    script = HERE / "submit_attacks.py"
    line = f"{_IMPORTS} exec python {script} {seed} {count} {partition}"
    return list(json.loads(driver.run("sh", "-c", line, user="bob", timeout_s=1800).stdout))


def run(muri: MuriCluster, gateway: str, seed: int, hostile: int, ordinary: int) -> Outcome:
    """Have a controller at work until alice's jobs have ended; nothing of bob's may keep them."""
    outcome, began_s = Outcome(gateway), time.monotonic()
    muri.configure(
        gateway=gateway,
        interval_s=5,
        profiling={"partition": "measure", "time_limit_s": 70},
        tuning={"dry_run_start_timeout_s": 20},
    )
    muri.know_profiles()
    with muri.controller():
        muri.driver.wait_until(lambda: "muri_gate" in _reservations(muri.driver), "the lease")
        outcome.hostile = len(submit_attacks(muri.driver, seed, hostile // 2, "train"))
        jobs = [muri.submit(STAGES[number % len(STAGES)], iterations=5) for number in range(ordinary)]
        outcome.hostile += len(submit_attacks(muri.driver, seed + 1000, hostile - hostile // 2, "train"))
        _commands(muri, outcome)
        _wait(muri.driver, jobs, outcome)
    outcome.took_s = time.monotonic() - began_s
    _read_log(muri.controller_log(), outcome)
    _drain(muri, outcome)
    return outcome


def _reservations(driver: Driver) -> str:
    return driver.run("scontrol", "show", "reservation", user="root").stdout


def _wait(driver: Driver, jobs: Sequence[int], outcome: Outcome) -> None:
    limit = time.monotonic() + _ENDED_S
    ask = ("squeue", "-h", "-u", "alice", "-t", "PD,R,CG,S,CF", "-o", "%i")
    while driver.run(*ask, user="root").stdout.strip() and time.monotonic() < limit:
        time.sleep(1)
    for job in jobs:
        outcome.ordinary[job] = driver.job(job)["JobState"]
        if outcome.ordinary[job] != "COMPLETED":
            outcome.failures.append(f"alice's job {job} is {outcome.ordinary[job]}")


def _commands(muri: MuriCluster, outcome: Outcome) -> None:
    """Run what users and administrators run meanwhile; jobs may end between two commands."""
    known = json.loads(muri.driver.run("muri", "queue", "--json", user="root").stdout)["jobs"]
    waiting = [job["job_id"] for job in known if job["slurm_state"] == "PENDING" and job["state"] != "grouped"]
    for command in (*_COMMANDS, *(("muri", "explain", str(job_id)) for job_id in waiting[-1:])):
        done = muri.driver.run(*command, user="root", check=False)
        if "is not a waiting or running job" not in done.stderr:  # it has ended meanwhile
            _judge(" ".join(command), done, outcome)


def _drain(muri: MuriCluster, outcome: Outcome) -> None:
    done = muri.driver.run("muri", "drain", user="root", check=False, timeout_s=1800)
    _judge("muri drain", done, outcome)
    found = muri.driver.run("python", "-c", _SECRETS, user="root", check=False)
    if found.returncode:
        outcome.failures.append(f"bob's outputs hold root's files: {found.stderr}")


def _judge(command: str, done: Any, outcome: Outcome) -> None:
    if done.returncode:
        outcome.failures.append(f"`{command}` ended with {done.returncode}: {done.stderr[-500:]}")
    lines = (done.stdout + done.stderr).split("\n")
    if odd := [line for line in lines if not line.isprintable()]:
        outcome.failures.append(f"`{command}` printed {odd[0][:200]!r}")


def _read_log(log: str, outcome: Outcome) -> None:
    """Look for lost cycles, tracebacks and control characters in the controller's log."""
    for line in log.split("\n"):
        outcome.cycles += "cycle" in line and "ended" in line
        if "cycle skipped" in line or not line.isprintable():
            outcome.failures.append(f"the log says {line[:300]!r}")
    if "Traceback" in log:
        outcome.failures.append(f"the log holds a traceback: {log[log.index('Traceback') - 300 :][:2000]}")


def main_on_sandbox(name: str, hostile: int, ordinary: int, seed: int) -> int:
    """Try both gateways on a sandbox that is up."""
    try:
        driver = Driver.of(name)
    except SandboxError as error:
        print(f"fuzz-controller: {error}", file=sys.stderr)
        return 1
    failed = False
    for gateway in GATEWAYS:
        driver.cancel_all()
        outcome = run(MuriCluster(driver), gateway, seed, hostile, ordinary)
        driver.cancel_all()
        failed |= bool(outcome.failures)
        completed = list(outcome.ordinary.values()).count("COMPLETED")
        print(
            f"{gateway}: {outcome.hostile} hostile jobs taken, {completed} of {ordinary} ordinary jobs completed after "
            f"{outcome.took_s:.0f} s",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        for failure in outcome.failures[:20]:
            print(f"  {ascii(failure)[1:-1]}", file=sys.stderr, flush=True)
    return int(failed)
