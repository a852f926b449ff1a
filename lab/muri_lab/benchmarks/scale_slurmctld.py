"""Muri's load on slurmctld: calls counted on a real Slurm with real groups, and timed with a long queue.

    sudo .venv/bin/python -m muri_lab.benchmarks.scale --row slurmctld-2000-groups

In one sandbox groups start, work and end while sdiag counts calls. In another, of 2,000 nodes and 10,000 waiting jobs,
each kind of call and a cycle of the controller is timed. The sum is an hour of slurmctld with 2,000 groups that live an
hour each and a cycle every minute. Beside sdiag's seconds, which contain waits for locks, stand CPU seconds of
slurmctld, which contain the cost of each connection.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from muri_lab.benchmarks.bars import tell
from muri_lab.benchmarks.scale_slurm import fill, occupy, start
from sandbox import lifecycle
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.support import Progress

GROUPS: Final = 2000
JOBS: Final = 10_000
NODES: Final = 2000
CYCLES_AN_HOUR: Final = 60
_REAL_GROUPS: Final = 8
_SETTLED_S: Final = 420  # By then the pauses between reports have grown
_WORKING_S: Final = 300
_RARE_READS: Final = 3
"""Looks at members at work: the first comes after ten minutes (tests/slurm_plugin/node/test_calls_of_a_life.py)."""
_CALLS: Final = 100
_BATCHES: Final = 3

_TRAIN_PY: Final = """\
import os, time
import muri

while not os.path.exists("/tmp/groups-end"):
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.05)
"""

_TRAIN_SH: Final = "#!/bin/sh\nexec muri run ~/work.py\n"
_COUNTS: Final = re.compile(r"^\s*([A-Z_]+)\s*\(\s*\d+\) count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)", re.MULTILINE)
_OWN: Final = frozenset({"REQUEST_STATS_INFO", "REQUEST_STATS_RESET"})  # What the benchmark itself asks
_NODES_OWN: Final = frozenset({"MESSAGE_NODE_REGISTRATION_STATUS", "REQUEST_PING", "RESPONSE_PING_SLURMD"})
"""What nodes say of themselves, with groups or without."""

_READ: Final = (
    "squeue --noheader --local --states=all --Format=JobID:16,State:32,comment:32768,admin_comment:32768 --jobs=$JOB"
)
_NO_SCHEDULING: Final = (
    "sed -i 's/^SchedulerParameters=.*/SchedulerParameters=defer,sched_interval=-1,bf_interval=10800/' "
    "/etc/slurm/slurm.conf && scontrol reconfigure && sleep 60"
)
"""Keeps slurmctld's own looks at the queue, for which calls would wait, out of the measurement."""

_KINDS: Final = {
    "a read of one job": (_READ, _CALLS),
    "a change of a job's comment": ("scontrol update jobid=$JOB comment=muri-speed:$i", _CALLS),
    "sdiag": ("sdiag", _CALLS),
    "squeue with two ids": ("squeue --noheader --jobs=$JOB,$((JOB + 1))", 10),
    "a cycle": ("muri-controller --once", 1),
}
"""Commands that are timed, and how often."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What slurmctld was asked for some time."""

    calls: Counter[str]  # By type of message
    seconds: Counter[str]  # by sdiag
    cpu_s: float  # CPU time of slurmctld, with all else that it did
    wall_s: float  # How long that was


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs slurmctld: the least of some batches, as other programs share the machine."""

    handled_s: float  # Seconds that sdiag names
    cpu_s: float  # with accepting and authenticating connections


class Controller:
    """slurmctld of a sandbox."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def during(self, work: Callable[[], object]) -> Asked:
        """Count calls while some work is done."""
        self.driver.run("sdiag", "--reset", user="root")
        before_s, begun_s = self._cpu_s(), time.monotonic()
        work()
        cpu_s, wall_s = self._cpu_s() - before_s, time.monotonic() - begun_s
        told = self.driver.run("sdiag", user="root").stdout.partition("statistics by message type")[2]
        calls, seconds = Counter[str](), Counter[str]()
        for name, count, total_us in _COUNTS.findall(told.partition("statistics by user")[0]):
            if name not in _OWN | _NODES_OWN:
                calls[name], seconds[name] = int(count), int(total_us) / 1e6
        return Asked(calls, seconds, cpu_s, wall_s)

    def _cpu_s(self) -> float:
        told = self.driver.run("sh", "-c", "cat $(printf '/proc/%s/stat ' $(pidof slurmctld))", user="root").stdout
        ticks = sum(sum(map(int, line.rpartition(")")[2].split()[11:13])) for line in told.splitlines())
        return ticks / os.sysconf("SC_CLK_TCK")


def groups_ask() -> tuple[dict[str, Asked], int]:
    """Let real groups start, work and end; returns what slurmctld is asked, and how many groups there were."""
    name = "slurmctld-groups"
    lifecycle.up(name, SUITES["forky"], Shape(nodes=4, gpus_per_node=_REAL_GROUPS // 4), Progress())
    try:
        driver = start(name, 0)
        for number in range(2 * _REAL_GROUPS):
            _submit(driver, f"user{number % 2 + 1}", f"model{number // 2 % 4}")
        driver.run("muri-controller", "--once", user="root")
        slurmctld = Controller(driver)
        groups = 0

        def begin() -> None:
            nonlocal groups
            driver.wait_until(lambda: _at_work(driver)[1] == 2 * _REAL_GROUPS, "all members at work")
            groups, _ = _at_work(driver)
            time.sleep(_SETTLED_S)

        def end() -> None:
            driver.run("touch", "/tmp/groups-end", user="root")  # noqa: S108 (in the sandbox)
            driver.wait_until(lambda: _at_work(driver) == (0, 0), "the groups' end")

        asked = {"start": slurmctld.during(begin), "work": slurmctld.during(lambda: time.sleep(_WORKING_S))}
        asked["end"] = slurmctld.during(end)
        return asked, groups
    finally:
        lifecycle.down(name, Progress())


def _submit(driver: Driver, user: str, model: str) -> None:
    driver.write("work.py", _TRAIN_PY, user=user)
    driver.write("work.sh", _TRAIN_SH, user=user)
    mark = f"--muri=model={model},batch-size=8,duration=3600s"
    driver.submit("--gres=gpu:1", "--cpus-per-task=1", "--mem=1G", "--output=/dev/null", mark,
                  f"/home/{user}/work.sh", user=user)  # fmt: skip


_AT_WORK_PY: Final = """\
import json
from pathlib import Path

files = [json.loads(path.read_text()) for path in Path("/run/muri").glob("*/pilot-*[0-9].json")]
states = [member["state"] for each in files for member in each["members"].values()]
print(len(files), states.count("running"))
"""


def _at_work(driver: Driver) -> tuple[int, int]:
    """Groups, and members at work, as the runtimes tell: slurmctld is not asked."""
    groups, members = driver.run("python", "-c", _AT_WORK_PY, user="root").stdout.split()
    return int(groups), int(members)


def calls_cost() -> tuple[dict[str, Cost], Asked]:
    """Return the seconds of each kind of call with a long queue, and the calls of a cycle."""
    name = "slurmctld-queue"
    try:
        driver = start(name, NODES)
        fill(driver, JOBS)
        occupy(driver)
        return timed(driver)
    finally:
        lifecycle.down(name, Progress())


def timed(driver: Driver) -> tuple[dict[str, Cost], Asked]:
    """As `calls_cost`, on a sandbox with a queue."""
    slurmctld = Controller(driver)
    inside = partial(driver.run, "sh", "-c", user="root", timeout_s=1200)
    inside(_NO_SCHEDULING)
    job = driver.run("sh", "-c", "squeue --noheader --user=user1 --format=%A | head -1", user="root").stdout.strip()
    inside("muri-controller --once")  # what is done once is done now
    idle = slurmctld.during(lambda: time.sleep(30))
    cost: dict[str, Cost] = {}
    cycle: Asked | None = None
    for kind, (command, times) in _KINDS.items():
        loop = f"JOB={job}; i=0; while [ $i -lt {times} ]; do {command} >/dev/null || exit; i=$((i + 1)); done"
        found = [slurmctld.during(partial(inside, loop)) for _ in range(_BATCHES)]
        handled_s = min(sum(each.seconds.values()) for each in found) / times
        cpu_s = min(each.cpu_s - idle.cpu_s / idle.wall_s * each.wall_s for each in found) / times
        cost[kind] = Cost(handled_s, cpu_s)
        tell(f"{kind}: {1000 * handled_s:.3f} ms, {1000 * cpu_s:.3f} ms of CPU; {dict(found[0].calls)}")
        cycle = found[0] if kind == "a cycle" else cycle
    assert cycle is not None
    return cost, cycle


def an_hour(asked: Mapping[str, Asked], groups: int, cost: Mapping[str, Cost]) -> dict[str, Any]:
    """Add up an hour of slurmctld: each group starts, works and ends once."""
    hours = {"start": 1.0, "work": 3600 / _WORKING_S, "end": 1.0}

    def calls(name: str) -> float:
        return sum(each.calls[name] * hours[part] for part, each in asked.items()) / groups

    parts = {
        "groups: reads of one job": (
            GROUPS * (calls("REQUEST_JOB_INFO_SINGLE") + _RARE_READS),
            cost["a read of one job"],
        ),
        "groups: changes of comments": (GROUPS * calls("REQUEST_UPDATE_JOB"), cost["a change of a job's comment"]),
        "groups: reads of the job table": (GROUPS * calls("REQUEST_JOB_INFO"), cost["squeue with two ids"]),
        "controller: cycles": (CYCLES_AN_HOUR, cost["a cycle"]),
        "controller: sdiag": (720, cost["sdiag"]),
    }
    table = {
        name: {"calls": round(count), "s": round(count * each.handled_s, 2), "cpu_s": round(count * each.cpu_s, 2)}
        for name, (count, each) in parts.items()
    }
    for name, part in table.items():
        tell(f"{name:32} {part['calls']:10} calls  {part['s']:8.2f} s  {part['cpu_s']:8.2f} s of CPU")
    sums = {f"slurmctld_{key}_per_hour": round(sum(part[key] for part in table.values()), 2) for key in ("s", "cpu_s")}
    return {"parts": table, **sums}


def slurmctld_2000_groups() -> dict[str, Any]:
    """The row of scale.py."""
    asked, groups = groups_ask()
    for part, each in asked.items():
        tell(f"{part}, {groups} groups, {each.wall_s:.0f} s: {dict(each.calls)}; {each.cpu_s:.2f} s of CPU")
    cost, cycle = calls_cost()
    return an_hour(asked, groups, cost) | {
        "groups": groups,
        "asked": {part: dict(each.calls) for part, each in asked.items()},
        "cycle": dict(cycle.calls),
        "call_ms": {kind: [round(1000 * s, 3) for s in (each.handled_s, each.cpu_s)] for kind, each in cost.items()},
    }
