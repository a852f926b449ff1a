"""Policies that give out GPUs one by one, on Slurm: a job that may be joined runs in a group of its own. Pure.

Slurm lends a job's GPUs to nobody. So a job that others may share with starts through a host job, as a group of one,
and a later one joins it where it is to have just the same GPUs (`whole_sets_only`).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muri.policies.cycle.packed import mem_gib_of
from muri.policies.cycle.validation import RequestError
from muri.policies.types import (
    Group,
    NodeShare,
    Plan,
    PlanJob,
    PlanRequest,
    Policy,
    Reason,
    Sharer,
    Solo,
    Waiting,
    sentences,
)
from muri.slurm_plugin.actions import Action, Join, MemberPlan, StartGroup
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.joins import join_to, why_no_room
from muri.slurm_plugin.model import Node
from muri.slurm_plugin.planning import Knowledge, Preparation, actions_of, member_mem_mib
from muri.slurm_plugin.running import RunningGroup, running_groups
from muri.slurm_plugin.sharing_request import sharing_request
from muri.slurm_plugin.view import View

log = logging.getLogger("muri.controller")

Place = tuple[str, int]

_PARTLY = Reason(
    "the plan puts it on GPUs that running jobs hold only in part or in several sets; on Slurm it can only join one "
    "running job, on just the same GPUs"
)
_UNMEASURED = Reason("its model has no profile yet; its script must not run beside its own dry run")


@dataclass(frozen=True, slots=True)
class Shared:
    """What can be done of a plan.

    Attributes:
        plan: The plan in terms of groups and jobs alone.
        actions: Starts and joins.
    """

    plan: Plan
    actions: tuple[Action, ...]


def ask_to_share(
    policy: Policy, preparation: Preparation, view: View, know: Knowledge, config: Config
) -> tuple[Shared, Preparation]:
    """Ask a policy that gives out GPUs one by one, and say what its answer means on Slurm.

    Args:
        policy: The policy.
        preparation: The request for policies that group.
        view: The snapshot by roles.
        know: What the cycle knows.
        config: Limits.
    """
    request = sharing_request(preparation.request, view, know, config)
    try:
        plan = policy.plan(request)
    except RequestError as error:
        if not request.running:
            raise
        log.warning("nobody can join a running job in this cycle: %s", error)
        request = replace(request, running=())
        plan = policy.plan(request)
    return share(plan, request, view, know, config), replace(preparation, request=request)


def share(plan: Plan, request: PlanRequest, view: View, know: Knowledge, config: Config) -> Shared:
    """Return what a plan with sharers means on Slurm.

    Args:
        plan: The policy's answer.
        request: What it was asked, by `sharing_request`.
        view: The snapshot by roles.
        know: As for the request.
        config: Limits.
    """
    at_work = {job.job_id for unit in request.running for job in unit.members}
    jobs = {job.job_id: job for job in request.jobs}
    sorted_out = _SortedOut(
        request, {member.job_id: group for group in running_groups(view) for member in group.members}
    )
    for sharer in plan.sharers:
        if sharer.job_id not in at_work:
            sorted_out.add(sharer, jobs[sharer.job_id], view, know, config)
    waiting = [item for item in plan.waiting if item.job_id not in at_work]
    solo = (*(item for item in plan.solo if item.job_id not in at_work), *sorted_out.solo)
    done = replace(
        plan, groups=tuple(sorted_out.groups), solo=solo, waiting=(*waiting, *sorted_out.waiting), sharers=()
    )
    starts = tuple(_prepared(action, sorted_out.steps, jobs, view) for action in actions_of(done, view, know, config))
    return Shared(done, (*starts, *sorted_out.joins))


class _SortedOut:
    """The new sharers of a plan by what they become."""

    def __init__(self, request: PlanRequest, groups: Mapping[int, RunningGroup]) -> None:
        self.groups: list[Group] = []
        self.solo: list[Solo] = []
        self.waiting: list[Waiting] = []
        self.joins: list[Join] = []
        self.steps: dict[int, int] = {}
        self._now_s = request.now_s
        self._running_groups = groups
        self._holders: dict[frozenset[Place], int] = {}
        self._held: dict[Place, int] = {}
        for unit in request.running:
            self._hold(unit.members[0].job_id, _places(unit.gpus))

    def add(self, sharer: Sharer, job: PlanJob, view: View, know: Knowledge, config: Config) -> None:
        """Decide what becomes of one."""
        self.steps[sharer.job_id] = sharer.accumulate_steps
        places = _places(sharer.gpus)
        met = {self._held[place] for place in places if place in self._held}
        if not met:
            self._start(sharer, job, config)
            self._hold(sharer.job_id, places)
            return
        group = self._running_groups.get(self._holders.get(places, 0))
        if group is not None and not any(join.host == group.host.job_id for join in self.joins):
            self._join(sharer, job, group, view, know, config)
        elif met & {started.members[0] for started in self.groups}:
            why = Reason("it will join job {} once that one runs", (min(met),))
            self.waiting.append(Waiting(sharer.job_id, (why,)))
        else:
            self.waiting.append(Waiting(sharer.job_id, (_PARTLY,)))

    def _hold(self, job_id: int, places: frozenset[Place]) -> None:
        self._holders.setdefault(places, job_id)
        self._held |= {place: self._held.get(place, job_id) for place in places}

    def _start(self, sharer: Sharer, job: PlanJob, config: Config) -> None:
        if job.groupable and job.profile is None and self._now_s - job.submit_s <= config.grouping.max_wait_s:
            self.waiting.append(Waiting(sharer.job_id, (_UNMEASURED,)))
            return
        if not job.groupable or job.profile is None:
            self.solo.append(Solo(sharer.job_id, sharer.reasons, sharer.gpus))
            return
        speed, period_s = {sharer.job_id: sharer.speed}, job.profile.iteration_s
        self.groups.append(
            # Whoever joins takes turns with it: pairs may be mere estimates here.
            Group((sharer.job_id,), sharer.gpus, job.gpu_count, period_s, 1.0, speed, sharer.reasons)
        )

    def _join(
        self, sharer: Sharer, planned: PlanJob, group: RunningGroup, view: View, know: Knowledge, config: Config
    ) -> None:
        job = view.jobs[sharer.job_id]
        if why := why_no_room(job, group, view, config):
            self.waiting.append(Waiting(sharer.job_id, (*sharer.reasons, Reason("it cannot join yet: {}", (why,)))))
            return
        join = join_to(job, group, sharer.speed, view, know, self._now_s, sentences(sharer.reasons))
        self.joins.append(replace(join, member=_split(join.member, planned, sharer.accumulate_steps)))


def _places(gpus: tuple[NodeShare, ...]) -> frozenset[Place]:
    return frozenset((share.node, gpu_id) for share in gpus for gpu_id in share.gpu_ids)


def _split(member: MemberPlan, job: PlanJob, steps: int) -> MemberPlan:
    """A member whose batches are computed in so many steps, which takes less memory."""
    return member if steps == 1 else replace(member, accumulate_steps=steps, gpu_mem_gib=mem_gib_of(job, steps))


def _prepared(action: Action, steps: Mapping[int, int], jobs: Mapping[int, PlanJob], view: View) -> Action:
    """A start with its members' steps, behind a host with room for one who joins."""
    if not isinstance(action, StartGroup):
        return action
    members = tuple(_split(member, jobs[member.job_id], steps[member.job_id]) for member in action.members)
    node = next(node for node in view.snapshot.nodes if node.name == action.node)
    cpus, mem_mib = _for_two(action, node)
    return replace(action, members=members, cpu_count=cpus, mem_per_node_mib=mem_mib)


def _for_two(action: StartGroup, node: Node) -> tuple[int, int]:
    """CPUs and memory (MiB) of two such jobs, as far as the GPU's part of the node goes and the node has them now.

    What a host holds can't grow later, and one who joins runs in it; its batch script has a CPU and a little memory
    of its own.
    """
    scripts = action.members[0].cpu_count + 1
    cpus = max(action.cpu_count, min(2 * action.cpu_count, node.cpu_count // node.gpu_count - scripts))
    cpus = max(1, min(cpus, node.cpu_count - node.cpus_allocated - scripts))
    if not action.mem_per_node_mib:
        return cpus, 0
    scripts_mib = 2 * (member_mem_mib(action.members[0].original) or 0)
    part_mib = min(node.mem_mib // node.gpu_count, node.mem_mib - node.mem_allocated_mib) - scripts_mib
    return cpus, max(action.mem_per_node_mib, min(2 * action.mem_per_node_mib, part_mib))
