"""The request as policies that give out GPUs one by one want it: running jobs one by one on numbered GPUs. Pure.

Which of a node's GPUs a job gets is Slurm's choice: the numbers only tell apart who shares with whom.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from muri.policies.traits import BatchModel
from muri.policies.types import FreeNode, NodeShare, PlanJob, PlanRequest, Running
from muri.profiler.records import ProfileKey
from muri.slurm_plugin import tags
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.known_sharing import batch_model, interference_table
from muri.slurm_plugin.planning import Knowledge
from muri.slurm_plugin.records.submit_option import SubmitRequest, parse_request
from muri.slurm_plugin.running import running_groups, running_units
from muri.slurm_plugin.view import View

_NO_HOST = "it runs without a host job, so that nobody can join it"
_SEVERAL_GPUS = "jobs on several GPUs are not joined: each of their GPUs has a runtime of its own"
_NO_JOINING = "joining is turned off (grouping.join, grouping.max_group_size or the discipline lockstep)"


def sharing_request(request: PlanRequest, view: View, know: Knowledge, config: Config) -> PlanRequest:
    """Return the request as policies that give out GPUs one by one want it.

    Args:
        request: For policies that group.
        view: The snapshot by roles.
        know: Profiles, and what else is stored of models.
        config: Limits.
    """
    units = tuple(_one_by_one(running_units(view, know, config, request.now_s), view))
    nodes, running = _numbered(request.nodes, units)
    traits = _Traits(know, view, config)
    jobs = tuple(traits.of(job) for job in request.jobs)
    running = tuple(replace(unit, members=tuple(traits.of(job) for job in unit.members)) for unit in running)
    at_work = _keys(job for unit in running for job in unit.members)
    table = interference_table(_keys(jobs), at_work, know.profiles, know.traits.pairs)
    return replace(request, jobs=jobs, nodes=nodes, running=running, interference=table, whole_sets_only=True)


def _keys(jobs: Iterable[PlanJob]) -> list[ProfileKey]:
    return [job.profile.key for job in jobs if job.profile is not None]


class _Traits:
    """Adds to jobs what policies of this kind want to know."""

    def __init__(self, know: Knowledge, view: View, config: Config) -> None:
        self._know, self._view = know, view
        grouping = config.grouping
        self._joins = grouping.join and grouping.max_group_size > 1 and grouping.discipline != "lockstep"
        self._found: dict[tuple[ProfileKey, int], BatchModel | None] = {}

    def of(self, job: PlanJob) -> PlanJob:
        alone = job.alone_reason
        if not alone and not self._joins:
            alone = _NO_JOINING
        elif not alone and job.gpu_count > 1:
            alone = _SEVERAL_GPUS
        return replace(job, groupable=not alone, alone_reason=alone, batch=self._batch(job))

    def _batch(self, job: PlanJob) -> BatchModel | None:
        if job.profile is None:
            return None
        request = parse_request(self._view.jobs[job.job_id].admin_comment) or SubmitRequest()
        steps = request.accumulate
        if steps == 1 and str(job.profile.key) in self._know.traits.accumulating:
            steps = max(1, job.profile.key.batch_size)  # the script says that it can, and sets no limit
        name = job.profile.key, steps
        if name not in self._found:
            self._found[name] = batch_model(name[0], self._know.profiles, self._know.traits.fits, name[1])
        return self._found[name]


def _one_by_one(units: tuple[Running, ...], view: View) -> Iterator[tuple[int, Running]]:
    """Each running job as a unit of its own, with the number of the unit that it shares GPUs in."""
    members = (member for group in running_groups(view) for member in group.members)
    hosted = {member.job_id: tags.parse_state(member.admin_comment) for member in members}
    for number, unit in enumerate(units):
        for job in unit.members:
            # What a member asks for now is Muri's doing: it was groupable, or it would be in no group.
            why = "" if job.job_id in hosted else job.alone_reason or _NO_HOST
            known = replace(job, groupable=not why, alone_reason=why)
            state = hosted.get(job.job_id)
            steps = 1 if state is None else state.accumulate_steps
            yield number, replace(unit, members=(known,), host_shares={}, accumulate_steps=steps)


def _numbered(
    nodes: tuple[FreeNode, ...], units: tuple[tuple[int, Running], ...]
) -> tuple[tuple[FreeNode, ...], tuple[Running, ...]]:
    """Give the GPUs of each node numbers: running jobs the first ones, the free ones the last."""
    room = {node.name: node.gpu_count - node.free_gpus for node in nodes}
    taken = dict.fromkeys(room, 0)
    shares: dict[int, tuple[NodeShare, ...] | None] = {}
    running: list[Running] = []
    for number, unit in units:
        if number not in shares:
            shares[number] = _take(unit, taken, room)
        if (own := shares[number]) is not None:
            running.append(replace(unit, gpus=own))
    return tuple(_with_numbers(node) for node in nodes), tuple(running)


def _take(unit: Running, taken: dict[str, int], room: Mapping[str, int]) -> tuple[NodeShare, ...] | None:
    """The next numbers of each node; None where the snapshot shows fewer GPUs in use than the job holds."""
    if any(taken.get(share.node, 0) + share.gpu_count > room.get(share.node, 0) for share in unit.gpus):
        return None
    found = []
    for share in unit.gpus:
        first = taken[share.node]
        taken[share.node] += share.gpu_count
        found.append(replace(share, gpu_ids=tuple(range(first, first + share.gpu_count))))
    return tuple(found)


def _with_numbers(node: FreeNode) -> FreeNode:
    ids = tuple(range(node.gpu_count))
    free = ids[node.gpu_count - node.free_gpus :] if node.free_gpus else ()
    return replace(node, islands=(free,) if free else (), topology=(ids,))
