"""What `muri doctor` and `muri config check` ask of Slurm: whether names are there, and what becomes of a real job."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final, NamedTuple

from ClusterShell.NodeSet import NodeSet

from muri.errors import MuriError
from muri.pythons import is_packaged
from muri.slurm_plugin.cli.doctor_checks import Finding, Level
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_gateway
from muri.slurm_plugin.controller.surroundings import read_gpu_removal
from muri.slurm_plugin.gateway.base import (
    Gateway,
    GatewayError,
    GatewayUnavailableError,
    SlurmUnreachableError,
    first_line,
)
from muri.slurm_plugin.gateway.gpu_removal import cancelled_afterwards, place_for, submit_probe, try_every_form
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.planning.actions import MemberPlan
from muri.slurm_plugin.planning.slurm_requests import GroupPlace, asked_by, member_change, original_request
from muri.slurm_plugin.records.cluster import Node, Snapshot
from muri.slurm_plugin.records.comment_tags import GATE_PREFIX, REQUEST_PREFIX, MemberState, token
from muri.slurm_plugin.records.gpu_removal import PER_NODE, GpuRemoval, Place, TriedForm
from muri.slurm_plugin.records.roles import ManagedJob, read_job
from muri.text import nearest

_SPANK: Final = "SPANK plugin"
_TAKING: Final = "members' GPUs"
_SUBMIT: Final = "job_submit"

INCLUDE: Final = "include /usr/lib/muri/plugstack.conf"
"""Of the package muri-spank; where that has been removed, Slurm passes over this line."""

LOAD: Final = 'do local muri = loadfile("/usr/share/muri/job_submit/job_submit.lua") if muri then pcall(muri) end end'
"""Of the package muri-controller; where that has been removed, this line does nothing."""

MARK: Final = "--muri=model=muri-doctor"

_MEMBERS: Final = 2


class Named(NamedTuple):
    """What became of looking for names.

    Attributes:
        wrong: Sentences about names that are not there, each with those that are.
        unchecked: Why others could not be looked for.
    """

    wrong: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


def look_for_names(config: Config) -> Named:
    """Look in Slurm, where it answers, for what the configuration names."""
    python = tuple(wrong_python(config))
    if not (config.partitions or config.profiling.partition or config.pilot.qos or config.gpu_mem_gib):
        return Named(python)
    try:
        snapshot = open_gateway(config.gateway).snapshot()
    except MuriError as error:
        return Named(python, (f"whether Slurm has the partitions, QOS and types of GPUs named there: {error}",))
    found = names_in(config, snapshot, SlurmCommands())
    return found._replace(wrong=(*python, *found.wrong))


def wrong_python(config: Config) -> Iterator[str]:
    """Say that there is no such Python; documented installations have it on the controller's machine, too."""
    with suppress(PermissionError):  # then this user cannot tell
        if not Path(config.node_python).is_file():
            usual = "/usr/lib/muri/python" if is_packaged() else sys.executable
            yield (
                f"node_python: {config.node_python} is not a program on this machine; name the Python with Muri that "
                f"each compute node has, here it would be {usual}"
            )


def names_in(config: Config, snapshot: Snapshot, commands: SlurmCommands) -> Named:
    """Look for the names in what Slurm has told.

    Args:
        config: The configuration.
        snapshot: Slurm's nodes and partitions.
        commands: To ask slurmdbd for QOS.
    """
    of_nodes = {name for node in snapshot.nodes for name in node.partitions}
    partitions = of_nodes | {each.name for each in snapshot.limits.partitions}
    types = {node.gpu_type for node in snapshot.nodes if node.gpu_count}
    wrong = [
        *_missing("partitions", "partition", config.partitions, partitions),
        *_missing("profiling.partition", "partition", (config.profiling.partition,), {"", *partitions}),
        *_missing("gpu_mem_gib", "type of GPUs", config.gpu_mem_gib, types),
    ]
    if not config.pilot.qos:
        return Named(tuple(wrong))
    try:
        text = commands.run("read the QOS", ["sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name"])
    except MuriError as error:
        return Named(tuple(wrong), (f"pilot.qos: {error}",))
    return Named((*wrong, *_missing("pilot.qos", "QOS", [config.pilot.qos], {*text.split()})))


def _missing(key: str, kind: str, wanted: Collection[str], there: Collection[str]) -> Iterator[str]:
    for name in wanted:
        if name not in there:
            near = nearest(name, there)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"{key}: Slurm has no {kind} {name}; {hint}it has {', '.join(sorted(filter(None, there))) or 'none'}"


def examine_submission(commands: SlurmCommands) -> Finding | None:
    """Whether sbatch knows --muri on this machine; None where there is no sbatch."""
    try:
        text = commands.run("read sbatch's help", ["sbatch", "--help"])
    except GatewayUnavailableError:
        return None
    except MuriError as error:
        return Finding(_SPANK, Level.PROBLEM, str(error))
    if "--muri" in text:
        return Finding(_SPANK, Level.OK, "sbatch on this machine knows --muri")
    remedy = "on each machine that submits install the package muri-spank and add this line to plugstack.conf:"
    return Finding(_SPANK, Level.PROBLEM, "sbatch on this machine does not know --muri", remedy, (INCLUDE,))


def examine_real_path(
    config: Config, snapshot: Snapshot, gateway: Gateway, commands: SlurmCommands
) -> Iterator[Finding]:
    """What becomes of a job; root tries it with held jobs that are cancelled again, others see what is known."""
    place = place_for(snapshot.nodes, config.partitions, snapshot.limits)
    if place is None:
        yield Finding(
            _TAKING, Level.WARNING, "no node with GPUs is in a partition that Muri serves", "see `partitions`"
        )
    elif os.geteuid() == 0:
        yield _examine_job_submit(config, place, commands)
        yield from _examine_members(config, place, snapshot, gateway, commands)
    else:
        yield judge_removal(read_gpu_removal(config.state_dir).forms, snapshot.nodes)


def _examine_members(
    config: Config, place: Place, snapshot: Snapshot, gateway: Gateway, commands: SlurmCommands
) -> Iterator[Finding]:
    try:
        forms = try_every_form(commands, place)
    except MuriError as error:
        yield Finding(_TAKING, Level.PROBLEM, f"it cannot be tried whether they can be taken away: {error}")
        return
    known = read_gpu_removal(config.state_dir).forms
    if known and not any(each.conclusive for each in forms):  # root may not submit: the controller has, as a user
        yield judge_removal(known, snapshot.nodes)
        return
    yield judge_removal(forms, snapshot.nodes)
    yield from examine_members(snapshot, config.partitions, forms, gateway, commands)


def judge_removal(forms: Sequence[TriedForm], nodes: Sequence[Node]) -> Finding:
    """Judge in which form of request a waiting job's GPUs can be taken away, which a group needs.

    Args:
        forms: What was tried.
        nodes: The cluster's, for the lines that Slurm's files may lack.
    """
    if not forms:
        return Finding(_TAKING, Level.WARNING, "not tried yet", "run this as root")
    taken = [form.form for form in forms if form.request]
    kept = [form.form for form in forms if not form.request]
    alone = f"; jobs with {', '.join(kept)} run alone" if kept else ""
    if taken:
        return Finding(_TAKING, Level.OK, f"can be taken away where asked for by {', '.join(taken)}{alone}")
    why = next((form.why for form in forms if form.form == PER_NODE), forms[0].why)
    remedy = "add the GRES muri to slurm.conf (the first two lines) and gres.conf; Slurm 22.05 cannot do it in any way:"
    names = NodeSet.fromlist(node.name for node in nodes if node.gpu_count)
    lines = (
        "GresTypes=gpu,muri",
        f"NodeName={names} Gres=gpu:…,muri:64 …",
        f"NodeName={names} Name=muri Count=64 Flags=CountOnly",
    )
    return Finding(_TAKING, Level.PROBLEM, f"no group can form: Slurm cannot take them away ({why})", remedy, lines)


def _examine_job_submit(config: Config, place: Place, commands: SlurmCommands) -> Finding:
    try:
        job_id = submit_probe(commands, "--gres=gpu:1", f"--partition={place.partition}", MARK)
    except SlurmUnreachableError as error:
        return Finding(_SUBMIT, Level.PROBLEM, str(error))
    except (GatewayError, ValueError) as error:
        return Finding(_SUBMIT, Level.WARNING, f"root may not submit to {place.partition} with --muri: {error}")
    with cancelled_afterwards(commands, job_id):
        text = commands.run(f"look at job {job_id}", ["scontrol", "--oneliner", "show", "job", str(job_id)])
    comment = re.search(r"\bAdminComment=(.*?)(?= [A-Z]\w+=|$)", text)
    return judge_job_submit(comment[1] if comment else "", config)


def judge_job_submit(admin_comment: str, config: Config) -> Finding:
    """Judge what job_submit wrote into a job that was submitted with --muri.

    Args:
        admin_comment: The job's AdminComment.
        config: Which gate is wanted.
    """
    gate = token(admin_comment, GATE_PREFIX)
    if token(admin_comment, REQUEST_PREFIX) is None:
        remedy = "JobSubmitPlugins=lua in slurm.conf, and before the last return of job_submit.lua this line:"
        text = "jobs with --muri are not tagged: they start as ordinary jobs"
        return Finding(_SUBMIT, Level.PROBLEM, text, remedy, (LOAD,))
    if gate == "open":
        text = "jobs with --muri are tagged; no controller is running, so they start as ordinary jobs"
        return Finding(_SUBMIT, Level.WARNING, text, "start the controller: systemctl status muri-controller.timer")
    if (gate == "hold") != (config.gate == "hold"):
        remedy = 'set muri.gate in job_submit.lua ("licence" or "hold") and gate in muri.yaml alike'
        return Finding(_SUBMIT, Level.PROBLEM, f"job_submit keeps jobs by {gate}, muri.yaml by {config.gate}", remedy)
    return Finding(_SUBMIT, Level.OK, f"jobs with --muri are tagged and kept waiting by {gate}")


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
