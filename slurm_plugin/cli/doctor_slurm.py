"""What `muri doctor` and `muri config check` ask Slurm: whether names exist, its settings, and a real job's fate."""

import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from ClusterShell.NodeSet import NodeSet

from muri.errors import MuriError
from muri.pythons import is_packaged
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_gateway
from muri.slurm_plugin.controller.events import slurm_user, slurmctld_hosts, this_host
from muri.slurm_plugin.controller.loop import EVENTS_LOCK_NAME, holder_of
from muri.slurm_plugin.controller.status import CYCLES_MISSED
from muri.slurm_plugin.gateway.accounting import slurm_settings
from muri.slurm_plugin.gateway.base import (
    Gateway,
    GatewayError,
    GatewayUnavailableError,
    SlurmUnreachableError,
    first_line,
)
from muri.slurm_plugin.gateway.gpu_removal import (
    cancelled_afterwards,
    place_for,
    read_gpu_removal,
    submit_probe,
    try_every_form,
)
from muri.slurm_plugin.gateway.pyslurm_api import NoPyslurmError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.planning.actions import MemberPlan
from muri.slurm_plugin.planning.slurm_requests import (
    GroupPlace,
    asked_by,
    member_change,
    original_request,
    pilot_mem_mib,
)
from muri.slurm_plugin.records.cluster import Node, Snapshot
from muri.slurm_plugin.records.comment_tags import GATE_PREFIX, LICENSE_GATE, REQUEST_PREFIX, MemberState, token
from muri.slurm_plugin.records.limits import PER_NODE, GpuRemoval, Place, TriedForm
from muri.slurm_plugin.records.roles import GATE_LICENSE, ManagedJob, read_job
from muri.text import nearest

NAMES: Final = "muri.yaml's names"
CORRECT: Final = "correct it, then run `muri config check`"
_TAKING: Final = "members' GPUs"

INCLUDE: Final = "include /usr/lib/muri/plugstack.conf"
"""Of the package muri-spank; where that has been removed, Slurm passes over this line."""

LOAD: Final = 'do local muri = loadfile("/usr/share/muri/job_submit/job_submit.lua") if muri then pcall(muri) end end'
"""Of the package muri-controller; where that has been removed, this line does nothing."""

LOAD_FILTER: Final = LOAD.replace("job_submit", "cli_filter")
"""Of the package muri-spank; where that has been removed, this line does nothing."""

_NO_JOB: Final = 0x03FFFFFF
"""The highest id that Slurm gives to a job."""

SHARING: Final = "OverSubscribe=YES:8"
"""For a partition: a pilot job and as many members as a group can have share CPUs, also beside another group."""

_SHOW: Final = ("scontrol", "--oneliner", "show")
_SHARING: Final = "shared CPUs"
_ON_NODES: Final = "SPANK on nodes"
_MARK: Final = "--muri=model=muri-doctor"
_MEMBERS: Final = 2
_KILLS_USER: Final = re.compile(
    r"^[^#\n]*\b(?:(?:pkill|killall|skill)\b[^#\n]*\s(?:-[a-z0-9]*[uU]\b|--e?uid|--user)|"
    r"loginctl\s+(?:kill|terminate)-user|kill\b[^#\n]*\b(?:pgrep|ps)\b[^#\n]*\s-[a-z]*[uU]\b)",
    re.MULTILINE,
)
_KILLS_ON_GPUS: Final = re.compile(
    r"^[^#\n]*\b(?:fuser\b[^#\n]*\s-\w*k[^#\n]*nvidia|quit\b[^#\n]*nvidia-cuda-mps-control|"
    r"(?:nvidia-smi\b[^#\n]*(?:pmon|compute-apps|xargs)|lsof\b[^#\n]*nvidia)(?s:.*)\bkill\b)",
    re.MULTILINE,
)
_EXCLUSIVE: Final = re.compile(
    r"^[^#\n]*\bnvidia-smi\b[^#\n]*\s(?:-c|--compute-mode)[ =]*(?!0|DEFAULT)\w", re.MULTILINE
)


class Level(StrEnum):
    """How bad a finding is. WARNING: Muri works, but not fully. PROBLEM: something has to be done."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination: its subject, how bad it is, the remedy ("" for none), lines to add to a file."""

    name: str
    level: Level
    text: str
    remedy: str = ""
    lines: tuple[str, ...] = ()


def ok(name: str, text: str) -> Finding:
    """A finding that needs nothing."""
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, remedy: str = "") -> Finding:
    """A finding with which Muri works, but not fully."""
    return Finding(name, Level.WARNING, text, remedy)


def problem(name: str, text: str, remedy: str = "", *lines: str) -> Finding:
    """A finding that has to be mended."""
    return Finding(name, Level.PROBLEM, text, remedy, lines)


class Named(NamedTuple):
    """Sentences about names that Slurm does not have, each with those that it has, and why others are not checked."""

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
    """Say that node_python does not exist; documented installations have it on the controller's machine, too."""
    with suppress(PermissionError):  # then this user cannot tell
        if not Path(config.node_python).is_file():
            usual = "/usr/lib/muri/python" if is_packaged() else sys.executable
            yield (
                f"node_python: {config.node_python} is not a program on this machine; name the Python with Muri that "
                f"each compute node has, here it would be {usual}"
            )


def names_in(config: Config, snapshot: Snapshot, commands: SlurmCommands) -> Named:
    """Look for the configuration's names among Slurm's nodes and partitions, and slurmdbd's QOS."""
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


def examine_slurm(config: Config) -> Iterator[Finding]:
    """Whether Slurm answers, how it is asked, and what becomes of jobs there."""
    lacking: list[GatewayUnavailableError] = []
    try:
        gateway = open_gateway(config.gateway, lacking.append)
        snapshot = gateway.snapshot()
    except GatewayUnavailableError as error:
        yield warning(
            "Slurm", f"no Slurm on this machine: {error}", "nothing, if the controller runs on another machine"
        )
        return
    except MuriError as error:
        yield problem("Slurm", str(error), "`scontrol ping` says more; jobs stay as they are meanwhile")
        return
    size = f"{len(snapshot.nodes)} nodes, {sum(node.gpu_count for node in snapshot.nodes)} GPUs"
    yield ok("Slurm", f"{snapshot.cluster}, Slurm {snapshot.slurm_version}, by {gateway.name}: {size}")
    commands = SlurmCommands()
    named = names_in(config, snapshot, commands)
    yield from (problem(NAMES, wrong, CORRECT) for wrong in named.wrong)
    yield from (warning(NAMES, f"not checked: {unchecked}") for unchecked in named.unchecked)
    for why in lacking:
        text, remedy = f"{gateway.name}: {why}", f"`gateway: {gateway.name}` in muri.yaml, if it is to stay so"
        yield ok("gateway", text) if isinstance(why, NoPyslurmError) else warning("gateway", text, remedy)
    yield from examine_submission(commands)
    yield from examine_steps(commands)
    yield from examine_real_path(config, snapshot, gateway, commands)


def examine_settings(config: Config, commands: SlurmCommands) -> Iterator[Finding]:
    """Look at Slurm's own configuration; nothing where Slurm cannot be asked, which other findings say."""
    try:
        settings = slurm_settings(commands)
    except MuriError:
        return
    with suppress(OSError, MuriError):
        is_watched = holder_of(config.state_dir, EVENTS_LOCK_NAME) is not None
        yield judge_events(config, settings, this_host(), is_watched=is_watched)
    with suppress(MuriError):
        yield judge_gate(commands.run("read the licenses", ["scontrol", "show", "license", "--oneliner"]), config)
    yield from judge_select(settings, config)
    with suppress(MuriError):
        yield from judge_sharing(commands.run("read the partitions", [*_SHOW, "partition"]), config)
    with suppress(OSError, MuriError):
        own = settings.get("PlugStackConfig", "")
        beside = Path(settings.get("SLURM_CONF", "/etc/slurm/slurm.conf")).with_name("plugstack.conf")
        if files := plugin_files(Path(own) if own.startswith("/") else beside):
            changed_s = max(path.stat().st_ctime for path in files)
            yield from judge_slurmds(commands.run("read the nodes", [*_SHOW, "node"]), changed_s)
    yield from judge_job_files(settings)
    yield from judge_prologs(settings, site_scripts(settings, "Prolog"), site_scripts(settings, "Epilog"))


def judge_events(config: Config, settings: Mapping[str, str], host: str, *, is_watched: bool) -> Finding:
    """Judge whether a cycle follows an arrival or an end within seconds."""
    path, timer = config.events.notice_file, f"the timer, up to {config.interval_s:g} s"
    hosts, uid = slurmctld_hosts(settings), slurm_user(settings)
    if not config.events.enabled:
        return ok("events", f"off: jobs wait for {timer}")
    if not is_watched:
        remedy = "systemctl enable --now muri-controller-events.service; without systemd see cron.d-muri"
        return warning("events", f"nothing watches for them: jobs wait for {timer}", remedy)
    if host not in hosts:
        where = " or ".join(hosts) or "another machine"
        text = f"slurmctld runs on {where} and gives no notice here: new jobs wait for {timer}, or an end"
        return warning("events", text, "run the controller on slurmctld's machine")
    try:
        notice = path.lstat()
    except OSError:
        notice = None
    if notice is None or not stat.S_ISREG(notice.st_mode) or notice.st_uid != uid:
        text = f"slurmctld gives no notice: {path} is not a file of user {uid}; new jobs wait for {timer}"
        remedy = f"remove {path}: the controller makes it anew within a minute, and logs why if it can't"
        return warning("events", text, remedy)
    return ok("events", f"a cycle follows an arrival or an end within seconds; notice by {path}")


def judge_gate(licenses: str, config: Config) -> Finding:
    """Judge what keeps waiting jobs, by the output of `scontrol show license`."""
    setting = f"Licenses={GATE_LICENSE}:1000000"
    if config.gate == "hold":
        text = (
            "waiting jobs are held: they have priority 0, wait for the watchdog if the controller dies, and a user's "
            "hold on one cannot be told from Muri's"
        )
        remedy = f"{setting} in slurm.conf and `gate: license`, here and in job_submit.lua"
        return warning("gate", text, remedy)
    if f"LicenseName={GATE_LICENSE}" not in licenses.split():
        text = f"Slurm has no license {GATE_LICENSE}: jobs with --muri start as ordinary jobs"
        return problem("gate", text, f"add {setting} to slurm.conf and run `scontrol reconfigure`, or set gate: hold")
    text = (
        f"waiting jobs ask for the license {GATE_LICENSE}; Slurm starts them {config.lease_s:g} s after the last cycle"
    )
    if config.lease_s < CYCLES_MISSED * config.interval_s:
        remedy = f"set lease_s to at least {CYCLES_MISSED} × interval_s, or a late cycle lets every job start"
        return warning("gate", text, remedy)
    return ok("gate", text)


def judge_select(settings: Mapping[str, str], config: Config) -> Iterator[Finding]:
    """Judge how Slurm allocates, where Muri may change jobs' CPUs or memory."""
    kind, parameters = settings.get("SelectType", ""), settings.get("SelectTypeParameters", "").upper()
    allocation, name = config.allocation, "CPUs and memory"
    if not kind or allocation.cpus == allocation.memory == "off":
        return
    shown = f"{kind} with {parameters or 'no parameters'}"
    if "cons_" not in kind:
        remedy = "SelectType=select/cons_tres with CR_Core_Memory, or allocation.cpus and allocation.memory: off"
        yield warning(name, f"Slurm gives out whole nodes ({shown})", remedy)
        return
    counts = {
        "CPUs": allocation.cpus == "off" or re.search(r"CR_(CPU|CORE|SOCKET)", parameters),
        "memory": allocation.memory == "off" or "MEMORY" in parameters,
    }
    if lacking := " and ".join(resource for resource, is_counted in counts.items() if not is_counted):
        remedy = "SelectTypeParameters=CR_Core_Memory enforces the shares that a policy plans"
        yield warning(name, f"Slurm does not count {lacking} ({shown})", remedy)
    else:
        yield ok(name, f"given out by Slurm: {shown}")


def judge_sharing(partitions: str, config: Config) -> Iterator[Finding]:
    """Judge whether the jobs of a group can share CPUs, by the output of `scontrol show partition`.

    A pilot job and each member take a layer of a node's CPUs at most; jobs of one layer have different CPUs.
    """
    most = config.grouping.max_group_size
    values = dict(re.findall(r"^PartitionName=(\S+) .*?\bOverSubscribe=(\S+)", partitions, re.MULTILINE))
    served = {name: value for name, value in values.items() if not config.partitions or name in config.partitions}
    if most == 1:
        return
    for value in sorted(set(served.values())):
        kind, _, layers = value.partition(":")
        if kind not in {"NO", "YES"}:  # jobs run alone there, which the finding about the partition says
            continue
        names = ", ".join(sorted(name for name, each in served.items() if each == value))
        count = int(layers) if kind == "YES" and layers.isdecimal() else 1
        if count > most:
            yield ok(_SHARING, f"jobs that share a GPU share CPUs, too, up to {count} on one: {names}")
            continue
        shared = f"a pilot job and {count - 1} more share a CPU" if count > 1 else "no two jobs share a CPU"
        text = f"{names}: {shared} (OverSubscribe={value}), so fewer can share a GPU on a node whose CPUs they all want"
        remedy = f"{SHARING} in the partition's line in slurm.conf, where no others train there; see docs/install.md"
        yield warning(_SHARING, text, remedy)


def plugin_files(plugstack_conf: Path) -> set[Path]:
    """Return the files of this machine that tell slurmd of Muri's plugin, and the plugin; none where none does."""
    text = plugstack_conf.read_text(encoding="utf-8", errors="replace")
    patterns = re.findall(r"^\s*include\s+/(\S+)", text, re.MULTILINE)
    included = [path for pattern in patterns for path in Path("/").glob(pattern)]
    texts = {plugstack_conf: text, **{path: path.read_text(encoding="utf-8", errors="replace") for path in included}}
    plugins = {
        path: re.findall(r"^\s*(?:optional|required)\s+(/\S*muri\S*)", texts[path], re.MULTILINE) for path in texts
    }
    telling = {path for path, named in plugins.items() if named}
    there = {Path(name) for named in plugins.values() for name in named if Path(name).exists()}
    return {plugstack_conf, *telling, *there} if telling else set()


def judge_slurmds(nodes: str, changed_s: float) -> Iterator[Finding]:
    """Judge which slurmds have read the plugin, by `scontrol show node` and when its files changed last.

    A slurmd that started before runs the plugin's part in jobs and steps, but not that before and after a job.
    """
    started = re.findall(r"^NodeName=(\S+) .*\bGres=\S*gpu.*?\bSlurmdStartTime=(\d+) ", nodes, re.MULTILINE)
    if old := [name for name, start_s in started if int(start_s) + 1 < changed_s]:
        when = datetime.fromtimestamp(changed_s).isoformat(" ", "seconds")
        text = (
            f"slurmd on {NodeSet.fromlist(old)} has not read its plugins since Muri's changed here ({when}): "
            "what root does before and after a job there may be skipped, and then members of groups are put back"
        )
        remedy = "`scontrol reconfigure`; before Slurm 23.11 restart slurmd on each node"
        yield warning(_ON_NODES, text, remedy)
    elif started:
        yield ok(_ON_NODES, "each slurmd has read its plugins since Muri's changed here")


def judge_job_files(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Judge whether the jobs of a group see the same files; yields a finding only where they do not."""
    for key in ("JobContainerType", "NamespaceType"):  # before and since Slurm 25.11
        kind = settings.get(key, "")
        if kind.partition("/")[2] not in {"", "none"}:
            text = f"each job has its own /tmp ({key}={kind}): members of groups go back to the queue and run alone"
            remedy = "name other nodes than those of Muri in job_container.conf; see docs/sharing.md"
            yield warning("job files", text, remedy)
            return


def site_scripts(settings: Mapping[str, str], kind: str) -> dict[Path, str]:
    """Return the texts of the site's prologs or epilogs on this machine, and of files beside them that they name."""
    folder = Path(settings.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    patterns = [value for key, value in settings.items() if key.partition("[")[0] == kind and value != "(null)"]
    texts: dict[Path, str] = {}
    todo = [path for each in patterns for path in sorted(Path("/").glob(str(folder / each).lstrip("/")))]
    for path in todo:  # which grows
        if path in texts or not path.is_relative_to(todo[0].parent):
            continue
        with suppress(OSError):
            if path.is_dir():
                todo += sorted(path.iterdir())
                continue
            texts[path] = path.read_text(encoding="utf-8", errors="replace")
            todo += map(Path, re.findall(r"/[\w./-]+", texts[path]))
    return texts


def judge_prologs(
    settings: Mapping[str, str], prologs: Mapping[Path, str], epilogs: Mapping[Path, str]
) -> Iterator[Finding]:
    """Judge what the site does before and after each job: at a member's end its partners go on."""
    name = "prolog, epilog"
    if "RunInJob" in settings.get("PrologFlags", "").split(","):
        text = "with PrologFlags=RunInJob Slurm runs no SPANK prolog, so members of groups go back to the queue"
        yield problem(name, text, "PrologFlags=Contain")
    asks = any("squeue" in text for text in epilogs.values())
    for path, text in epilogs.items():
        if _KILLS_USER.search(text) and not asks:
            said = f"{path} kills a user's processes: at a member's end its partners', which fail"
            remedy = 'before it: squeue -h -t running -u "$SLURM_JOB_USER" -w "$SLURMD_NODENAME" | grep -q . && exit 0'
            yield warning(name, said, remedy)
        if _KILLS_ON_GPUS.search(text) and "SLURM_JOB_GPUS" not in text:
            said = f"{path} kills what uses GPUs: at a member's end its partners, which fail"
            yield warning(name, said, '[ -n "$SLURM_JOB_GPUS" ] || exit 0 before it: members hold no GPUs')
    for path, text in prologs.items():
        if _EXCLUSIVE.search(text):
            said = f"{path} lets one process use a GPU: without MPS one member of each group trains, the others go back"
            yield warning(name, said, "nvidia-smi --compute-mode=DEFAULT on the nodes that Muri serves")


def examine_submission(commands: SlurmCommands) -> Iterator[Finding]:
    """Whether sbatch knows --muri on this machine; nothing where there is no sbatch."""
    name = "SPANK plugin"
    try:
        text = commands.run("read sbatch's help", ["sbatch", "--help"])
    except GatewayUnavailableError:
        return
    except MuriError as error:
        yield problem(name, str(error))
        return
    if "--muri" in text:
        yield ok(name, "sbatch on this machine knows --muri")
    else:
        remedy = "on each machine that submits install the package muri-spank and add this line to plugstack.conf:"
        yield problem(name, "sbatch on this machine does not know --muri", remedy, INCLUDE)


def examine_steps(commands: SlurmCommands) -> Iterator[Finding]:
    """Whether srun on this machine asks Muri's part of cli_filter.lua, which refuses this step of a member."""
    member = {"MURI_PILOT": "1", "SLURM_JOB_ID": str(_NO_JOB), "SLURM_JOB_GPUS": "0"}
    try:
        commands.output("try the filter of steps", ["srun", "--gpus=2", "true"], member)
    except GatewayUnavailableError:
        return
    except MuriError as error:
        if "muri: the step asks" in str(error):
            yield ok("cli_filter", "srun on this machine fits steps to jobs that share GPUs")
            return
    text = "srun does not fit steps to jobs that share GPUs: one that asks for GPUs does not start"
    remedy = "CliFilterPlugins=lua in slurm.conf, and before the last return of each cli_filter.lua this line:"
    yield Finding("cli_filter", Level.WARNING, text, remedy, (LOAD_FILTER,))


def examine_real_path(
    config: Config, snapshot: Snapshot, gateway: Gateway, commands: SlurmCommands
) -> Iterator[Finding]:
    """What becomes of a job; root tries it with held jobs that are canceled again, others see the last outcome."""
    place = place_for(snapshot.nodes, config.partitions)
    known = read_gpu_removal(config.state_dir).forms
    if place is None:
        yield warning(_TAKING, "no node with GPUs is in a partition that Muri serves", "see `partitions`")
        return
    if os.geteuid() != 0:
        yield judge_removal(known, snapshot.nodes)
        return
    yield _examine_job_submit(config, place, commands)
    try:
        forms = try_every_form(commands, place)
    except MuriError as error:
        yield problem(_TAKING, f"it cannot be tried whether they can be taken away: {error}")
        return
    if known and not any(form.conclusive for form in forms):  # root may not submit: the controller has, as a user
        yield judge_removal(known, snapshot.nodes)
        return
    yield judge_removal(forms, snapshot.nodes)
    removal = GpuRemoval(forms=tuple(forms), why="")
    homes: dict[str, Node] = {}
    for node in snapshot.nodes:
        if node.usable and node.gpu_count:
            homes |= {name: node for name in node.partitions if not config.partitions or name in config.partitions}
    for partition, node in sorted(homes.items()):
        name = f"jobs of {partition}"
        try:
            why = _why_refused(partition, node, snapshot, removal, gateway, commands)
        except MuriError as error:
            yield warning(name, f"not tried: {first_line(str(error))}")
            continue
        if why:
            remedy = "nothing, if they may: they run as if Muri weren't there; else change what Slurm refuses"
            yield warning(name, f"all of them run alone: {why}", remedy)
        else:
            yield ok(name, "a pilot job and the changes of a member are taken, and its own request can be given back")


def judge_removal(forms: Sequence[TriedForm], nodes: Sequence[Node]) -> Finding:
    """Judge in which forms of request a waiting job's GPUs can be taken away, which a group needs."""
    if not forms:
        return warning(_TAKING, "not tried yet", "run this as root")
    taken = ", ".join(form.form for form in forms if form.request)
    kept = ", ".join(form.form for form in forms if not form.request)
    if taken:
        alone = f"; jobs with {kept} run alone" if kept else ""
        return ok(_TAKING, f"can be taken away where asked for by {taken}{alone}")
    why = next((form.why for form in forms if form.form == PER_NODE), forms[0].why)
    remedy = "add the GRES muri to slurm.conf (the first two lines) and gres.conf; Slurm 22.05 cannot do it in any way:"
    names = NodeSet.fromlist(node.name for node in nodes if node.gpu_count)
    return problem(
        _TAKING,
        f"no group can form: Slurm cannot take them away ({why})",
        remedy,
        "GresTypes=gpu,muri",
        f"NodeName={names} Gres=gpu:…,muri:64 …",
        f"NodeName={names} Name=muri Count=64 Flags=CountOnly",
    )


def _examine_job_submit(config: Config, place: Place, commands: SlurmCommands) -> Finding:
    try:
        job_id = submit_probe(commands, "--gres=gpu:1", f"--partition={place.partition}", _MARK)
    except SlurmUnreachableError as error:
        return problem("job_submit", str(error))
    except (GatewayError, ValueError) as error:
        return warning("job_submit", f"root may not submit to {place.partition} with --muri: {error}")
    with cancelled_afterwards(commands, job_id):
        text = commands.run(f"look at job {job_id}", ["scontrol", "--oneliner", "show", "job", str(job_id)])
    comment = re.search(r"\bAdminComment=(.*?)(?= [A-Z]\w+=|$)", text)
    return judge_job_submit(comment[1] if comment else "", config)


def judge_job_submit(admin_comment: str, config: Config) -> Finding:
    """Judge the AdminComment that job_submit has given to a job that was submitted with --muri."""
    word = token(admin_comment, GATE_PREFIX)
    gate = "license" if word == LICENSE_GATE else word
    if token(admin_comment, REQUEST_PREFIX) is None:
        remedy = "JobSubmitPlugins=lua in slurm.conf, and before the last return of job_submit.lua this line:"
        return problem("job_submit", "jobs with --muri are not tagged: they start as ordinary jobs", remedy, LOAD)
    if gate == "open":
        text = "jobs with --muri are tagged; no controller is running, so they start as ordinary jobs"
        return warning("job_submit", text, "start the controller: systemctl status muri-controller.timer")
    if (gate == "hold") != (config.gate == "hold"):
        remedy = 'set muri.gate in job_submit.lua ("license" or "hold") and gate in muri.yaml alike'
        return problem("job_submit", f"job_submit keeps jobs by {gate}, muri.yaml by {config.gate}", remedy)
    return ok("job_submit", f"jobs with --muri are tagged and kept waiting by {gate}")


def _why_refused(
    partition: str, node: Node, snapshot: Snapshot, removal: GpuRemoval, gateway: Gateway, commands: SlurmCommands
) -> str:
    """Return why no group can form in a partition, "" if one can; a MuriError where that could not be tried."""
    where = f"--partition={partition}"
    limits = snapshot.limits.partition(partition)
    with _probe(gateway, commands, "--gres=gpu:1", where, _MARK) as job:
        way = removal.way_for(job.gpu_request)
        if not way.request:
            return f"their GPUs cannot be taken away ({way.why})"
        shares, mem_mib = limits.oversubscribe > 1, pilot_mem_mib([job], 1, limits)
        options = [*([f"--mem={mem_mib}M"] if mem_mib else []), *(["--oversubscribe"] if shares else [])]
        try:
            pilot_id = submit_probe(commands, "--gres=gpu:1", where, "--cpus-per-task=1", *options)
        except GatewayError as error:
            return f"Slurm refuses a pilot job: {first_line(str(error))}"
        with cancelled_afterwards(commands, pilot_id):
            return _why_not_changed(
                job, GroupPlace(pilot_id, node.name, (), shares), way.request, gateway, mem_per_gpu=limits.mem_per_gpu
            )


def _why_not_changed(job: ManagedJob, place: GroupPlace, no_gpus: str, gateway: Gateway, *, mem_per_gpu: bool) -> str:
    """Return why Slurm refuses to make a job a member, or to give its own request back; "" if it does both."""
    member = MemberPlan(job.job_id, asked_by(job), None, 1.0, _MEMBERS * job.time_limit_s)
    try:
        gateway.modify(job.job_id, member_change(member, place, job, no_gpus=no_gpus, mem_per_gpu=mem_per_gpu))
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
