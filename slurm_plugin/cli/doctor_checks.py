"""What `muri doctor` makes of what it found. Pure."""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.roles import GATE_LICENSE
from muri.units import MIB, MIB_PER_GIB

LEAST_FREE_MIB: Final = 50

LITTLE_FREE_MIB: Final = 1024

CYCLES_MISSED: Final = 3
"""A controller that has not finished a cycle for this many intervals is considered down."""

_NAME = "CPUs and memory"

_GATE: Final = "gate"
_STATE = "state directory"
_EVENTS: Final = "events"

_OTHERS_MAY: Final = 0o077
_OTHERS_WRITE: Final = 0o022


class Level(StrEnum):
    """How bad a finding is. WARNING: Muri works, though not as it could. PROBLEM: something has to be done."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Attributes:
        name: What was looked at.
        level: How bad it is.
        text: What was found.
        remedy: What to do, "" when nothing.
        lines: What to add to a file, as it is.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Folder:
    """What is known of the state directory.

    Attributes:
        path: Where it is.
        exists: Whether there is anything.
        is_directory: Whether that is a directory.
        owner: Its owner's name.
        user: Who asks.
        writable: Whether they may write there.
        foreign_files: Files in it that another user than its owner owns.
        mode: Its permissions.
        is_link: Whether the path is a link to it.
    """

    path: Path
    exists: bool
    is_directory: bool = False
    owner: str = ""
    user: str = ""
    writable: bool = False
    foreign_files: tuple[str, ...] = ()
    mode: int = 0o700
    is_link: bool = False


def judge_folder(folder: Folder) -> Finding:
    """The state directory: there, a directory, and all of it for one user alone."""
    wrong = _wrong_place(folder) or _wrong_access(folder)
    return wrong or Finding(_STATE, Level.OK, f"{folder.path}, of {folder.owner} alone, writable")


def _wrong_place(folder: Folder) -> Finding | None:
    if not folder.exists:
        return Finding(_STATE, Level.WARNING, f"there is no {folder.path} yet", "the controller's first cycle makes it")
    if not folder.is_directory:
        remedy = "move it away, or set state_dir to a directory"
        return Finding(_STATE, Level.PROBLEM, f"{folder.path} is not a directory", remedy)
    if folder.is_link:
        remedy = "set state_dir to the place that it leads to; the controller refuses links"
        return Finding(_STATE, Level.PROBLEM, f"{folder.path} is a link", remedy)
    return None


def _wrong_access(folder: Folder) -> Finding | None:
    if folder.owner != "root":
        remedy = f"chown -R root {folder.path}, and run the controller as root: only root may submit for users"
        return Finding(_STATE, Level.PROBLEM, f"{folder.path} belongs to {folder.owner}, not to root", remedy)
    if folder.foreign_files:
        files = ", ".join(folder.foreign_files)
        remedy = f"chown {folder.owner} them: a controller that runs as {folder.owner} cannot write them"
        return Finding(_STATE, Level.WARNING, f"not owned by {folder.owner} like {folder.path}: {files}", remedy)
    if folder.mode & _OTHERS_MAY:
        remedy = f"chmod 700 {folder.path}; the controller does so at its next start"
        return Finding(_STATE, Level.WARNING, f"others may enter {folder.path} (mode {folder.mode:04o})", remedy)
    if not folder.writable:
        remedy = f"run the controller, and this command for a full check, as {folder.owner}"
        text = f"{folder.path} belongs to {folder.owner}; {folder.user} may not write there"
        return Finding(_STATE, Level.WARNING, text, remedy)
    return None


def judge_status_dir(facts: os.stat_result | None, path: Path) -> Finding:
    """Where the controller tells each user about their own jobs.

    Args:
        facts: What the system knows of it, None where it is missing.
        path: Where it is.
    """
    name = "status for users"
    if facts is None:
        remedy = "nothing on other machines than the controller's; there, the next cycle as root makes it"
        return Finding(name, Level.WARNING, f"there is no {path}: users see only what Slurm tells of jobs", remedy)
    if not _only_its_owner_writes(facts):
        remedy = "remove it; the next cycle makes it, and writes none until then"
        return Finding(name, Level.PROBLEM, f"{path} must be a directory writable only by the controller", remedy)
    return Finding(name, Level.OK, f"{path}: a file for each user, readable by them alone")


def judge_run_dir(facts: os.stat_result | None, path: Path) -> Finding:
    """Where root makes a run directory for each user.

    Args:
        facts: What the system knows of it, None where it is missing.
        path: Where it is.
    """
    name = "run directories"
    if facts is None:
        remedy = "nothing, unless jobs run on this machine: there the SPANK plugin makes it at a job's start"
        text = f"there is no {path}: members meet in /tmp, where others can take a name"
        return Finding(name, Level.WARNING, text, remedy)
    if facts.st_uid != 0 or not _only_its_owner_writes(facts):
        remedy = "remove it: root makes it anew; jobs that run now go back to the queue"
        return Finding(name, Level.PROBLEM, f"{path} must be a directory writable only by root", remedy)
    return Finding(name, Level.OK, f"{path}, of root; the SPANK plugin makes one in it for each user with jobs")


def _only_its_owner_writes(facts: os.stat_result) -> bool:
    return stat.S_ISDIR(facts.st_mode) and not facts.st_mode & _OTHERS_WRITE


def judge_space(path: Path, free_bytes: int) -> Finding:
    """Free space where the state is kept."""
    free_mib = free_bytes / MIB
    text = f"{free_mib / MIB_PER_GIB:.1f} GiB free at {path}"
    if free_mib < LEAST_FREE_MIB:
        return Finding("disk space", Level.PROBLEM, text, "make room: the journal cannot be written on a full disk")
    if free_mib < LITTLE_FREE_MIB:
        return Finding("disk space", Level.WARNING, text, "make room before it is full")
    return Finding("disk space", Level.OK, text)


def judge_cycle(age_s: float | None, interval_s: float) -> Finding:
    """When the controller last finished a cycle."""
    remedy = "see `systemctl status muri-controller.timer` and `journalctl -u muri-controller`"
    if age_s is None:
        return Finding("controller", Level.WARNING, "no cycle has finished yet", remedy)
    text = f"the last cycle finished {age_s:.0f} s ago"
    if age_s > CYCLES_MISSED * interval_s:
        return Finding("controller", Level.WARNING, f"{text}; one is due every {interval_s:g} s", remedy)
    return Finding("controller", Level.OK, text)


@dataclass(frozen=True, slots=True)
class EventFacts:
    """What is known of cycles on events.

    Attributes:
        is_watched: Whether a process watches for events.
        host: This host's short name.
        slurmctld_hosts: Those of the hosts that slurmctld may run on.
        slurm_uid: Who slurmctld runs as.
        notice: What the system knows of the notice file, None where it is missing.
    """

    is_watched: bool
    host: str
    slurmctld_hosts: tuple[str, ...]
    slurm_uid: int
    notice: os.stat_result | None


def judge_events(facts: EventFacts, config: Config) -> Finding:
    """Judge whether a cycle follows an arrival or an end within seconds."""
    path, timer = config.events.notice_file, f"the timer, up to {config.interval_s:g} s"
    if not config.events.enabled:
        return Finding(_EVENTS, Level.OK, f"off: jobs wait for {timer}")
    if not facts.is_watched:
        remedy = "systemctl enable --now muri-controller-events.service; without systemd see cron.d-muri"
        return Finding(_EVENTS, Level.WARNING, f"nothing watches for them: jobs wait for {timer}", remedy)
    if facts.host not in facts.slurmctld_hosts:
        where = " or ".join(facts.slurmctld_hosts) or "another machine"
        text = f"slurmctld runs on {where} and gives no notice here: new jobs wait for {timer}, or an end"
        return Finding(_EVENTS, Level.WARNING, text, "run the controller on slurmctld's machine")
    notice = facts.notice
    if notice is None or not stat.S_ISREG(notice.st_mode) or notice.st_uid != facts.slurm_uid:
        text = f"slurmctld gives no notice: {path} is not a file of user {facts.slurm_uid}; new jobs wait for {timer}"
        remedy = f"remove {path}: the controller makes it anew within a minute, and logs why if it can't"
        return Finding(_EVENTS, Level.WARNING, text, remedy)
    return Finding(_EVENTS, Level.OK, f"a cycle follows an arrival or an end within seconds; notice by {path}")


def judge_way_of_writing(file_system: str, is_network: bool, journal: str | None) -> Finding | None:
    """Whether the store is written in a way that its file system allows; None when it is."""
    if journal != "wal" or not is_network:
        return None
    return Finding(
        "profile store",
        Level.WARNING,
        f"it has a write-ahead log on {file_system}, where several machines cannot share one",
        "close every program that has it open; the next one that writes switches it to a rollback journal",
    )


def judge_damaged(places: Sequence[Path]) -> Finding | None:
    """Damaged stores that were set aside; None when there are none."""
    if not places:
        return None
    names = ", ".join(str(place) for place in places)
    remedy = f"save what is left with `sqlite3 {places[-1]} .recover`, then delete it"
    return Finding("profile store", Level.WARNING, f"damaged and set aside: {names}", remedy)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something has to be done."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def examine_gate(config: Config, commands: SlurmCommands | None = None) -> Finding | None:
    """Look at what keeps waiting jobs; None where Slurm cannot be asked, which other findings say."""
    commands = commands or SlurmCommands()
    try:
        commands.run("read Slurm's configuration", ["scontrol", "show", "config"])
        licenses = commands.run("read the licenses", ["scontrol", "show", "license", "--oneliner"])
    except MuriError:
        return None
    return judge_gate(licenses, config)


def judge_gate(licenses: str, config: Config) -> Finding:
    """Judge what keeps waiting jobs.

    Args:
        licenses: What `scontrol show license` printed.
        config: Which gate is wanted, for how long.
    """
    there = f"LicenseName={GATE_LICENSE}" in licenses.split()
    if config.gate == "hold":
        lost = (
            "waiting jobs are held: they have priority 0, wait for the watchdog if the controller dies, and a user's "
            "hold on one cannot be told from Muri's"
        )
        remedy = f"Licenses={GATE_LICENSE}:1000000 in slurm.conf and `gate: licence`, here and in job_submit.lua"
        return Finding(_GATE, Level.WARNING, lost, remedy)
    if not there:
        text = f"Slurm has no license {GATE_LICENSE}: jobs with --muri start as ordinary jobs"
        remedy = f"add Licenses={GATE_LICENSE}:1000000 to slurm.conf and run `scontrol reconfigure`, or set gate: hold"
        return Finding(_GATE, Level.PROBLEM, text, remedy)
    text = (
        f"waiting jobs ask for the license {GATE_LICENSE}; Slurm starts them {config.lease_s:g} s after the last cycle"
    )
    if config.lease_s < CYCLES_MISSED * config.interval_s:
        remedy = f"set lease_s to at least {CYCLES_MISSED} × interval_s, or a late cycle lets every job start"
        return Finding(_GATE, Level.WARNING, text, remedy)
    return Finding(_GATE, Level.OK, text)


def examine_select(config: Config, commands: SlurmCommands | None = None) -> Finding | None:
    """Look at how Slurm allocates; None where Slurm cannot be asked, which other findings say."""
    try:
        text = (commands or SlurmCommands()).run("read Slurm's configuration", ["scontrol", "show", "config"])
    except MuriError:
        return None
    return judge_select(text, config)


def judge_select(text: str, config: Config) -> Finding | None:
    """Judge the text of `scontrol show config`; None where it doesn't tell, or nothing is to be given out.

    Args:
        text: What scontrol printed.
        config: What of jobs' requests may be changed.
    """
    settings = _settings(text)
    kind, parameters = settings.get("SelectType", ""), settings.get("SelectTypeParameters", "").upper()
    allocation = config.allocation
    if not kind or allocation.cpus == allocation.memory == "off":
        return None
    shown = f"{kind} with {parameters or 'no parameters'}"
    if "cons_" not in kind:
        remedy = "SelectType=select/cons_tres with CR_Core_Memory, or allocation.cpus and allocation.memory: off"
        return Finding(_NAME, Level.WARNING, f"Slurm gives out whole nodes ({shown})", remedy)
    lacking = []
    if allocation.cpus != "off" and not re.search(r"CR_(CPU|CORE|SOCKET)", parameters):
        lacking.append("CPUs")
    if allocation.memory != "off" and "MEMORY" not in parameters:
        lacking.append("memory")
    if not lacking:
        return Finding(_NAME, Level.OK, f"given out by Slurm: {shown}")
    remedy = "SelectTypeParameters=CR_Core_Memory enforces the shares that a policy plans"
    return Finding(_NAME, Level.WARNING, f"Slurm does not count {' and '.join(lacking)} ({shown})", remedy)


def _settings(text: str) -> dict[str, str]:
    """What `scontrol show config` printed, by key."""
    return dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, flags=re.MULTILINE))


def examine_job_files(commands: SlurmCommands | None = None) -> Finding | None:
    """Look at what file systems jobs see; None where nothing is wrong or Slurm cannot be asked."""
    try:
        text = (commands or SlurmCommands()).run("read Slurm's configuration", ["scontrol", "show", "config"])
    except MuriError:
        return None
    return judge_job_files(text)


def judge_job_files(text: str) -> Finding | None:
    """Judge whether the jobs of a group see the same files; None where they do.

    Args:
        text: What `scontrol show config` printed.
    """
    settings = _settings(text)
    for key in ("JobContainerType", "NamespaceType"):  # before and since Slurm 25.11
        kind = settings.get(key, "")
        if kind.partition("/")[2] not in {"", "none"}:
            lost = f"each job has its own /tmp ({key}={kind}): members of groups go back to the queue and run alone"
            remedy = "name other nodes than those of Muri in job_container.conf; see docs/sharing.md"
            return Finding("job files", Level.WARNING, lost, remedy)
    return None
