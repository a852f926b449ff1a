"""A story: a small workload and the faults that meet it, all drawn from a seed; each part can be left out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.records.limits import Association, Limits, PartitionLimits, Qos, SiteLimits, Tres
from muri_lab.twin.programs import Work
from muri_lab.twin.sharing import Iteration
from muri_lab.twin.site import Delays, Site, SlurmConf, plain_nodes, shared_cpus
from muri_lab.twin.submission import Submission
from muri_lab.twin.twin import EPOCH_S

CONTROLLER_FAULTS: Final = (
    "controller killed before a call", "controller killed after a call", "call fails", "call times out",
    "call takes effect and fails", "stale snapshot", "partial snapshot", "second controller", "controller told to stop",
    "controller away for long", "clock step",
)  # fmt: skip
SLURM_FAULTS: Final = (
    "slurmctld restarted", "slurmctld away for long", "node drained", "node failed", "maintenance reservation",
)  # fmt: skip
JOB_FAULTS: Final = (
    "placeholder cancelled", "placeholder killed", "runtime killed", "member killed", "muri run killed",
    "dry run killed",
)  # fmt: skip
PEOPLE: Final = (
    "user cancels", "user holds", "user releases", "user requeues", "user changes request", "user takes license off",
    "user forges comment", "administrator holds", "administrator requeues and holds", "administrator changes limit",
)  # fmt: skip
STATE_FAULTS: Final = (
    "journal lost", "journal damaged", "profile store lost", "profile store damaged", "disk full",
    "AdminComment truncated",
)  # fmt: skip
SITE_CHANGES: Final = ("drained", "removed", "upgraded")
KINDS: Final = (*CONTROLLER_FAULTS, *SLURM_FAULTS, *JOB_FAULTS, *PEOPLE, *STATE_FAULTS, *SITE_CHANGES)
"""Every kind of fault."""

_POLICIES: Final = ("muri-s", "muri-l", "muri-slurm", "muri-jct", "muri-s", "sjf-bsbf", "horus", "muri-hybrid")
_FAULTS_WITHIN_S: Final = 420.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    at_s: float  # When, in seconds from the beginning
    kind: str  # One of `KINDS`
    which: int  # chooses among its targets
    amount: float  # How much or how long, 0 to 1

    def __str__(self) -> str:
        """For people."""
        return f"{self.at_s:6.1f} s  {self.kind} (which {self.which}, amount {self.amount:.2f})"


@dataclass(frozen=True, slots=True)
class Story:
    """A workload, a site, a configuration, and faults."""

    seed: int
    site: Site  # The cluster
    config: dict[str, Any]  # What differs from the defaults of muri.yaml
    tuning: dict[str, float]  # What differs from the controller's constants
    profiles: tuple[StageProfile, ...]  # What the profile store knows at first
    submissions: tuple[Submission, ...]  # What users submit
    faults: tuple[Fault, ...] = field(default=())  # What goes wrong, by time

    def only(self, submissions: Sequence[int], faults: Sequence[int]) -> "Story":
        """The same story with a part of its submissions and faults."""
        return replace(
            self,
            submissions=tuple(self.submissions[number] for number in submissions),
            faults=tuple(self.faults[number] for number in faults),
        )


_MODELS: Final = {
    "m1": (0.7, 0.1, 0.1, 0.1),
    "m2": (0.1, 0.7, 0.1, 0.1),
    "m3": (0.1, 0.1, 0.7, 0.1),
    "m4": (0.1, 0.1, 0.1, 0.7),
}


def tell(seed: int, most_faults: int = 10) -> Story:
    """Draw a story from a seed."""
    draw, more = random.Random(f"story {seed}"), random.Random(f"more of story {seed}")
    nodes, gpus = draw.choice(((1, 1), (1, 1), (1, 2), (2, 1), (2, 2)))
    gate: Literal["license", "hold"] = "hold" if draw.random() < 0.25 else "license"
    layers = more.choice((1, 4, 8))
    limits = _limits(draw, layers) if draw.random() < 0.3 else shared_cpus(layers)
    site = Site(
        plain_nodes(nodes, gpus, 16, 64_000),
        limits,
        SlurmConf(bf_interval_s=30.0, cred_expire_s=draw.choice((10.0, 120.0)), gate_license=gate == "license",
                  gate=gate, min_job_age_s=draw.choice((60.0, 300.0))),
        Delays(dry_run_s=20.0, pilot_s=draw.choice((0.5, 5.0))),
    )  # fmt: skip
    policy, gate_watch_s = draw.choice(_POLICIES), draw.choice((0.0, 30.0))
    config = {
        "policy": policy,
        "gate": gate,
        "interval_s": 60.0,
        "lease_s": 240.0,
        "grouping": {"max_wait_s": 900.0, "discipline": draw.choice(("fair", "auto"))},
        "profiling": {"mode": "dry-run", "at_once": draw.choice((0, 1, 2)), "time_limit_s": 120},
    }
    tuning = {
        "gate_watch_s": gate_watch_s,
        "pilot_start_timeout_s": 90.0,
        "attach_timeout_s": 120.0,
        "telemetry_s": 30.0,
        "wait_for_profiles_s": 30.0,
        "dry_run_start_timeout_s": 120.0,
    }
    known = sorted(_MODELS)[: draw.choice((2, 3, 4, 4))]
    profiles = tuple(
        StageProfile(ProfileKey(model, 8, count, "gpu"), *_MODELS[model], iteration_s=1.0, iterations=20)
        for model in known
        for count in (1, 2)
    )
    submissions = tuple(_submission(draw, more, number, gpus) for number in range(draw.randint(2, 7)))
    faults = [
        Fault(round(draw.uniform(0, _FAULTS_WITHIN_S), 1), draw.choice(KINDS), draw.randrange(1000), draw.random())
        for _ in range(draw.randint(0, most_faults))
    ]
    faults.sort(key=lambda fault: fault.at_s)
    return Story(seed, site, config, tuning, profiles, submissions, tuple(faults))


def _limits(draw: random.Random, layers: int) -> SiteLimits:
    """Limits that leave room for each job alone, in a partition where so many jobs may share a CPU."""
    user = Limits(
        max_jobs_per_user=draw.choice((None, 1, 2)),
        max_submit_per_user=draw.choice((None, 6)),
        max_wall_s=draw.choice((None, 7200)),
    )
    account = Limits(grp_tres=draw.choice(((), (Tres("gres/gpu", 2),))))
    return SiteLimits(
        partitions=(PartitionLimits("main", max_time_s=draw.choice((None, 7200)), oversubscribe=layers),),
        enforced=True,
        qos=(Qos("normal", Limits(max_tres_per_user=draw.choice(((), (Tres("gres/gpu", 2),))))),),
        associations=(
            Association("lab", limits=account),
            Association("lab", "alice", parent="lab", limits=user),
            Association("lab", "bob", parent="lab", limits=user),
        ),
    )


def _submission(draw: random.Random, more: random.Random, number: int, gpus: int) -> Submission:
    model = draw.choice(sorted(_MODELS))
    iterations = draw.choice((20, 60, 120, 200, 300))
    user = draw.choice(("alice", "alice", "alice", "bob"))
    count = 2 if gpus > 1 and draw.random() < 0.2 else 1
    marked = draw.random() < 0.92
    limit_s, calls_muri = draw.choice((1200, 3600, 7200)), marked and more.random() < 0.95
    stop_s = more.choice((None, None, None, 15.0))
    return Submission(
        submit_s=EPOCH_S + round(draw.uniform(0, 30) if draw.random() < 0.6 else draw.uniform(0, 240), 1),
        user=user,
        uid={"alice": 1001, "bob": 1002}[user],
        work=Work(
            Iteration(_MODELS[model], 1.0), iterations, draw.choice((0, 0, 0, 3)), uses_muri=calls_muri, stop_s=stop_s
        ),
        mark=f"model={model},batch-size=8" + draw.choice((f",duration={iterations}", "", ",alone=1")) if marked else "",
        name=f"job{number}",
        account="lab",
        qos="normal",
        gpus_per_node=count,
        cpus_per_task=draw.choice((1, 2, 4)) * more.choice((1, 1, 4 // count)),
        mem_per_node_mib=draw.choice((0, 2000)) * more.choice((1, 1, 12)),
        time_limit_s=limit_s,
        held=draw.random() < 0.04,
        can_requeue=draw.random() < 0.93,
        begin_s=EPOCH_S + 200 if draw.random() < 0.05 else 0.0,
        task_count=draw.choice((2, 3, 4)) if draw.random() < 0.06 else 0,
        most_tasks=draw.choice((0, 1, 2)),
    )
