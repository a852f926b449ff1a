"""Whether Slurm takes what the controller asks of it in each partition: a group's pilot job, and a member's changes.

Held jobs of root's own stand for both, under the site's own limits and defaults; they never start, and are cancelled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Final

from muri.errors import MuriError
from muri.slurm_plugin.cli.doctor_checks import Finding, Level
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, first_line
from muri.slurm_plugin.gateway.gpu_removal import cancelled_afterwards, submit_probe
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.planning.actions import MemberPlan
from muri.slurm_plugin.planning.slurm_requests import GroupPlace, member_change, original_request
from muri.slurm_plugin.planning.starts import asked_by
from muri.slurm_plugin.records.cluster import Node, Snapshot
from muri.slurm_plugin.records.comment_tags import MemberState
from muri.slurm_plugin.records.gpu_removal import GpuRemoval, TriedForm
from muri.slurm_plugin.records.roles import ManagedJob, read_job

MARK: Final = "--muri=model=muri-doctor"

_MEMBERS: Final = 2


def examine_members(
    snapshot: Snapshot,
    partitions: tuple[str, ...],
    forms: Sequence[TriedForm],
    gateway: Gateway,
    commands: SlurmCommands,
) -> Iterator[Finding]:
    """Try a pilot and a member in each partition that Muri serves and that has a usable node with GPUs.

    Args:
        snapshot: The nodes and what partitions allow.
        partitions: Those that Muri serves, empty for all.
        forms: How GPUs can be taken away.
        gateway: Changes jobs as the controller does.
        commands: How commands are run.
    """
    homes: dict[str, Node] = {}
    for node in snapshot.nodes:
        if node.usable and node.gpu_count:
            homes |= {name: node for name in node.partitions if not partitions or name in partitions}
    removal = GpuRemoval(forms=tuple(forms), why="")
    for name, node in sorted(homes.items()):
        try:
            why = _why_refused(name, node, snapshot, removal, gateway, commands)
        except MuriError as error:
            yield Finding(f"jobs of {name}", Level.WARNING, f"not tried: {first_line(str(error))}")
            continue
        if why:
            remedy = "nothing, if they may: they run as if Muri weren't there; else change what Slurm refuses"
            yield Finding(f"jobs of {name}", Level.WARNING, f"all of them run alone: {why}", remedy)
        else:
            text = "a pilot job and the changes of a member are taken, and its own request can be given back"
            yield Finding(f"jobs of {name}", Level.OK, text)


def _why_refused(
    partition: str, node: Node, snapshot: Snapshot, removal: GpuRemoval, gateway: Gateway, commands: SlurmCommands
) -> str:
    """Return why no group can be in a partition, "" if one can.

    Raises:
        MuriError: It could not be tried.
    """
    where = f"--partition={partition}"
    with _probe(gateway, commands, "--gres=gpu:1", where, MARK) as job:
        way = removal.way_for(job.gpu_request, snapshot.limits.partition(partition))
        if not way.request:
            return f"their GPUs cannot be taken away ({way.why})"
        memory = [f"--mem={_MEMBERS * job.mem_per_node_mib}M"] if job.mem_per_node_mib else []
        try:
            pilot_id = submit_probe(commands, "--gres=gpu:1", where, f"--cpus-per-task={job.given_cpus}", *memory)
        except GatewayError as error:
            return f"Slurm refuses a pilot job: {first_line(str(error))}"
        with cancelled_afterwards(commands, pilot_id):
            return _why_not_changed(job, GroupPlace(pilot_id, node.name, ()), way.request, gateway)


def _why_not_changed(job: ManagedJob, place: GroupPlace, no_gpus: str, gateway: Gateway) -> str:
    member = MemberPlan(job.job_id, asked_by(job), None, 1.0, _MEMBERS * job.time_limit_s)
    try:
        gateway.modify(job.job_id, member_change(member, place, job, no_gpus=no_gpus))
        own = original_request(replace(job, membership=MemberState(place.pilot, member.original)))
        gateway.modify(job.job_id, replace(own, start_now=False))
    except GatewayError as error:
        return f"Slurm refuses a member's changes: {first_line(str(error))}"
    now = asdict(asked_by(_read(gateway, job.job_id)))
    changed = [
        f"{name} is {now[name]} after {value}" for name, value in asdict(member.original).items() if now[name] != value
    ]
    return f"Slurm does not give a job its own request back: {', '.join(changed)}" if changed else ""


@contextmanager
def _probe(gateway: Gateway, commands: SlurmCommands, *options: str) -> Iterator[ManagedJob]:
    with cancelled_afterwards(commands, submit_probe(commands, *options)) as job_id:
        yield _read(gateway, job_id)


def _read(gateway: Gateway, job_id: int) -> ManagedJob:
    (job,) = gateway.one_job(job_id).jobs
    return read_job(job)
