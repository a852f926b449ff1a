"""The recorded situations: what stands in a site's files when a cycle begins, one function for each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cluster_parts import (
    ALL_KINDS,
    CPU,
    GPU,
    MIXED,
    NOW_S,
    STORAGE,
    Record,
    at_work,
    group_intent,
    host,
    intent,
    job,
    member,
    node,
    original,
    pair,
    pending_host,
    plan_of,
    profile,
    running,
    sensitivity,
    snapshot,
    tag,
)


@dataclass(frozen=True)
class Case:
    """One situation.

    Attributes:
        queue: What `muri snapshot` writes.
        config: Keys of muri.yaml.
        profiles: As in a file of `muri profile export`.
        documents: Other documents of the profile store.
        intents: The journal's entries.
        facts: The journal's facts: (name, subject, value).
        stale: Keys of profiles that are marked as stale.
    """

    queue: Record
    config: Record
    profiles: list[Record] = field(default_factory=lambda: list(ALL_KINDS))
    documents: list[Record] = field(default_factory=list)
    intents: list[Record] = field(default_factory=list)
    facts: list[tuple[str, str, object]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


CASES: Final[dict[str, Callable[[], Case]]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Give a situation its name."""
    CASES[make.__name__.replace("_", "-")] = make
    return make


def _mix(first: int = 1, **changes: object) -> list[Record]:
    models = ("storage", "cpu", "gpu", "mixed", "cpu", "storage")
    return [job(first + index, model, **changes) for index, model in enumerate(models)]


def _without_durations(jobs: list[Record]) -> list[Record]:
    return [each | {"admin_comment": each["admin_comment"].replace(",duration=1000", "")} for each in jobs]


# Groups.


@case
def groups_muri_s() -> Case:
    return Case(snapshot(_mix(), [node("n1"), node("n2")]), {"policy": "muri-s"})


@case
def groups_muri_l() -> Case:
    return Case(snapshot(_without_durations(_mix()), [node("n1")]), {"policy": "muri-l"})


@case
def groups_muri_jct() -> Case:
    return Case(snapshot(_mix(), [node("n1", 2)]), {"policy": "muri-jct"})


@case
def groups_auto_with_options() -> Case:
    grouping = {
        "max_group_size": 3, "discipline": "lockstep", "isolation": "auto", "ordering": "worst",
        "speed_model": "lockstep", "method": "optimal", "min_speedup": 1.1,
    }  # fmt: skip
    others = {
        "gpu_mem_gib": {"gpu": 10.0},
        "host": {"trace": True, "poll_s": 2.5, "telemetry_s": 7, "hang_timeout_s": 0},
    }
    jobs = [*_mix(), *(each | {"user": "bob", "uid": 1002, "gid": 1002} for each in _mix(11, time_limit_s=0))]
    return Case(snapshot(jobs, [node("n1"), node("n2")]), {"policy": "auto", "grouping": grouping, **others})


@case
def groups_on_several_gpus_and_nodes() -> Case:
    def ddp(job_id: int, model: str, nodes: int, gpus: int, **changes: object) -> Record:
        shape = {
            "gpu_count": nodes * gpus, "gpu_request": f"gres/gpu:{gpus}", "node_count": nodes,
            "cpu_count": 2 * nodes * gpus, "cpus_per_task": 2, "mem_per_node_mib": 4096 * gpus,
        }  # fmt: skip
        return job(job_id, model, **(shape | changes))

    jobs = [
        *(ddp(1 + index, model, 2, 2) for index, model in enumerate(("storage", "gpu", "cpu"))),
        *(ddp(11 + index, model, 1, 2) for index, model in enumerate(("storage", "gpu"))),
        # torchrun: one task on each node
        *(ddp(21 + index, model, 2, 2, cpu_count=8, cpus_per_task=4) for index, model in enumerate(("cpu", "gpu"))),
    ]
    known = [
        each | {"gpu_count": count, "synchronize_s": 0.2, "iteration_s": each["iteration_s"] + 0.2}
        for each in ALL_KINDS
        for count in (2, 4)
    ]
    nodes = [node("n1", 2), node("n2", 2), node("n3", 2)]
    return Case(snapshot(jobs, nodes), {"policy": "muri-s"}, known)


@case
def groups_without_turns() -> Case:
    pairs = [pair("gpu", "mixed", 1.05, 1.1), pair("cpu", "storage", 1.9, 1.8)]
    jobs = [job(1, "gpu"), job(2, "mixed")]
    return Case(snapshot(jobs, [node("n1")]), {"policy": "muri-hybrid"}, documents=pairs)


@case
def a_pair_without_turns_at_work() -> Case:
    gpu, mixed = job(1, "gpu"), job(2, "mixed")
    tags = "muri-host:aa:1,2 muri-mode:plain"
    jobs = [at_work(gpu, 50), at_work(mixed, 50), host(50, "aa", [1, 2], admin_comment=tags), *_mix(3)]
    intents = [group_intent("aa", [plan_of(gpu), plan_of(mixed)], "done", 50)]
    intents[0]["payload"]["mode"] = "plain"
    config = {"policy": "muri-hybrid"}
    pairs = [pair("gpu", "mixed", 1.1, 1.2)]
    return Case(snapshot(jobs, [node("n1", 1, 1), node("n2")]), config, documents=pairs, intents=intents)


# Jobs that start alone.


@case
def alone_for_every_reason() -> Case:
    jobs = [
        job(1, "storage", admin_comment="muri:model=storage,batch-size=8,alone=1"),
        job(2, "storage", array=True),
        job(3, "storage", het=True),
        job(4, "storage", can_requeue=False),
        job(5, "storage", required_nodes="n1"),
        job(6, "storage", gpu_count=2, gpu_request=""),
        job(7, "storage", gpu_count=2, gpu_request="gres/gpu:2", cpu_count=9, cpus_per_task=3),
        job(8, "storage", gpu_count=8, gpu_request="gres/gpu:8", cpu_count=8, cpus_per_task=1),
        job(9, "storage"),
        job(10, "broken"),
        job(11, "cpu"),
        job(12, "gpu", submit_s=NOW_S - 100_000),
    ]
    facts: list[tuple[str, str, object]] = [
        ("bar", "9", "its group's pilot job has ended"),
        ("dry-run-failed", "broken (batch 8, 1 × gpu)", [2, "the script ended with code 1 too early"]),
    ]
    nodes = [node("n1", 8), node("n2", 8), node("n3", 8)]
    return Case(snapshot(jobs, nodes), {"policy": "muri-s"}, facts=facts)


@case
def alone_because_grouping_and_profiling_are_off() -> Case:
    config = {"policy": "muri-s", "grouping": {"max_group_size": 1}, "profiling": {"at_once": 0}}
    return Case(snapshot([*_mix(), job(9, "unknown")], [node("n1", 2)]), config)


@case
def alone_because_profiling_is_off() -> Case:
    config = {"policy": "muri-l", "profiling": {"at_once": 0}}
    return Case(snapshot([job(1, "storage"), job(9, "unknown")], [node("n1", 2)]), config)


@case
def alone_on_slurm_22_05() -> Case:
    return Case(snapshot(_mix(), [node("n1")], version="22.05.11", no_gpus=""), {"policy": "muri-s"})


@case
def alone_by_fifo() -> Case:
    jobs = [*_mix(), job(9, "unknown")]
    return Case(snapshot(jobs, [node("n1", 3, 1)]), {"policy": "fifo", "preemption": {"enabled": False}})


@case
def not_served_held_by_users_and_not_ready() -> Case:
    given = {"given_s": int(NOW_S) - 10, "original": original(job(8, "cpu"))}
    jobs = [
        job(1, "storage", partition="other"),
        job(2, "storage", gpu_count=0, gpu_request=""),
        job(3, "storage", admin_comment="muri:model=storage,batch-size=8 muri-hold:user"),
        job(4, "storage", reason="SpecialExit"),
        job(5, "storage", reason="JobHoldMaxRequeue"),
        job(6, "storage", dependency="afterok:4"),
        job(7, "storage", begin_s=NOW_S + 600),
        job(8, "cpu") | {"admin_comment": f"muri:model=cpu,batch-size=8 {tag('muri-given:', given)}"},
        job(9, "gpu", admin_comment="site-text muri:model=gpu,batch-size=8,duration=100"),
        job(10, admin_comment="nothing of Muri's", held=False),
        job(11, name="muri-host", admin_comment="", comment="muri-host:abc:1,2"),
        job(12, admin_comment="muri:"),
    ]
    nodes = [node("n1", 2), node("n2", usable=False, state="DOWN"), node("n3", partitions=["other"])]
    return Case(snapshot(jobs, nodes), {"policy": "muri-s", "partitions": ["main"]})


# Dry runs.


@case
def dry_runs_new_again_and_waiting_for_partners() -> Case:
    jobs = [
        job(1, "unknown", submit_s=NOW_S - 30),
        job(2, "unknown", submit_s=NOW_S - 20),
        job(3, "storage", submit_s=NOW_S - 10),
        job(4, "old", submit_s=NOW_S - 500),
        job(5, "old", submit_s=NOW_S - 400),
        job(6, "strange", submit_s=NOW_S - 5, submit_line="sbatch --muri /home/alice/train.sh --lr 0.1 'a b'"),
        job(7, "lonely", submit_s=NOW_S - 4, user="bob", uid=1002,
            admin_comment="muri:model=lonely,batch-size=8,alone=1"),
        job(8, "", submit_s=NOW_S - 3, user="carol", uid=1003, admin_comment="muri: muri-script:0123abcd"),
    ]  # fmt: skip
    config = {"policy": "muri-s", "profiling": {"at_once": 5, "time_limit_s": 120, "partition": "debug"}}
    known = [*ALL_KINDS, profile("old", (0.1, 0.1, 0.7, 0.0))]
    return Case(snapshot(jobs, [node("n1")]), config, known, stale=["old"])


@case
def dry_runs_with_estimates() -> Case:
    jobs = [job(1, "scaled"), job(2, "cpu"), job(3, "gpu")]
    known = [*ALL_KINDS, profile("scaled", (0.5, 0.1, 0.2, 0.1), gpu_count=2)]
    return Case(snapshot(jobs, [node("n1")]), {"policy": "muri-s"}, known)


def _key(model: str) -> Record:
    return {"model": model, "batch_size": 8, "gpu_count": 1, "gpu_type": "gpu"}


@case
def dry_runs_that_have_ended() -> Case:
    measured = {
        "load_s": 0.1, "preprocess_s": 0.2, "propagate_s": 0.3, "synchronize_s": 0.0, "iteration_s": 0.6,
        "iterations": 30, "gpu_mem_gib": 2.5, "detail": {}, "token": "t1", "accumulates": True,
    }  # fmt: skip
    failed = {"error": "the script ended with code 1 too early", "token": "t2"}
    jobs = [
        job(1, "done", comment=f"words {tag('muri-profile:', measured)}"),
        job(2, "failed", comment=tag("muri-profile:", failed)),
        job(3, "silent"),
        running(job(4, "started", admin_comment="muri:model=started,batch-size=8"), "n2"),
        job(5, "never"),
        job(6, "wrong", comment=tag("muri-profile:", measured | {"token": "t6", "iteration_s": -1})),
        job(103, admin_comment="muri-dryrun:t3", held=False, state="FAILED"),
        running(job(104, admin_comment="muri-dryrun:t4"), "n2"),
        running(job(107, admin_comment="muri-dryrun:t9"), "n2"),
        running(job(108, admin_comment="muri-dryrun:t8"), "n2"),
    ]
    begun = [
        intent(f"t{job_id}", "dry-run", {"job_id": job_id, "key": _key(model), "again": again}, "begun", run, 300)
        for job_id, model, run, again in (
            (1, "done", 101, False),
            (2, "failed", 102, False),
            (3, "silent", 103, False),
            (4, "started", 104, False),
            (5, "never", None, False),
            (6, "wrong", 106, False),
            (7, "gone", 107, False),
            (8, "storage", 108, True),
        )
    ]
    refused = [1, "Slurm refused it", NOW_S - 600]
    facts: list[tuple[str, str, object]] = [("dry-run-failed", "failed of alice (batch 8, 1 × gpu)", refused)]
    nodes = [node("n1"), node("n2", 4, 4)]
    return Case(snapshot(jobs, nodes), {"policy": "muri-s"}, intents=begun, facts=facts)


# Joining groups, sharing GPUs.


def _pair_at_work(steps: int = 1) -> tuple[list[Record], list[Record]]:
    """Two members that run on n1, and the journal's entry."""
    storage, cpu = job(1, "storage"), job(2, "cpu")
    jobs = [at_work(storage, 50), at_work(cpu, 50, steps=steps), host(50, "aa", [1, 2])]
    return jobs, [group_intent("aa", [plan_of(storage), plan_of(cpu, 0.7)], "done", 50)]


@case
def joins_a_running_group() -> Case:
    jobs, intents = _pair_at_work()
    waiting = [job(3, "gpu"), job(4, "mixed"), job(5, "storage", user="bob", uid=1002)]
    return Case(snapshot([*jobs, *waiting], [node("n1", 1, 1)]), {"policy": "muri-s"}, intents=intents)


@case
def joins_that_were_cut_off() -> Case:
    jobs, intents = _pair_at_work()
    waiting = [job(3, "gpu"), running(job(4, "mixed"), "n2"), job(5, "gpu")]

    def join(token: str, record: Record, host_job: int) -> Record:
        payload = {
            "host": host_job, "node": "n1", "member": plan_of(record, 0.6), "others": [[1, 10800], [2, 10800]],
            "host_limit_s": 12600, "reasons": ["it joins jobs 1, 2, which have resources to spare"],
        }  # fmt: skip
        return intent(token, "join", payload, "begun", host_job, 200)

    intents = [*intents, join("j3", waiting[0], 50), join("j4", waiting[1], 50), join("j5", waiting[2], 51)]
    nodes = [node("n1", 1, 1), node("n2", 1, 1)]
    return Case(snapshot([*jobs, *waiting], nodes), {"policy": "muri-s"}, intents=intents)


SHARING: Final = [
    profile("long", (0.0, 0.7, 0.3, 0.0), gpu_mem_gib=6.0),
    profile("short", (0.0, 0.05, 0.45, 0.0), gpu_mem_gib=8.0),
    profile("short", (0.0, 0.03, 0.27, 0.0), gpu_mem_gib=5.0, batch_size=4),
    profile("light", (0.3, 0.1, 0.1, 0.0), gpu_mem_gib=1.0, detail={"gpu_utilisation": 0.2}),
]


def _sharers() -> list[Record]:
    return [
        job(11, "short", admin_comment="muri:model=short,batch-size=8,duration=100,accumulate=8"),
        job(12, "light", admin_comment="muri:model=light,batch-size=8,duration=400"),
        job(13, "long", admin_comment="muri:model=long,batch-size=8,duration=9000"),
        job(14, "unknown"),
        job(15, "light", gpu_count=2, gpu_request="gres/gpu:2", cpu_count=8),
        job(16, "short", admin_comment="muri:model=short,batch-size=8,duration=50,alone=1"),
        job(17, "light", admin_comment="muri:model=light,batch-size=8,duration=300", submit_s=NOW_S - 90_000),
    ]


def _one_at_work() -> tuple[list[Record], list[Record]]:
    """One job on n1 in a group of its own, and one on n2 that was released."""
    long = job(1, "long", admin_comment="muri:model=long,batch-size=8,duration=10000")
    released = running(job(2, "light", admin_comment="muri:model=light,batch-size=8,duration=5000"), "n2")
    jobs = [at_work(long, 50), host(50, "aa", [1]), released]
    return jobs, [group_intent("aa", [plan_of(long, 1.0)], "done", 50)]


def _sharing(policy: str, **config: object) -> Case:
    jobs, intents = _one_at_work()
    nodes = [node("n1", 1, 1), node("n2", 2, 1), node("n3", 1)]
    documents = [pair("long", "short", 1.2, 1.3)]
    settings = {"policy": policy, "gpu_mem_gib": {"gpu": 10.0}, **config}
    return Case(snapshot([*jobs, *_sharers()], nodes), settings, SHARING, documents, intents)


@case
def sharing_sjf_bsbf() -> Case:
    return _sharing("sjf-bsbf")


@case
def sharing_sjf_ffs() -> Case:
    return _sharing("sjf-ffs")


@case
def sharing_horus() -> Case:
    return _sharing("horus", horus={"jobs_per_round": 4})


@case
def sharing_horus_f() -> Case:
    return _sharing("horus-f")


@case
def packing_obp() -> Case:
    return _sharing("obp")


@case
def packing_pab() -> Case:
    return _sharing("pab", preemption={"enabled": True})


@case
def packing_tetris() -> Case:
    return _sharing("tetris")


@case
def sharing_with_split_batches() -> Case:
    jobs, intents = _one_at_work()
    config = {"policy": "sjf-bsbf", "gpu_mem_gib": {"gpu": 10.0}, "grouping": {"min_speed": 0.4}}
    queue = snapshot([*jobs[:2], _sharers()[0]], [node("n1", 1, 1)])
    return Case(queue, config, SHARING, [pair("long", "short", 1.2, 1.3)], intents)


@case
def sharing_without_joins() -> Case:
    return _sharing("sjf-bsbf", grouping={"join": False})


# Stopping running jobs.


def _checkpointed(job_id: int, model: str, duration_s: int, **changes: object) -> Record:
    request = f"muri:model={model},batch-size=8,duration={duration_s},checkpoint=1"
    return job(job_id, model, admin_comment=request, **{"comment": "muri-checkpoint:0", **changes})


@case
def preemption_for_shorter_jobs() -> Case:
    jobs = [
        running(_checkpointed(1, "storage", 90_000), "n1", 2000),
        running(_checkpointed(2, "cpu", 90_000), "n2", 100),
        running(_checkpointed(3, "gpu", 90_000, comment=""), "n3", 2000),
        running(_checkpointed(4, "gpu", 90_000, can_requeue=False), "n4", 2000),
        *(job(10 + index, "gpu", admin_comment="muri:model=gpu,batch-size=8,duration=60") for index in range(5)),
    ]
    nodes = [node(f"n{index}", 1, 1) for index in (1, 2, 3, 4)]
    return Case(snapshot(jobs, nodes), {"policy": "srtf", "preemption": {"enabled": True, "restart_s": 30}})


@case
def preemption_in_muri_s() -> Case:
    members = [_checkpointed(1, "storage", 90_000), _checkpointed(2, "cpu", 80_000)]
    jobs = [*(at_work(each, 50) for each in members), host(50, "aa", [1, 2]), *_mix(11)]
    intents = [group_intent("aa", [plan_of(each) for each in members], "done", 50)]
    config = {"policy": "muri-s", "preemption": {"enabled": True, "least_run_s": 300}}
    return Case(snapshot(jobs, [node("n1", 1, 1)]), config, intents=intents)


@case
def preemption_under_way() -> Case:
    stopped = {"restart_count": 1, "begin_s": NOW_S + 100, "comment": "muri-stopped:0"}
    given = {"given_s": int(NOW_S) - 4000, "original": original(job(7, "cpu"))}
    jobs = [
        job(1, "storage", restart_count=1, begin_s=NOW_S + 100),
        running(_checkpointed(2, "cpu", 1000), "n2"),
        job(3, "gpu", restart_count=1, held=False),
        running(_checkpointed(4, "gpu", 1000), "n4") | {"state": "COMPLETING"},
        job(6, "mixed", **stopped),
        job(7, "cpu", **stopped, cpu_count=9, cpus_per_task=9)
        | {"admin_comment": f"muri:model=cpu,batch-size=8,checkpoint=1 {tag('muri-given:', given)}"},
        member(job(8, "gpu"), 50, held=True, **stopped),
        host(50, "aa", [8, 9]),
        at_work(job(9, "cpu"), 50),
    ]
    begun = [
        intent(f"p{job_id}", "preempt", {"job_id": job_id, "run": 0, "why": "others come first",
               "served_gpu_s": 500.0}, "begun", None, 60)
        for job_id in (1, 2, 3, 4, 5)
    ]  # fmt: skip
    begun += [group_intent("aa", [plan_of(job(8, "gpu")), plan_of(job(9, "cpu"))], "done", 50)]
    nodes = [node("n1", 2, 2), node("n2", 1, 1), node("n3", 1), node("n4", 1, 1)]
    config = {"policy": "las", "preemption": {"enabled": True}}
    return Case(snapshot(jobs, nodes), config, intents=begun)


# CPUs and memory that a policy plans.


APPETITES: Final = [
    sensitivity("hungry", [(1, 1.0), (9, 9.0), (16, 9.1)], 9),
    sensitivity("modest", [(2, 5.0), (16, 5.1)], 2),
]


@case
def shares_synergy_tune() -> Case:
    jobs = [
        job(1, "hungry"),
        job(2, "modest", mem_per_cpu_mib=2048),
        job(3, "storage"),
        job(4, "modest", submit_line="sbatch --cpus-per-gpu=4 train.sh", special=["--cpus-per-gpu"]),
        job(5, "hungry", gpu_count=2, gpu_request="gres/gpu:2", cpu_count=8),
    ]
    config = {"policy": "synergy-tune", "profiling": {"at_once": 0}}
    return Case(snapshot(jobs, [node("n1", 2), node("n2", 4)]), config, documents=APPETITES)


@case
def shares_only_raised() -> Case:
    jobs = [job(1, "hungry"), job(2, "modest", mem_per_node_mib=0), job(3, "storage")]
    allocation = {"cpus": "raise-only", "memory": "off"}
    config = {"policy": "synergy-tune", "profiling": {"at_once": 0}, "allocation": allocation}
    return Case(snapshot(jobs, [node("n1", 4)]), config, documents=APPETITES)


@case
def shares_that_are_taken_back() -> Case:
    def given(record: Record, ago_s: int) -> Record:
        tagged = tag("muri-given:", {"given_s": int(NOW_S) - ago_s, "original": original(record)})
        changed = {"cpu_count": 10, "cpus_per_task": 10, "mem_per_node_mib": 16384, "required_nodes": "n1"}
        return record | changed | {"admin_comment": f"{record['admin_comment']} {tagged}"}

    jobs = [
        given(job(1, "hungry"), 10),
        given(job(2, "hungry"), 1000),
        given(job(3, "modest", held=False, mem_per_cpu_mib=2048), 1000),
        given(job(4, "modest", held=False), 10),
        given(job(5, "modest", partition="other"), 10),
        given(job(6, "modest", admin_comment="muri:model=modest muri-hold:user"), 10),
        running(given(job(7, "hungry"), 900), "n1"),
    ]
    config = {"policy": "synergy-tune", "partitions": ["main"], "profiling": {"at_once": 0}}
    return Case(snapshot(jobs, [node("n1", 4, 1)]), config, documents=APPETITES)


# Mending what was cut off or lost.


@case
def starts_that_were_cut_off() -> Case:
    jobs = [
        member(job(1, "storage"), 50),
        job(2, "cpu"),
        pending_host(50, "aa", [1, 2], 20),
        job(3, "gpu"),
        job(4, "mixed"),
        job(5, "gpu"),
        host(51, "cc", [5]) | {"state": "FAILED"},
        host(52, "dd", [99], "n2", submit_s=NOW_S - 30),
        host(53, "ee", [98], "n2"),
        host(54, "lost", [97], "n2"),
        job(60, name="muri-host", admin_comment="", comment="muri-host:ff:1,2", submit_s=NOW_S - 100),
        job(61, admin_comment="", comment="muri-dryrun:gg", submit_s=NOW_S - 10),
    ]
    intents = [
        group_intent("aa", [plan_of(job(1, "storage")), plan_of(job(2, "cpu"))], "begun", None, 20),
        group_intent("bb", [plan_of(job(3, "gpu")), plan_of(job(4, "mixed"))], "begun", None, 20),
        group_intent("cc", [plan_of(job(5, "gpu"))], "begun", 51, 20),
        group_intent("dd", [], "done", 52, 30),
        group_intent("ee", [], "abandoned", 53, 400),
    ]
    return Case(snapshot(jobs, [node("n1"), node("n2", 3, 3)]), {"policy": "muri-s"}, intents=intents)


@case
def members_that_lost_their_host() -> Case:
    fault = tag("muri-fault:", {"cause": "CUDA error: an illegal memory access", "culprits": [3]})
    jobs = [
        member(job(1, "storage", restart_count=1), 50, held=True),
        member(job(2, "cpu", mem_per_cpu_mib=2048), 40),
        member(job(3, "gpu", restart_count=1), 51, held=True),
        member(job(4, "mixed", restart_count=1), 51, held=True),
        member(job(5, "gpu"), 52),
        member(job(6, "cpu"), 53),
        member(job(7, "storage"), 53, held=True),
        member(job(8, "storage", restart_count=1), 53, held=True, reason="SpecialExit"),
        member(job(9, "storage"), 53) | {"admin_comment": "muri:model=storage muri-state:{damaged"},
        host(50, "aa", [1]) | {"state": "COMPLETED"},
        host(51, "bb", [3, 4]) | {"state": "FAILED", "comment": fault},
        pending_host(52, "cc", [5], 400),
        host(53, "dd", [6, 7, 8], "n2"),
    ]
    intents = [
        group_intent("aa", [plan_of(job(1, "storage"))], "done", 50),
        group_intent("bb", [plan_of(job(3, "gpu")), plan_of(job(4, "mixed"))], "done", 51),
        group_intent("cc", [plan_of(job(5, "gpu"))], "done", 52, 400),
        group_intent("dd", [plan_of(job(6, "cpu")), plan_of(job(7, "storage"))], "done", 53),
    ]
    return Case(snapshot(jobs, [node("n1"), node("n2", 1, 1)]), {"policy": "muri-s"}, intents=intents)


@case
def members_that_ran_out_of_memory() -> Case:
    def short(job_id: int, times: int, model: str = "light") -> Record:
        record = job(job_id, model, restart_count=1)
        told = {"held": True, "comment": f"muri-out-of-memory:0.{times}"}
        return member(record, 50, **told)

    jobs = [short(1, 1), short(2, 3), short(3, 9), member(job(4, "short", restart_count=2), 50, held=True,
            comment="muri-out-of-memory:0.1"), host(50, "aa", [1, 2, 3, 4])]  # fmt: skip
    intents = [group_intent("aa", [plan_of(job(each["job_id"], "light")) for each in jobs[:4]], "done", 50)]
    config = {"policy": "horus", "gpu_mem_gib": {"gpu": 10.0}}
    facts: list[tuple[str, str, object]] = [("gpu-mem", "1", 4.0)]
    return Case(snapshot(jobs, [node("n1", 1, 1)]), config, SHARING, intents=intents, facts=facts)


@case
def a_journal_that_was_lost() -> Case:
    jobs, _ = _pair_at_work()
    return Case(snapshot([*jobs, job(3, "gpu")], [node("n1", 1, 1)]), {"policy": "muri-s"}, [STORAGE, CPU, GPU, MIXED])
