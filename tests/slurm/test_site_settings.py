"""Settings of slurm.conf that change allocations, each in force on a real Slurm: groups form or jobs run alone."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import pytest
from sandboxes import start
from site_cluster import SiteCluster

from muri.slurm_plugin.records import comment_tags as tags
from sandbox.cluster import Partition, Shape
from sandbox.driver import Driver, parse_job

pytestmark = pytest.mark.thorough

SHAPE: Final = Shape(nodes=2, accounting=True, extra_partitions=(Partition("train", "n1"),))
GPUS: Final = 2  # Of node n1


@dataclass(frozen=True)
class Row:
    """A site.

    Attributes:
        alone: Words of the reason why jobs run alone; "": groups form; None: that hangs on which GPU comes free
            first.
    """

    name: str  # For people
    conf: str = ""  # Words of slurm.conf; one without a value is left out there
    node: str = ""  # Words of the line of n1
    partition: str = ""  # Words of the partition's line
    qos: str = ""  # Limits of the QOS of all jobs, as sacctmgr takes them
    options: str = "--time=3"  # Of all jobs, those without Muri included
    alone: str | None = ""
    at_once: int = GPUS  # How many of the jobs without Muri Slurm runs at once


SELECT: Final = "SelectTypeParameters=CR_Core_Memory"
EXPEDITE: Final = "SlurmctldParameters=enable_expedited_requeue"
SOON: Final = "bf_interval=1,sched_interval=2"
THREADS: Final = "Sockets=1 CoresPerSocket=8 ThreadsPerCore=2"

ROWS: Final = (
    Row("none"),
    Row("DefMemPerGPU", "DefMemPerCPU= DefMemPerGPU=30000"),
    Row("DefMemPerGPU with --mem", "DefMemPerCPU= DefMemPerGPU=30000", options="--time=3 --mem=500"),
    Row("DefMemPerGPU of the partition", partition="DefMemPerGPU=30000"),
    Row("DefCpuPerGPU", "DefCpuPerGPU=4"),
    Row("DefCpuPerGPU of the partition", partition="DefCpuPerGPU=4"),
    Row("DefCpuPerGPU with -c", partition="DefCpuPerGPU=4", options="--time=3 -c2"),
    Row("no default memory", "DefMemPerCPU=", alone="memory", at_once=1),
    Row("DefMemPerNode", "DefMemPerCPU= DefMemPerNode=4000"),
    Row("MaxMemPerCPU below the node's", "DefMemPerCPU=500 MaxMemPerCPU=1000"),
    Row("MaxMemPerCPU as the node's", "DefMemPerCPU=2000 MaxMemPerCPU=4000", options="--time=3 --mem=1000"),
    Row("MaxMemPerCPU above the node's", "DefMemPerCPU=2000 MaxMemPerCPU=8000"),
    Row("MaxMemPerCPU of the partition", partition="MaxMemPerCPU=1000 DefMemPerCPU=500"),
    Row("MaxMemPerCPU raises CPUs", "DefMemPerCPU=500 MaxMemPerCPU=1000", options="--time=3 --mem=3000"),
    Row("MaxMemPerNode", "MaxMemPerNode=20000"),
    Row("MaxMemPerNode of the partition", partition="MaxMemPerNode=20000"),
    Row("MaxCPUsPerNode", partition="MaxCPUsPerNode=8"),
    Row("MaxCPUsPerSocket", node="Sockets=2 CoresPerSocket=8", partition="MaxCPUsPerSocket=3"),
    Row("MaxNodes", partition="MaxNodes=1"),
    Row("more tasks than GPUs", options="--time=3 --ntasks=2", alone="2 tasks for 1 GPU"),
    Row("more tasks than GPUs on the node", options="--time=3 --ntasks-per-node=2 -c2", alone="2 tasks for 1 GPU"),
    Row("EnforcePartLimits=ALL", "EnforcePartLimits=ALL", partition="MaxTime=10", alone="0.1667 h are allowed"),
    Row("EnforcePartLimits=ANY", "EnforcePartLimits=ANY", partition="MaxTime=10", alone="0.1667 h are allowed"),
    Row("EnforcePartLimits=NO", "EnforcePartLimits=NO", partition="MaxTime=10", alone="0.1667 h are allowed"),
    Row("DefaultTime", partition="DefaultTime=2", options=""),
    Row("no DefaultTime", partition="DefaultTime= MaxTime=30", options="", alone="0.5 h are allowed"),
    Row("OverTimeLimit", "OverTimeLimit=5"),
    Row("CR_Core", "SelectTypeParameters=CR_Core"),
    Row("CR_CPU", "SelectTypeParameters=CR_CPU"),
    Row("CR_Socket_Memory", "SelectTypeParameters=CR_Socket_Memory", "Sockets=4 CoresPerSocket=4"),
    Row("CR_ONE_TASK_PER_CORE", f"{SELECT},CR_ONE_TASK_PER_CORE", THREADS, alone="--ntasks-per-core"),
    Row("CR_CORE_DEFAULT_DIST_BLOCK", f"{SELECT},CR_CORE_DEFAULT_DIST_BLOCK"),
    Row("CR_Pack_Nodes", f"{SELECT},CR_Pack_Nodes"),
    Row("ENFORCE_BINDING_GRES", f"{SELECT},ENFORCE_BINDING_GRES", alone="--gres-flags", at_once=1),
    Row("ThreadsPerCore", node=THREADS),
    Row("LLN", partition="LLN=YES Nodes=n[1-2]"),
    Row("OverSubscribe=NO", partition="OverSubscribe=NO"),
    Row("OverSubscribe=FORCE", partition="OverSubscribe=FORCE:2", alone="--oversubscribe"),
    Row("OverSubscribe=EXCLUSIVE", partition="OverSubscribe=EXCLUSIVE", alone="--exclusive", at_once=1),
    Row("ExclusiveUser", partition="ExclusiveUser=YES", alone="--exclusive=user"),
    Row("MemSpecLimit", node="MemSpecLimit=8000"),
    Row("CoreSpecCount", node="CoreSpecCount=4"),
    Row("CpuSpecList", node="CpuSpecList=0-3"),
    Row("two CPUs", node="CPUs=2"),
    Row("two CPUs, each for one job", node="CPUs=2", partition="OverSubscribe=NO", alone="are needed"),
    Row("four CPUs", node="CPUs=4", alone=None),
    Row("little memory", "DefMemPerCPU=500", node="RealMemory=1400", alone="are needed"),
    Row("memory for a group and a half", "DefMemPerCPU=500", node="RealMemory=3500", alone=None),
    Row("MaxTRESPerJob=cpu", qos="MaxTRESPerJob=cpu=1"),
    Row("MaxTRESPerJob=mem", qos="MaxTRESPerJob=mem=5000"),
    Row("MaxTRESPerJob=gres", qos="MaxTRESPerJob=gres/gpu=1"),
    Row("MinTRESPerJob=cpu", qos="MinTRESPerJob=cpu=2", options="--time=3 -c2"),
    Row("MinTRESPerJob=mem", qos="MinTRESPerJob=mem=1000"),
    Row("MinTRESPerJob=gres", qos="MinTRESPerJob=gres/gpu=1", alone="QOS own demands 1 GPUs"),
    Row("TRESBillingWeights", partition="TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=2.0"),
    Row("OverMemoryKill", "JobAcctGatherParams=OverMemoryKill JobAcctGatherFrequency=1"),
    Row("KillOnBadExit", "KillOnBadExit=1"),
    Row("RequeueExitHold", "RequeueExitHold=1"),
    Row("expedite", EXPEDITE, options="--time=3 --requeue=expedite", alone="--requeue=expedite"),
    Row("JobRequeue=0", "JobRequeue=0", alone="--no-requeue"),
    Row("PreemptMode=REQUEUE", "PreemptType=preempt/partition_prio PreemptMode=REQUEUE", partition="PriorityTier=2"),
    Row("PreemptMode=SUSPEND", "PreemptType=preempt/partition_prio PreemptMode=SUSPEND,GANG"),
    Row("priority/basic", "PriorityType=priority/basic"),
    Row("defer", "SchedulerParameters=defer,batch_sched_delay=1"),
    Row("bf_licenses", f"SchedulerParameters=bf_licenses,{SOON}"),
    Row("max_rpc_cnt", f"SchedulerParameters=max_rpc_cnt=150,{SOON}"),
    Row("default_queue_depth", f"SchedulerParameters=default_queue_depth=1,{SOON}"),
    Row("DisableRootJobs", "DisableRootJobs=YES"),
    Row("MpiDefault", "MpiDefault=pmi2"),
    Row("TaskPlugin", "TaskPlugin=task/affinity"),
    Row("PropagateResourceLimits", "PropagateResourceLimits=ALL"),
)


def _words(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def _line(line: str, words: str) -> str:
    return " ".join(f"{key}={value}" for key, value in (_words(line) | _words(words)).items() if value)


def conf_of(row: Row, conf: str) -> str:
    """The sandbox's slurm.conf with a row's settings."""
    words, lines = {"MinJobAge": "600", **_words(row.conf)}, []
    for line in conf.splitlines():
        if line.startswith("NodeName=n1 "):
            lines.append(_line(line, row.node))
        elif line.startswith("PartitionName=train "):
            lines.append(_line(line, row.partition))
        elif line.partition("=")[0] not in words:
            lines.append(line)
    return "\n".join([*lines, *(f"{key}={value}" for key, value in words.items() if value), ""])


def reconfigure(driver: Driver, conf: str) -> None:
    """Have Slurm's daemons read another slurm.conf."""
    driver.write("/etc/slurm/slurm.conf", conf, user="root", mode="0644")
    driver.reconfigure()
    driver.wait_until(lambda: "State=IDLE " in driver.run("scontrol", "show", "node", "n1").stdout, "an idle node")


@dataclass
class Watch:
    """Looks at the queue while a controller is at work, and keeps what lasted too many of its cycles."""

    site: SiteCluster
    jobs: list[int]
    at_once: int
    """How many jobs Slurm runs at once without Muri: one that has a whole node to itself leaves no GPU idle."""
    running: int = 0  # A job that runs, alone or in a group
    pilots: set[int] = field(default_factory=set)  # Those that were given a member
    wrong: dict[str, int] = field(default_factory=dict)
    _cycles: set[str] = field(default_factory=set)
    _since: dict[str, int] = field(default_factory=dict)

    def look(self) -> bool:
        """Look once; return whether all jobs have ended."""
        script = 'stat -c %y "$1"; scontrol show job -o'
        file = f"{self.site.state_dir}/status.json"
        cycle, *lines = self.site.driver.run("sh", "-c", script, "sh", file, user="root").stdout.splitlines()
        self._cycles.add(cycle)
        shown = {int(job["JobId"]): job for job in map(parse_job, lines) if int(job["JobId"]) >= self.jobs[0]}
        faults, now = dict(self._faults(shown)), len(self._cycles)
        self._since = {fault: self._since.get(fault, now) for fault in faults}
        self.wrong |= {fault: now - since for fault, since in self._since.items() if now - since > faults[fault]}
        states = {job: shown[job]["JobState"] for job in self.jobs}
        self.running = next((job for job, state in states.items() if state == "RUNNING"), 0)
        return not {"PENDING", "RUNNING", "COMPLETING"} & set(states.values())

    def _faults(self, shown: dict[int, dict[str, str]]) -> Iterator[tuple[str, int]]:
        """Return the present deviation, and for how many cycles it may last."""
        active = {number: job for number, job in shown.items() if job["JobState"] in ("PENDING", "RUNNING")}
        comments = {number: shown[number].get("AdminComment", "") for number in self.jobs}
        member_of = {number: state.pilot for number, text in comments.items() if (state := tags.parse_state(text))}
        self.pilots |= set(member_of.values())
        begun = {pilot for number, pilot in member_of.items() if shown[number]["JobState"] != "PENDING"}
        promised = sum("muri_gate" not in job["Licenses"] and number not in member_of for number, job in active.items())
        for number, job in active.items():
            pending = job["JobState"] == "PENDING"
            if job["JobName"].startswith("muri:") and number not in self.pilots:
                yield f"pilot job {number} has no member", 2
            if job["JobName"].startswith("muri:") and not pending and number in set(member_of.values()) - begun:
                yield f"no member of pilot job {number} starts", 20
            if member_of.get(number, number) not in active:
                yield f"job {number} has lost its pilot job {member_of[number]}", 2
            if pending and "muri_gate" in job["Licenses"] and promised < self.at_once:
                yield f"job {number} waits for Muri, and a GPU is idle", 4
            if pending and job["Reason"] == "BadConstraints":
                yield f"job {number} can never start", 0


ASKED: Final = (
    "NumCPUs", "NumTasks", "CPUs/Task", "ReqTRES", "AllocTRES", "TresPerNode", "MinCPUsNode", "MinMemoryNode",
    "MinMemoryCPU", "MemPerTres", "CpusPerTres", "ReqNodeList", "TimeLimit", "OverSubscribe", "Requeue", "Nice", "QOS",
)  # fmt: skip


def asked(job: dict[str, str]) -> list[str | None]:
    """Return a job's request and allocation."""
    return [job.get(key) for key in ASKED]


@pytest.fixture(scope="module")
def own() -> Iterator[Driver]:
    """A sandbox for this file, whose slurm.conf changes; how GPUs are taken away is tried in it as it is at first."""
    for driver in start("forky", SHAPE, "settings"):
        SiteCluster(driver, "auto")
        yield driver


@pytest.fixture(scope="module")
def conf(own: Driver) -> str:
    return own.read("/etc/slurm/slurm.conf")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_groups_form_or_jobs_get_what_they_get_without_muri(own: Driver, conf: str, row: Row) -> None:
    if row.conf == EXPEDITE and own.instance.slurm_version < "25.11":
        pytest.skip("Slurm 25.11 has brought it")
    own.cancel_all()
    with ExitStack() as stack:
        stack.callback(reconfigure, own, conf)
        reconfigure(own, conf_of(row, conf))
        site, options = SiteCluster(own, "auto"), ["-p", "train", *row.options.split()]
        if row.qos:
            stack.enter_context(site.qos("own", **_words(row.qos)))
            options.append("--qos=own")
        stack.callback(own.cancel_all)
        until_go = "--wrap=until [ -e /home/alice/go ]; do sleep 0.1; done"
        plain = [own.submit("--gres=gpu:1", *options, until_go) for _ in range(GPUS)]
        for job in plain[: row.at_once]:
            own.wait_state(job, "RUNNING")
        jobs = [job for _ in range(2) for job in site.pair(*options, iterations=15)]
        watch = Watch(site, jobs, row.at_once)
        with site.controller():
            with site.training("load", "propagate"):
                own.wait_until(lambda: watch.look() or True, "the first cycle")
                site.go()
                own.wait_until(lambda: watch.look() or bool(watch.running), "the first job's start")
                said = site.explain(watch.running)
            own.wait_until(watch.look, f"the ends of {jobs}")
            found = json.loads(own.run("muri", "doctor", "--json", user="root", check=False).stdout)["findings"]
        ended = {job: own.job(job) for job in (*plain, *jobs)}
        alone = [job for job in jobs if site.pilot(job) is None]
        log = site.controller_log()
    assert watch.wrong == {}, log
    assert {job: each["JobState"] for job, each in ended.items()} == dict.fromkeys(ended, "COMPLETED"), log
    assert [asked(ended[job]) for job in alone] == [asked(ended[plain[0]])] * len(alone), log
    assert [each for each in found if each["level"] == "problem"] == []
    if row.alone is not None:
        assert bool(watch.pilots) == (not row.alone), (said, log)
        assert row.alone in said
