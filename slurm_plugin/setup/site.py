"""Slurm's configuration files on this host: read, tried with Slurm's own programs, replaced together or not at all."""

import ctypes
import difflib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muri.slurm_plugin.setup import hooks, slurm_conf
from muri.slurm_plugin.setup.marks import is_marked, without_marks
from muri.slurm_plugin.setup.slurm_conf import SetupError

BACKUP_SUFFIX: Final = ".before-muri"
_TIME: Final = re.compile(r"^\[[^\]]*\] *")
_LUA_LIBRARIES: Final = ("liblua5.4.so.0", "liblua-5.4.so", "liblua5.3.so.0", "liblua-5.3.so", "liblua5.1.so.0",
                         "liblua5.1-c++.so.0", "liblua-5.1.so")  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One file, as it is and as it should be.

    Attributes:
        path: The file.
        before: Its text; None where there is no such file.
        after: What it should hold; None where it should not be.
    """

    path: Path
    before: str | None
    after: str | None

    @property
    def diff(self) -> str:
        """What changes, as a unified diff."""
        before, after = ((text or "").splitlines(keepends=True) for text in (self.before, self.after))
        old = "/dev/null" if self.before is None else str(self.path)
        new = "/dev/null" if self.after is None else f"{self.path} (with Muri)"
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(before, after, old, new)
        )


@dataclass(frozen=True)
class Site:
    """Where this host has Slurm's configuration.

    Attributes:
        main: slurm.conf.
        fragment: Muri's part of plugstack.conf, where the plugin is installed.
        lua_module: Muri's part of job_submit.lua, where the controller is installed.
    """

    main: Path
    fragment: Path = Path(hooks.FRAGMENT)
    lua_module: Path = Path(hooks.LUA_MODULE)

    @property
    def gres(self) -> Path:
        """gres.conf."""
        return self.main.with_name("gres.conf")

    @property
    def job_submit(self) -> Path:
        """job_submit.lua, which only slurmctld reads."""
        return self.main.with_name("job_submit.lua")

    @property
    def plugstack(self) -> Path:
        """plugstack.conf, or what PlugStackConfig names instead."""
        word = slurm_conf.read(tree_of(self.main)).last.get("plugstackconfig")
        return Path(word.value) if word else self.main.with_name("plugstack.conf")

    @property
    def has_plugin(self) -> bool:
        """Whether the SPANK plugin is installed here."""
        return self.fragment.exists()

    @property
    def has_controller(self) -> bool:
        """Whether the controller is installed here."""
        return self.lua_module.exists()


def find_site(named: Path | None = None) -> Site:
    """Return where Slurm's configuration is.

    Raises:
        SetupError: There is none.
    """
    places = [named] if named else [Path(os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf")]
    for place in places:
        if place.is_file():
            return Site(place)
    raise SetupError(
        f"there is no {places[0]} on this host. If Slurm is configless here, there is nothing to do: run this on "
        "slurmctld's machine. Else name the file: --slurm-conf FILE"
    )


def tree_of(main: Path) -> dict[Path, str]:
    """Return a configuration file and all files that it includes, in the order in which Slurm reads them."""
    texts: dict[Path, str] = {}
    _read_tree(main, main.parent, texts)
    return texts


def _read_tree(path: Path, folder: Path, texts: dict[Path, str]) -> None:
    text = read_text(path)
    if text is None or path in texts:
        return
    texts[path] = text
    for name in slurm_conf.included(text):
        found = Path(folder, name)
        for file in sorted(found.parent.glob(found.name)):
            _read_tree(file, folder, texts)


def read_text(path: Path) -> str | None:
    """Return a file byte for byte, None where there is none.

    Raises:
        SetupError: It cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as err:
        raise SetupError(f"cannot read {path}: {err.strerror or err}") from err


def missing(site: Site, *, with_licence: bool) -> list[Change]:
    """Return what Muri still needs on this host.

    Args:
        site: The configuration.
        with_licence: Whether a licence keeps waiting jobs.

    Raises:
        SetupError: A file is not in a form that can be completed.
    """
    tree = tree_of(site.main)
    after: dict[Path, str | None] = dict(slurm_conf.with_slurm_conf(tree, with_licence=with_licence))
    gres = tree_of(site.gres)
    after |= slurm_conf.with_gres_conf(gres, site.gres, slurm_conf.read(tree).gpu_nodes)
    if site.has_plugin:
        stack = tree_of(site.plugstack)
        after[site.plugstack] = hooks.with_plugstack(read_text(site.plugstack), stack.values())
    if site.has_controller:
        after[site.job_submit] = hooks.with_job_submit(read_text(site.job_submit))
    return _changes(after)


def added(site: Site) -> list[Change]:
    """Return the way back: every file that Muri's marks are in, without them."""
    places = [*tree_of(site.main), *tree_of(site.gres), *tree_of(site.plugstack), site.job_submit]
    texts = {path: read_text(path) for path in dict.fromkeys(places)}
    return _changes({path: without_marks(text) for path, text in texts.items() if text and is_marked(text)})


def _changes(after: Mapping[Path, str | None]) -> list[Change]:
    changes = (Change(path, read_text(path), text) for path, text in after.items())
    return [change for change in changes if change.before != change.after]


def try_out(site: Site, changes: Sequence[Change]) -> None:
    """Let Slurm's own programs read the new files, in a copy of their directory.

    Raises:
        SetupError: They find a fault in them.
    """
    for change in changes:
        if change.path == site.job_submit and change.after is not None:
            _try_lua(change)
    with tempfile.TemporaryDirectory(prefix="muri-setup-") as name:
        folder = Path(name)
        old, new = folder / "old", folder / "new"
        shutil.copytree(site.main.parent, old, symlinks=False, ignore_dangling_symlinks=True)
        _turn_to(old, site.main.parent)
        shutil.copytree(old, new)
        for change in changes:
            if change.path.is_relative_to(site.main.parent):
                _place(new / change.path.relative_to(site.main.parent), change.after)
        _turn_to(new, site.main.parent)
        faults = _faults(new / site.main.name) - _faults(old / site.main.name)
    if faults:
        raise SetupError(
            "Slurm would not accept the changed files, so nothing was changed:\n  " + "\n  ".join(sorted(faults))
        )


def _turn_to(folder: Path, site: Path) -> None:
    """Let included files mean those of the copy."""
    for file in folder.rglob("*.conf"):
        text = file.read_bytes()
        file.write_bytes(text.replace(f"{site}/".encode(), f"{folder}/".encode()))


def _place(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))


def _faults(main: Path) -> set[str]:
    """What Slurm's programs on this host say against a configuration, without when and where."""
    # The first reads slurm.conf and says which daemons belong on this host; slurmd also reads gres.conf.
    daemons, faults = _said(main, "scontrol", "show", "daemons")
    return faults | (_said(main, "slurmd", "-G")[1] if "slurmd" in daemons.split() else set())


def _said(main: Path, *command: str) -> tuple[str, set[str]]:
    environment = {**os.environ, "SLURM_CONF": str(main)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", set()  # not every host has each program
    lines = (_TIME.sub("", line).replace(str(main.parent), "") for line in done.stderr.splitlines())
    return done.stdout, {line for line in lines if "error:" in line or "fatal:" in line}


def _try_lua(change: Change) -> None:
    """Compile job_submit.lua with a Lua that is installed, as slurmctld links one.

    Raises:
        SetupError: It does not compile.
    """
    problem = lua_problem(change.after or "")
    if problem:
        lines = "\n".join(f"  {line}" for line in hooks.LOAD)
        raise SetupError(
            f"{change.path} cannot be completed by itself ({problem}), so nothing was changed. Add these lines to it, "
            f"behind its functions and before its last `return`, and run this again:\n{lines}"
        )


def lua_problem(text: str) -> str | None:
    """Return why Lua does not compile a text; None where it does, or no Lua is installed."""
    for name in _LUA_LIBRARIES:
        try:
            lua = ctypes.CDLL(name)
        except OSError:
            continue
        lua.luaL_newstate.restype = ctypes.c_void_p
        lua.lua_tolstring.restype = ctypes.c_char_p
        state = ctypes.c_void_p(lua.luaL_newstate())
        try:
            if lua.luaL_loadstring(state, text.encode("utf-8", "surrogateescape")) == 0:
                return None
            said = lua.lua_tolstring(state, -1, None) or b""
            return str(said.decode("utf-8", "replace"))
        finally:
            lua.lua_close(state)
    return None


def replace_files(changes: Iterable[Change], *, keep_backups: bool) -> None:
    """Replace all files, or none.

    Args:
        changes: The files.
        keep_backups: Keep what was there beside each file; else delete such copies.

    Raises:
        SetupError: One could not be replaced; the others are as they were.
    """
    done: list[Change] = []
    backups: list[Path] = []
    for change in changes:
        try:
            if keep_backups and change.before is not None:
                backups += _backup(change)
            _replace(change.path, change.after)
            done.append(change)
        except OSError as err:
            for each in reversed(done):
                _replace(each.path, each.before)
            for backup in backups:
                backup.unlink(missing_ok=True)
            raise SetupError(
                f"cannot replace {change.path}: {err.strerror or err}. Every file is as it was. Run this as root"
            ) from err
    if not keep_backups:
        for change in done:
            backup_of(change.path).unlink(missing_ok=True)


def backup_of(path: Path) -> Path:
    """Where the copy of a file lies that was made before Muri changed it."""
    return path.with_name(path.name + BACKUP_SUFFIX)


def _backup(change: Change) -> list[Path]:
    """Copy a file unless there is a copy; returns the new copy."""
    backup = backup_of(change.path)
    if backup.exists():
        return []
    shutil.copy2(change.path, backup)
    return [backup]


def _replace(path: Path, text: str | None) -> None:
    """Put a file into place as a whole, with the old one's owner and mode; a link stays a link."""
    real = path.resolve()
    if text is None:
        real.unlink(missing_ok=True)
        return
    handle, name = tempfile.mkstemp(prefix=f".{real.name}.", dir=real.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode("utf-8", "surrogateescape"))
            stream.flush()
            os.fsync(stream.fileno())
        if real.exists():
            there = real.stat()
            os.chown(temporary, there.st_uid, there.st_gid)
            temporary.chmod(there.st_mode & 0o7777)
        else:
            temporary.chmod(0o644)
        temporary.replace(real)
    finally:
        temporary.unlink(missing_ok=True)
