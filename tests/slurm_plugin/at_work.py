"""Jobs that wait, groups at work, and a cycle's decisions about them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fake_slurm import FOUR_KINDS, GPUS_REMOVABLE, NOW_S, make_job

from muri.policies.types import Plan, PlanRequest, Policy
from muri.profiler.interference import Interference, Side
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.decision import Decision, decide
from muri.slurm_plugin.planning.model_traits import KnownTraits
from muri.slurm_plugin.planning.slurm_requests import asked_by
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Reservation, Snapshot
from muri.slurm_plugin.records.limits import NO_SITE_LIMITS, SiteLimits
from muri.slurm_plugin.records.roles import view_of

HOUR_S = 3600


def candidate(job_id: int, model: str = "m1", words: str = "", **changes: Any) -> Job:
    return make_job(job_id, **{"admin_comment": f"muri:model={model},batch-size=8,duration=100{words}", **changes})


def behind_pilot(number: int, *members: Job, own_s: int = 0, promise: float = 0.0, **pilot: Any) -> list[Job]:
    """Pilot job 1000 + number on node n<number>, and its members; they have run for ten minutes.

    Args:
        number: Of pilot and node.
        members: As their users submitted them; each has its time limit from Muri.
        own_s: The time limits that their users asked for; 0: the same.
        promise: The speed that they were promised.
        pilot: Changes to the pilot job.
    """
    node, pilot_id, ids = f"n{number}", 1000 + number, tuple(job.job_id for job in members)
    at_work = {"state": JobState.RUNNING, "held": False, "reason": "", "nodes": node, "start_s": NOW_S - 600}
    tag = tags.PILOT_PREFIX + tags.format_pilot(f"t{number}", ids)
    asks = {"time_limit_s": HOUR_S + 600, "cpu_count": members[0].gpu_count, "admin_comment": tag}
    jobs = [make_job(pilot_id, **{**asks, **at_work, **pilot})]
    for job in members:
        own = replace(asked_by(job), time_limit_s=own_s or job.time_limit_s)
        state = tags.format_state(tags.MemberState(pilot_id, own, limit_s=job.time_limit_s, min_speed=promise))
        planned = tags.Planned(("it runs",), 0.9, 1.0)
        words = f"{tags.STATE_PREFIX}{state} {tags.GRANT_PREFIX}{pilot_id}"
        comment = tags.with_plan(f"{job.admin_comment} {words}", planned)
        taken = {"gpu_count": 0, "gpu_request": "", "required_nodes": node}
        jobs.append(replace(job, admin_comment=comment, **taken, **at_work))
    return jobs


def cycle_of(
    jobs: Iterable[Job], nodes: Sequence[Node], *reservations: Reservation, limits: SiteLimits = NO_SITE_LIMITS,
    known: Iterable[StageProfile] = FOUR_KINDS, traits: KnownTraits | None = None, **config: Any,
) -> CycleInput:  # fmt: skip
    """Return the input of a cycle; `config` differs from the shipped configuration and, as `tuning`, from constants."""
    snapshot = Snapshot(
        NOW_S, "c", "26.05", tuple(jobs), tuple(nodes), reservations, limits=limits, gpu_removal=GPUS_REMOVABLE
    )
    knowledge = Knowledge({profile.key: profile for profile in known}, traits=traits or KnownTraits())
    tuning = config.pop("tuning", {})
    return CycleInput(view_of(snapshot), knowledge, Config.model_validate(config).tuned(**tuning))


def decided(jobs: Iterable[Job], nodes: Sequence[Node], *reservations: Reservation, **changes: Any) -> Decision:
    """Return a cycle's decision; `changes` as `cycle_of` takes them."""
    cycle = cycle_of(jobs, nodes, *reservations, **changes)
    return decide(cycle, policy_of(cycle.config))


def measured_pair(a: ProfileKey, b: ProfileKey, ratio_a: float, ratio_b: float, *, turns: bool = False) -> Interference:
    """How many times as long as alone the iterations of two models took beside each other."""
    sides = [Side(key, 1.0, ratio, ratio, None, 0.9, 10) for key, ratio in ((a, ratio_a), (b, ratio_b))]
    return Interference(*sides, rounds=3, measured_s=1.0, measured_at="2026-01-01T00:00:00+00:00", turns=turns)


@dataclass
class Changed:
    """A policy whose plans something changes."""

    base: Policy
    change: Callable[[PlanRequest, Plan], Plan]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def plan(self, request: PlanRequest) -> Plan:
        return self.change(request, self.base.plan(request))


def of_kind(decision: Decision, kind: type[Any]) -> list[Any]:
    """The actions of one kind."""
    return [action for action in decision.actions if isinstance(action, kind)]
