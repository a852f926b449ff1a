"""`muri doctor`: examine what Muri needs on this machine; changes nothing, unless told to set a store aside."""

import json
import logging
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import click

from muri.errors import MuriError
from muri.profiler.errors import CorruptStoreError, StoreMissingError, StoreOutdatedError
from muri.profiler.gpu_usage import check as why_no_gpu
from muri.profiler.store import ProfileStore
from muri.profiler.store_file import existing_journal, exists, file_system_of, is_network, set_aside, set_aside_stores
from muri.rendezvous import SITE_RUN_DIR
from muri.slurm_plugin.cli.doctor_checks import (
    EventFacts,
    Finding,
    Folder,
    Level,
    examine_gate,
    examine_job_files,
    examine_select,
    exit_code,
    judge_cycle,
    judge_damaged,
    judge_events,
    judge_folder,
    judge_run_dir,
    judge_space,
    judge_status_dir,
    judge_way_of_writing,
)
from muri.slurm_plugin.cli.doctor_slurm import examine_real_path, examine_submission, names_in, wrong_python
from muri.slurm_plugin.cli.options import CONFIG_OPTION
from muri.slurm_plugin.config import Config, config_path
from muri.slurm_plugin.controller.assemble import check_policy, open_gateway, profiles_path, read_config
from muri.slurm_plugin.controller.events import slurm_user_of, slurmctld_hosts, this_host
from muri.slurm_plugin.controller.loop import EVENTS_LOCK_NAME, AnotherControllerError, holder_of, only_one
from muri.slurm_plugin.controller.status import cycle_age_s
from muri.slurm_plugin.gateway.base import GatewayUnavailableError
from muri.slurm_plugin.gateway.pyslurm_api import NoPyslurmError
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.private_files import user_name, why_unsafe
from muri.slurm_plugin.records.journal import SCHEMA_VERSION
from muri.text import printable, printable_lines

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_NAMES = "muri.yaml's names"
_CORRECT = "correct it, then run `muri config check`"
_INDENT = 26
_WIDTH = 80


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@CONFIG_OPTION
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="Another profile store than its own.")
@click.option("--set-aside", is_flag=True, help="Rename the profile store, if it is damaged.")
@click.option("-y", "--yes", is_flag=True, help="With --set-aside: don't ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(config_file: Path | None, store: Path | None, set_aside: bool, yes: bool, as_json: bool) -> None:
    """Examine what Muri needs: configuration, files, Slurm, and the way that a job takes.

    As root it submits a few held jobs to see what becomes of them, and cancels them. Nothing else is
    changed without --set-aside. It prints the lines that Slurm's files lack. Exits with 1 when something
    has to be done; warnings alone give 0. Works where there is no Slurm, and says so.

    \b
    Examples:
      muri doctor
      muri doctor --json | jq '.findings[] | select(.level != "ok")'
      muri doctor --set-aside    rename a damaged store
    """
    logging.getLogger("muri").addHandler(logging.NullHandler())  # each warning is a finding here
    if set_aside:
        _set_aside(config_file, store, yes, as_json)
        return
    findings = []
    for finding in examine(config_file, store):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        click.echo(_summary(findings))
    click.get_current_context().exit(exit_code(findings))


def _print(finding: Finding) -> None:
    head = click.style(f"{finding.level.upper():<9}", fg=_COLOURS[finding.level]) + f"{finding.name:<17}"
    space = " " * _INDENT
    text = click.wrap_text(printable_lines(finding.text), _WIDTH - _INDENT, preserve_paragraphs=True)
    click.echo(head + text.replace("\n", f"\n{space}"))
    if finding.remedy:
        click.echo(click.wrap_text(finding.remedy, _WIDTH, f"{space}→ ", f"{space}  "))
    for line in finding.lines:
        click.echo(printable(f"    {line}"))


def _summary(findings: Sequence[Finding]) -> str:
    problems, warnings = (sum(item.level is level for item in findings) for level in (Level.PROBLEM, Level.WARNING))
    return f"{problems} problem(s), {warnings} warning(s)"


def _set_aside(config_file: Path | None, store: Path | None, yes: bool, as_json: bool) -> None:
    refused: list[str] = []

    def confirm(question: str) -> bool:
        if yes or click.confirm(question, err=True):
            return True
        refused.append(question)
        return False

    config = read_config(config_file)
    place = set_store_aside(config, store, confirm)
    if as_json:
        click.echo(json.dumps({"set_aside": None if place is None else str(place)}))
    elif place is not None:
        click.echo(f"set aside as {place}; save what is left of it with `sqlite3 {place} .recover`")
    elif not refused:
        click.echo(f"{store or profiles_path(config)} is whole; nothing to set aside")
    if refused:
        click.echo("Nothing was changed.", err=True)
        click.get_current_context().exit(1)


class DoctorError(MuriError):
    """The requested change would do harm now."""


def examine(config_file: Path | None, store: Path | None) -> Iterator[Finding]:
    """Look at one thing after the other.

    Args:
        config_file: The configuration; None for the site's.
        store: The profile store; None for the configured one.
    """
    config, finding = examine_config(config_file)
    yield finding
    for wrong in wrong_python(config):
        yield Finding(_NAMES, Level.PROBLEM, wrong, _CORRECT)
    yield from examine_trust(config_path(config_file), config)
    yield judge_folder(_folder(config.state_dir))
    yield _space(config.state_dir)
    if may_enter(config.state_dir):
        yield from examine_store(store or profiles_path(config))
        yield examine_journal(config.state_dir / "journal.db")
    yield judge_cycle(cycle_age_s(config, time.time()), config.interval_s)
    if (events := examine_events(config)) is not None:
        yield events
    yield judge_status_dir(facts_of(config.status_dir), config.status_dir)
    yield judge_run_dir(facts_of(SITE_RUN_DIR), SITE_RUN_DIR)
    yield from examine_slurm(config)
    if (gate := examine_gate(config)) is not None:
        yield gate
    if (allocates := examine_select(config)) is not None:
        yield allocates
    if (job_files := examine_job_files()) is not None:
        yield job_files
    yield examine_gpus()


def examine_config(config_file: Path | None) -> tuple[Config, Finding]:
    """Read the configuration; fall back to the built-in one when it is wrong."""
    try:
        config = read_config(config_file)
        unchecked = check_policy(config)
    except MuriError as error:
        return Config(), Finding("configuration", Level.PROBLEM, str(error), _CORRECT)
    place = str(config_path(config_file) or "built-in defaults")
    return config, Finding("configuration", Level.OK, f"{place}; {unchecked}" if unchecked else place)


def examine_trust(path: Path | None, config: Config) -> Iterator[Finding]:
    """Whether others could change what the controller obeys: the configuration, and the way to the state directory."""
    remedies = {
        path: "chown root and chmod go-w what is named here; the controller refuses to start until then",
        config.state_dir.parent: "chown root and chmod go-w it: its owner could exchange the state directory",
    }
    for place, remedy in remedies.items():
        if place is None:
            continue
        with suppress(OSError):  # that it cannot be looked at is told by other findings
            reason = why_unsafe(place)
            if reason is not None:
                level = Level.PROBLEM if place == path else Level.WARNING
                yield Finding("trust", level, f"{place}: {reason}", remedy)


def may_enter(path: Path) -> bool:
    """Whether this user may look into a directory, or there is none."""
    try:
        return not path.exists() or os.access(path, os.R_OK | os.X_OK)
    except PermissionError:
        return False


def facts_of(path: Path) -> os.stat_result | None:
    """What the system knows of a path itself, None where there is nothing."""
    try:
        return path.lstat()
    except OSError:
        return None


def examine_store(path: Path) -> Iterator[Finding]:
    """The profile store: whole, of this format, written as its file system allows."""
    name = "profile store"
    try:
        with ProfileStore(path, read_only=True) as store:
            store.check()
            profiles, stale = len(store.list()), len(store.stale_marks())
        yield Finding(name, Level.OK, f"{path}: whole; {profiles} profiles, {stale} of them stale")
    except StoreMissingError:
        yield Finding(name, Level.OK, f"there is no {path} yet; the first measurement makes it")
    except StoreOutdatedError as error:
        yield Finding(name, Level.WARNING, str(error))
    except CorruptStoreError as error:
        remedy = f"the controller sets it aside at its next start; to do it now: muri doctor --store {path} --set-aside"
        yield Finding(name, Level.PROBLEM, f"{path} is damaged: {error.detail}", remedy)
    except MuriError as error:
        yield Finding(name, Level.PROBLEM, str(error))
    kind = file_system_of(path)
    further = (
        judge_way_of_writing(kind, is_network(kind), existing_journal(path)),
        judge_damaged(set_aside_stores(path)),
    )
    yield from (finding for finding in further if finding is not None)


def examine_journal(path: Path) -> Finding:
    """The controller's journal: whole and of this format."""
    name = "journal"
    if not exists(path):
        return Finding(name, Level.OK, f"there is no {path} yet; the first cycle makes it")
    remedy = f"move it aside (mv {path} {path}.damaged): the jobs' own AdminComment holds what is needed to resume"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
            problem = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.OperationalError as error:
        return Finding(name, Level.WARNING, f"cannot read {path}: {error}", "run this as the controller's user")
    except sqlite3.DatabaseError as error:
        return Finding(name, Level.PROBLEM, f"{path} is damaged: {error}", remedy)
    if problem != "ok":
        return Finding(name, Level.PROBLEM, f"{path} is damaged: {problem}", remedy)
    if version > SCHEMA_VERSION:
        return Finding(
            name, Level.PROBLEM, f"{path} was written by a newer Muri (schema {version})", "upgrade this one"
        )
    return Finding(name, Level.OK, f"{path}: whole")


def examine_slurm(config: Config) -> Iterator[Finding]:
    """Whether Slurm answers, in which way it is asked, and what becomes of jobs there."""
    lacking: list[GatewayUnavailableError] = []
    try:
        gateway = open_gateway(config.gateway, lacking.append)
        snapshot = gateway.snapshot()
    except GatewayUnavailableError as error:
        remedy = "nothing, if the controller runs on another machine"
        yield Finding("Slurm", Level.WARNING, f"no Slurm on this machine: {error}", remedy)
        return
    except MuriError as error:
        remedy = "`scontrol ping` says more; jobs stay as they are meanwhile"
        yield Finding("Slurm", Level.PROBLEM, str(error), remedy)
        return
    gpus = sum(node.gpu_count for node in snapshot.nodes)
    size = f"{len(snapshot.nodes)} nodes, {gpus} GPUs"
    yield Finding("Slurm", Level.OK, f"{snapshot.cluster}, Slurm {snapshot.slurm_version}, by {gateway.name}: {size}")
    named = names_in(config, snapshot, SlurmCommands())
    for wrong in named.wrong:
        yield Finding(_NAMES, Level.PROBLEM, wrong, _CORRECT)
    for unchecked in named.unchecked:
        yield Finding(_NAMES, Level.WARNING, f"not checked: {unchecked}")
    for why in lacking:
        normal = isinstance(why, NoPyslurmError)
        remedy = "" if normal else f"`gateway: {gateway.name}` in muri.yaml, if it is to stay so"
        yield Finding("gateway", Level.OK if normal else Level.WARNING, f"{gateway.name}: {why}", remedy)
    if (submission := examine_submission(SlurmCommands())) is not None:
        yield submission
    yield from examine_real_path(config, snapshot, gateway, SlurmCommands())


def examine_events(config: Config, commands: SlurmCommands | None = None) -> Finding | None:
    """Look at cycles on events; None where Slurm, or the state directory, cannot be asked, which other findings say."""
    commands = commands or SlurmCommands()
    try:
        facts = EventFacts(
            is_watched=holder_of(config.state_dir, EVENTS_LOCK_NAME) is not None,
            host=this_host(),
            slurmctld_hosts=slurmctld_hosts(commands),
            slurm_uid=slurm_user_of(commands),
            notice=facts_of(config.events.notice_file),
        )
    except (OSError, MuriError):
        return None
    return judge_events(facts, config)


def examine_gpus() -> Finding:
    """Whether this machine's GPUs can be read."""
    reason = why_no_gpu()
    if reason is None:
        return Finding("GPUs", Level.OK, "NVML can be read")
    return Finding("GPUs", Level.WARNING, reason, "nothing, unless jobs run on this machine")


def set_store_aside(config: Config, store: Path | None, confirm: Callable[[str], bool]) -> Path | None:
    """Rename a store that is damaged.

    Args:
        config: The configuration.
        store: The profile store; None for the configured one.
        confirm: Asks whether to do it.

    Returns:
        Its new place; None when it is not damaged, or the answer was no.

    Raises:
        DoctorError: A controller has it open.
        StoreError: It is not there, cannot be read, or cannot be renamed.
    """
    path = store or profiles_path(config)
    damage = _damage(path)
    if not damage or not confirm(f"{path} is damaged ({damage}). Rename it, so that models are measured again?"):
        return None
    if path != profiles_path(config):
        return set_aside(path, datetime.now(UTC))
    try:
        with only_one(config.state_dir):
            return set_aside(path, datetime.now(UTC))
    except AnotherControllerError as error:
        raise DoctorError(
            f"{error}. It sets a damaged store aside by itself; or stop it, and give this command again"
        ) from error


def _damage(path: Path) -> str:
    """What is wrong with a store, "" when it is whole."""
    try:
        with ProfileStore(path, read_only=True) as opened:
            opened.check()
            opened.list()
    except CorruptStoreError as error:
        return error.detail
    return ""


def _folder(path: Path) -> Folder:
    user = user_name(os.geteuid())
    try:
        if not path.exists():
            return Folder(path, exists=False)
    except PermissionError:
        return Folder(path, exists=True, is_directory=True, owner="another user", user=user)
    uid = path.stat().st_uid
    entries = list(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else []
    foreign = sorted(entry.name for entry in entries if entry.lstat().st_uid != uid)
    return Folder(
        path,
        exists=True,
        is_directory=path.is_dir(),
        owner=user_name(uid),
        mode=stat.S_IMODE(path.lstat().st_mode),
        is_link=path.is_symlink(),
        user=user,
        writable=os.access(path, os.W_OK | os.X_OK),
        foreign_files=tuple(foreign),
    )


def _space(path: Path) -> Finding:
    for folder in (path.absolute(), *path.absolute().parents):
        with suppress(FileNotFoundError, PermissionError):
            return judge_space(folder, shutil.disk_usage(folder).free)
    return judge_space(Path("/"), shutil.disk_usage("/").free)
