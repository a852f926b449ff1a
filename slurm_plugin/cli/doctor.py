"""`muri doctor`: examine what Muri needs on this machine; changes nothing, unless told to set a store aside."""

import json
import logging
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

import click

from muri.clock import GIB, MIB
from muri.errors import MuriError
from muri.files import SITE_RUN_DIR
from muri.profiler.errors import CorruptStoreError, StoreMissingError, StoreOutdatedError
from muri.profiler.gpu_usage import check as why_no_gpu
from muri.profiler.store import ProfileStore
from muri.profiler.store_file import existing_journal, exists, file_system_of, is_network, set_aside, set_aside_stores
from muri.slurm_plugin.cli import CONFIG_OPTION
from muri.slurm_plugin.cli.doctor_slurm import (
    CORRECT,
    NAMES,
    Finding,
    Level,
    examine_settings,
    examine_slurm,
    ok,
    problem,
    warning,
    wrong_python,
)
from muri.slurm_plugin.config import Config, config_path
from muri.slurm_plugin.controller.assemble import check_policy, profiles_path, read_config
from muri.slurm_plugin.controller.loop import AnotherControllerError, only_one
from muri.slurm_plugin.controller.status import CYCLES_MISSED, cycle_age_s
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.private_files import OTHERS_MAY, only_its_owner_writes, user_name, why_unsafe
from muri.slurm_plugin.records.journal import SCHEMA_VERSION
from muri.text import printable, printable_lines

_COLORS: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_STATE: Final = "state directory"
_WIDTH: Final = 80
_LEAST_FREE: Final = 50 * MIB
_LITTLE_FREE: Final = GIB


class DoctorError(MuriError):
    """The requested change would do harm now."""


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
        problems, warnings = (sum(item.level is level for item in findings) for level in (Level.PROBLEM, Level.WARNING))
        click.echo(f"{problems} problem(s), {warnings} warning(s)")
    click.get_current_context().exit(any(finding.level is Level.PROBLEM for finding in findings))


def _print(finding: Finding) -> None:
    head = click.style(f"{finding.level.upper():<9}", fg=_COLORS[finding.level]) + f"{finding.name:<17}"
    space = " " * 26
    text = click.wrap_text(printable_lines(finding.text), _WIDTH - len(space), preserve_paragraphs=True)
    click.echo(head + text.replace("\n", f"\n{space}"))
    if finding.remedy:
        click.echo(click.wrap_text(finding.remedy, _WIDTH, f"{space}→ ", f"{space}  "))
    for line in finding.lines:
        click.echo(printable(f"    {line}"))


def _set_aside(config_file: Path | None, store: Path | None, yes: bool, as_json: bool) -> None:
    config = read_config(config_file)
    path = store or profiles_path(config)
    place, damage = None, _damage(path)
    question = f"{path} is damaged ({damage}). Rename it, so that models are measured again?"
    is_refused = bool(damage) and not yes and not click.confirm(question, err=True)
    if damage and not is_refused:
        place = _renamed(path, config)
    if as_json:
        click.echo(json.dumps({"set_aside": None if place is None else str(place)}))
    elif place is not None:
        click.echo(f"set aside as {place}; save what is left of it with `sqlite3 {place} .recover`")
    elif not is_refused:
        click.echo(f"{path} is whole; nothing to set aside")
    if is_refused:
        click.echo("Nothing was changed.", err=True)
        click.get_current_context().exit(1)


def _renamed(path: Path, config: Config) -> Path:
    """Rename a damaged store and return its new place; a DoctorError where a controller has it open."""
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
    """Return what is wrong with a store, "" if it is whole."""
    try:
        with ProfileStore(path, read_only=True) as opened:
            opened.check()
            opened.list()
    except CorruptStoreError as error:
        return error.detail
    return ""


def examine(config_file: Path | None, store: Path | None) -> Iterator[Finding]:
    """Look at one thing after the other; `None` stands for the site's configuration and its own profile store."""
    config, finding = examine_config(config_file)
    yield finding
    yield from (problem(NAMES, wrong, CORRECT) for wrong in wrong_python(config))
    yield from examine_trust(config_path(config_file), config)
    yield examine_state_dir(config.state_dir)
    yield _space(config.state_dir)
    if _may_enter(config.state_dir):
        yield from examine_store(store or profiles_path(config))
        yield examine_journal(config.state_dir / "journal.db")
    yield judge_cycle(cycle_age_s(config, time.time()), config.interval_s)
    yield judge_status_dir(_facts_of(config.status_dir), config.status_dir)
    yield judge_run_dir(_facts_of(SITE_RUN_DIR), SITE_RUN_DIR)
    yield from examine_slurm(config)
    yield from examine_settings(config, SlurmCommands())
    if reason := why_no_gpu():
        yield warning("GPUs", reason, "nothing, unless jobs run on this machine")
    else:
        yield ok("GPUs", "NVML can be read")


def examine_config(config_file: Path | None) -> tuple[Config, Finding]:
    """Read the configuration; fall back to the built-in one when it is wrong."""
    name, place = "configuration", str(config_path(config_file) or "built-in defaults")
    try:
        config = read_config(config_file)
        unchecked = check_policy(config)
    except MuriError as error:
        return Config(), problem(name, str(error), CORRECT)
    return config, ok(name, f"{place}; {unchecked}" if unchecked else place)


def examine_trust(path: Path | None, config: Config) -> Iterator[Finding]:
    """Whether others could change the configuration, or the way to the state directory."""
    with suppress(OSError):  # other findings say that it cannot be looked at
        if path is not None and (reason := why_unsafe(path)) is not None:
            remedy = "chown root and chmod go-w what is named here; the controller refuses to start until then"
            yield problem("trust", f"{path}: {reason}", remedy)
    with suppress(OSError):
        if (reason := why_unsafe(config.state_dir.parent)) is not None:
            remedy = "chown root and chmod go-w it: its owner could exchange the state directory"
            yield warning("trust", f"{config.state_dir.parent}: {reason}", remedy)


def examine_state_dir(path: Path) -> Finding:
    """The state directory: there, a directory, and all of it for root alone."""
    try:
        if not path.exists():
            return warning(_STATE, f"there is no {path} yet", "the controller's first cycle makes it")
        owner = user_name(path.stat().st_uid)
    except PermissionError:
        return _not_of_root(path, "another user")
    return next(_judge_state_dir(path, owner))


def _not_of_root(path: Path, owner: str) -> Finding:
    remedy = f"chown -R root {path}, and run the controller as root: only root may submit for users"
    return problem(_STATE, f"{path} belongs to {owner}, not to root", remedy)


def _judge_state_dir(path: Path, owner: str) -> Iterator[Finding]:
    """Yield all findings, the gravest first; a wrong place before its owner, as `chown -R` does not mend it."""
    if not path.is_dir():
        yield problem(_STATE, f"{path} is not a directory", "move it away, or set state_dir to a directory")
    if path.is_symlink():
        remedy = "set state_dir to the place that it leads to; the controller refuses links"
        yield problem(_STATE, f"{path} is a link", remedy)
    if owner != "root":
        yield _not_of_root(path, owner)
    entries = path.iterdir() if os.access(path, os.R_OK | os.X_OK) else ()
    if foreign := sorted(entry.name for entry in entries if entry.lstat().st_uid != 0):
        remedy = f"chown {owner} them: a controller that runs as {owner} cannot write them"
        yield warning(_STATE, f"not owned by {owner} like {path}: {', '.join(foreign)}", remedy)
    if (mode := stat.S_IMODE(path.lstat().st_mode)) & OTHERS_MAY:
        remedy = f"chmod 700 {path}; the controller does so at its next start"
        yield warning(_STATE, f"others may enter {path} (mode {mode:04o})", remedy)
    if not os.access(path, os.W_OK | os.X_OK):
        remedy = f"run the controller, and this command for a full check, as {owner}"
        yield warning(_STATE, f"{path} belongs to {owner}; {user_name(os.geteuid())} may not write there", remedy)
    yield ok(_STATE, f"{path}, of {owner} alone, writable")


def _may_enter(path: Path) -> bool:
    """Whether this user may look into a directory, or there is none."""
    try:
        return not path.exists() or os.access(path, os.R_OK | os.X_OK)
    except PermissionError:
        return False


def _facts_of(path: Path) -> os.stat_result | None:
    """The facts of a path itself, None where it does not exist."""
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
        yield ok(name, f"{path}: whole; {profiles} profiles, {stale} of them stale")
    except StoreMissingError:
        yield ok(name, f"there is no {path} yet; the first measurement makes it")
    except StoreOutdatedError as error:
        yield warning(name, str(error))
    except CorruptStoreError as error:
        remedy = f"the controller sets it aside at its next start; to do it now: muri doctor --store {path} --set-aside"
        yield problem(name, f"{path} is damaged: {error.detail}", remedy)
    except MuriError as error:
        yield problem(name, str(error))
    yield from judge_way_of_writing(file_system_of(path), existing_journal(path))
    if places := set_aside_stores(path):
        remedy = f"save what is left with `sqlite3 {places[-1]} .recover`, then delete it"
        yield warning(name, f"damaged and set aside: {', '.join(map(str, places))}", remedy)


def judge_way_of_writing(file_system: str, journal: str | None) -> Iterator[Finding]:
    """Yield a warning about a store that is written in a way that its file system does not allow."""
    if journal == "wal" and is_network(file_system):
        text = f"it has a write-ahead log on {file_system}, where several machines cannot share one"
        remedy = "close every program that has it open; the next one that writes switches it to a rollback journal"
        yield warning("profile store", text, remedy)


def examine_journal(path: Path) -> Finding:
    """The controller's journal: whole and of this format."""
    name = "journal"
    if not exists(path):
        return ok(name, f"there is no {path} yet; the first cycle makes it")
    remedy = f"move it aside (mv {path} {path}.damaged): the jobs' own AdminComment holds what is needed to resume"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
            damage = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.OperationalError as error:
        return warning(name, f"cannot read {path}: {error}", "run this as the controller's user")
    except sqlite3.DatabaseError as error:
        return problem(name, f"{path} is damaged: {error}", remedy)
    if damage != "ok":
        return problem(name, f"{path} is damaged: {damage}", remedy)
    if version > SCHEMA_VERSION:
        return problem(name, f"{path} was written by a newer Muri (schema {version})", "upgrade this one")
    return ok(name, f"{path}: whole")


def judge_status_dir(facts: os.stat_result | None, path: Path) -> Finding:
    """The directory in which the controller leaves each user a file about their own jobs; no facts: it is missing."""
    name = "status for users"
    if facts is None:
        remedy = "nothing on other machines than the controller's; there, the next cycle as root makes it"
        return warning(name, f"there is no {path}: users see only what Slurm tells of jobs", remedy)
    if not only_its_owner_writes(facts):
        remedy = "remove it; the next cycle makes it, and writes none until then"
        return problem(name, f"{path} must be a directory writable only by the controller", remedy)
    return ok(name, f"{path}: a file for each user, readable by them alone")


def judge_run_dir(facts: os.stat_result | None, path: Path) -> Finding:
    """The directory in which root makes a run directory for each user; no facts: it is missing."""
    name = "run directories"
    if facts is None:
        remedy = "nothing, unless jobs run on this machine: there the SPANK plugin makes it at a job's start"
        return warning(name, f"there is no {path}: members meet in /tmp, where others can take a name", remedy)
    if facts.st_uid != 0 or not only_its_owner_writes(facts):
        remedy = "remove it: root makes it anew; jobs that run now go back to the queue"
        return problem(name, f"{path} must be a directory writable only by root", remedy)
    return ok(name, f"{path}, of root; the SPANK plugin makes one in it for each user with jobs")


def _space(path: Path) -> Finding:
    for folder in (path.absolute(), *path.absolute().parents):
        with suppress(FileNotFoundError, PermissionError):
            return judge_space(folder, shutil.disk_usage(folder).free)
    return judge_space(Path("/"), shutil.disk_usage("/").free)


def judge_space(path: Path, free: int) -> Finding:
    """Free space, in bytes, of the state directory."""
    name, text = "disk space", f"{free / GIB:.1f} GiB free at {path}"
    if free < _LEAST_FREE:
        return problem(name, text, "make room: the journal cannot be written on a full disk")
    return ok(name, text) if free >= _LITTLE_FREE else warning(name, text, "make room before it is full")


def judge_cycle(age_s: float | None, interval_s: float) -> Finding:
    """When the controller last finished a cycle; None: never."""
    remedy = "see `systemctl status muri-controller.timer` and `journalctl -u muri-controller`"
    if age_s is None:
        return warning("controller", "no cycle has finished yet", remedy)
    text = f"the last cycle finished {age_s:.0f} s ago"
    if age_s > CYCLES_MISSED * interval_s:
        return warning("controller", f"{text}; one is due every {interval_s:g} s", remedy)
    return ok("controller", text)
