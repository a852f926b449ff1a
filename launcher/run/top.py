"""The command `muri top`: finds groups by their status files or in the scheduler's records, and shows them.

Status files belong to users, and root shows those of all users: nothing in them is trusted.
"""

import contextlib
import json
import os
import re
import select
import stat
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from muri.errors import MuriError
from muri.files import RUN_DIR_VARIABLE, SITE_RUN_DIR, default_run_dir, use_file
from muri.launcher.job.scheduler import load_membership
from muri.terminal import PlainConsole, cell, say
from muri.text import counted, json_of

EPILOG = """
\b
Examples:
  muri top                                      groups of yours on this node;
                                                where none is: on all nodes
  srun --overlap --pty --jobid=4711 muri top    on the node of pilot job 4711
  muri top --once --sort wait                   once, most hindered first
  muri top --json | jq '.[].total_speed'

\b
SPEED is iterations done × iteration time alone / time elapsed: 1.00 is as
fast as alone; ~ where the time alone is not known but learned. PLAN is what
the controller expected; ! marks a difference above 20 %. MIN is the speed
that the job was promised; ! marks one that is not kept. "process" in STATE:
running, in a process of its own; "plain": it has not called `muri run` so far,
and shares without turns. The last line of a group shows for how much of the
time each resource is held, and its holder at this moment.
"""

STALE_S: Final = 10.0
"""A runtime writes its status every second; an older file is that of one that died or hangs."""

LOOKING_S: Final = 1.0
ASKING_S: Final = 60.0
"""Seconds between two looks at status files, and between two questions to the scheduler: pilot jobs report once a
minute at most."""

_LARGEST_STATUS: Final = 1 << 20
_MOST_GROUPS: Final = 32
"""Of one user on a node; the status files of older pilot jobs are left out."""

_STATUS_NAME: Final = re.compile(r"pilot-\d+\.json")
MOST_ROWS: Final = 64
"""The most members, resources or GPUs in a table."""

_MOST: Final = 1e12
_LONGEST_TEXT: Final = 4096
BAR_WIDTH: Final = 16
DIFFERS_BY: Final = 0.2
"""Measured and predicted speed that differ by more are marked, as the controller does."""

OLD_USE_S: Final = 60.0
"""Figures of a node's use that are older are not shown."""

SORTS: Final = ("job", "speed", "iterations", "wait")
PARTS: Final = (
    ("load", "L", "on blue"),
    ("preprocess", "P", "black on yellow"),
    ("propagate", "G", "black on green"),
    ("synchronize", "S", "on magenta"),
    ("wait", "w", "dim"),
    ("other", "·", "dim"),
)
LEGEND: Final = "L load  P preprocess  G propagate  S synchronize  w wait  · other  ! off plan"

FROM_RECORDS: Final = (
    "No group runs on this host. This is what Slurm's records tell of those on other\nnodes, as their pilot jobs last "
    "reported it:"
)


class NoGroupError(MuriError):
    """There is no group to look at."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group's status (see docs/sharing.md), written `age_s` seconds ago; without a path for scheduler records."""

    path: Path | None
    status: Mapping[str, Any]
    age_s: float

    @property
    def stale(self) -> bool:
        """Return whether the runtime has stopped writing."""
        return self.age_s > STALE_S

    @property
    def left_behind(self) -> bool:
        """Return whether the runtime is gone and its status file is still there: the pilot job was killed too."""
        pid, command = self.status.get("pid"), b""
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid:d}/cmdline").read_bytes() if isinstance(pid, int) else b""
        # The process may be another one with the same number by now.
        return self.stale and (self.path is None or os.fsencode(self.path.name) not in command)

    def to_json(self) -> dict[str, object]:
        """Return the group's part of the output of `--json`."""
        file = None if self.path is None else str(self.path)
        return {"file": file, "age_s": round(self.age_s, 1), "stale": self.stale, **self.status}


@dataclass(frozen=True, slots=True)
class Found:
    """All groups, ordered by file, and the reasons why other status files are left out."""

    groups: tuple[GroupView, ...]
    left_out: tuple[str, ...] = ()

    @property
    def pause_s(self) -> float:
        """Seconds until the next look: a file may be read each second, the scheduler must not be asked that often."""
        return LOOKING_S if all(group.path for group in self.groups) else ASKING_S


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.option("--once", is_flag=True, help="Print once and end; also where input or output is not a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the groups' status files as one JSON list, once.")
@click.option("--sort", type=click.Choice(SORTS), default="job", show_default=True, help="Order of the members.")
def top(once: bool, as_json: bool, sort: str) -> None:
    """Watch the groups on this node: iterations, stages, speed against the plan.

    Where none runs on this node, such as on a login host, shows what Slurm's records tell of your groups on all nodes:
    less, and as old as the pilot jobs' last reports. Shows your own groups; root sees those of all users. Leave with q
    or Ctrl-C.
    """
    if as_json:
        found = find_groups(os.environ)
        click.echo(json.dumps([group.to_json() for group in found.groups], indent=1))
        for reason in found.left_out:
            say(reason, to_stderr=True)
        return
    console = PlainConsole()
    if not console.is_terminal:
        console = PlainConsole(width=max(80, console.width))
    if once or not (console.is_terminal and sys.stdin.isatty()):
        console.print(render(find_groups(os.environ), sort))
        return
    _watch(console, sort)


def _watch(console: Console, sort: str) -> None:
    """Redraw until a key or Ctrl-C; a group that ends leaves a line, and one that comes is shown."""
    shown = find_groups(os.environ)
    with _single_keys() as pressed, Live(render(shown, sort), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        with contextlib.suppress(KeyboardInterrupt):
            while pressed(shown.pause_s) not in {"q", "Q", "\x03"}:
                try:
                    shown = find_groups(os.environ)
                    live.update(render(shown, sort), refresh=True)
                except NoGroupError:
                    live.update("The last group has ended. q to leave.", refresh=True)


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Read keys without Enter."""
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield (
            lambda seconds: (
                os.read(file, 1).decode(errors="replace") if select.select([file], [], [], seconds)[0] else ""
            )
        )
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def read_group(path: Path) -> GroupView:
    """Read one status file, but no link; an OSError if it cannot be read, a ValueError if it is something else."""
    now_s = time.time()
    status, written_s = _read(path)
    if "members" not in status:
        raise ValueError("it names no members")
    status |= _use_beside(path, now_s)
    return GroupView(path, _with_plain_members(status), max(0.0, now_s - written_s))


def _with_plain_members(status: dict[str, Any]) -> dict[str, Any]:
    """Add the members that the pilot job sees on the node and the runtime does not know: they share without turns."""
    plain = _part(status, "use").get("plain")
    members = _parts(status, "members")
    for name in plain[:MOST_ROWS] if isinstance(plain, list) else ():
        known = members.get(name, {}) if isinstance(name, str) and name.isdecimal() else {"state": "running"}
        if known.get("state", "waiting") == "waiting":
            members[name] = {**known, "state": "plain"}
    return {**status, "members": members}


def _read(path: Path) -> tuple[dict[str, Any], float]:
    """Return a file's JSON object, {} for other JSON, and when it was written; no pipe keeps the reader waiting."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags), "rb") as file:
        value, written_s = json_of(file.read(_LARGEST_STATUS)), os.fstat(file.fileno()).st_mtime
    json.dumps(value, allow_nan=False)  # a ValueError for what could not be printed
    value = value if isinstance(value, dict) else {}
    with contextlib.suppress(ValueError, OverflowError):
        written_s = datetime.fromisoformat(str(value.get("updated"))).timestamp()
    return value, written_s


def _use_beside(status: Path, now_s: float) -> dict[str, Any]:
    """Return the node's use as the pilot job last wrote it; {} if that is old or missing."""
    with contextlib.suppress(OSError, ValueError):
        use, written_s = _read(use_file(status))
        if now_s - written_s < OLD_USE_S:
            return {"use": use}
    return {}


def run_dirs(environment: Mapping[str, str]) -> list[Path]:
    """Return the run directories to look into: the user's own; for root those of all users, unless tampered with."""
    if os.geteuid() != 0 or environment.get(RUN_DIR_VARIABLE):
        return [default_run_dir(environment)]
    return sorted(path for path in SITE_RUN_DIR.glob("*") if _belongs_to_its_user(path))


def _belongs_to_its_user(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and not facts.st_mode & 0o077 and path.name == str(facts.st_uid)


def find_groups(environment: Mapping[str, str]) -> Found:
    """Return all groups on this node, or, if it has none, the groups that the scheduler knows of.

    A file that vanishes or was left behind is not a group. A NoGroupError says where one could be looked at.
    """
    looked, groups, left_out = run_dirs(environment), list[GroupView](), list[str]()
    for run_dir in looked:
        for path in _statuses(run_dir):
            try:
                groups.append(read_group(path))
            except ValueError as error:
                left_out.append(f"{path} is not a status file of a runtime: {error}")
            except OSError:  # it has vanished, or is a link, which root must not follow
                continue
    groups = [group for group in groups if not group.left_behind]
    if groups:
        return Found(tuple(groups), tuple(left_out))
    nothing = "; ".join([_nothing_found(looked), *left_out])
    try:
        known = [GroupView(None, status, 0.0) for status in load_membership().groups()]
    except MuriError as error:
        raise NoGroupError(f"{nothing}. The scheduler's records cannot be read: {error}") from error
    if not known:
        raise NoGroupError(nothing)
    return Found(tuple(known), tuple(left_out))


def _statuses(run_dir: Path) -> list[Path]:
    """Return the status files in a run directory, those of the newest pilot jobs."""
    try:
        named = [path for path in run_dir.iterdir() if _STATUS_NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(sorted(named, key=lambda path: (len(path.name), path.name))[-_MOST_GROUPS:])


def _nothing_found(looked: list[Path]) -> str:
    where = ", ".join(map(str, looked)) or f"{SITE_RUN_DIR}/<uid>"
    return (
        f"no group of yours runs on this node (looked in {where}). A group's status is on the node that it runs on: "
        "find its pilot job in the column GROUP of `muri queue`, then `srun --overlap --pty --jobid=GROUP muri top`"
    )


def _stage_bar(share: Mapping[str, Any]) -> Text:
    """Return the shares of an iteration as a bar of `BAR_WIDTH` letters, "-" when they are unknown."""
    text = Text()
    shares = [_figure(share, name) or 0.0 for name, _, _ in PARTS]
    if not sum(shares):
        return Text("-")
    drawn, up_to = 0, 0.0
    for part, (_, letter, style) in zip(shares, PARTS, strict=True):
        up_to += part
        end = round(up_to / sum(shares) * BAR_WIDTH)
        text.append(letter * (end - drawn), style)
        drawn = end
    return text


def sort_members(members: Mapping[str, Any], by: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Sort members by job id, or the slowest, furthest or longest waiting first."""

    def key(item: tuple[str, Mapping[str, Any]]) -> tuple[float, int, str]:
        name, member = item
        speed = _figure(member, "speed")
        orders = {
            "job": 0.0,
            "speed": float("inf") if speed is None else speed,
            "iterations": -(_figure(member, "iterations") or 0.0),
            "wait": -(_figure(_part(member, "share"), "wait") or 0.0),
        }
        return (orders[by], len(name), name)

    return sorted(members.items(), key=key)


def render(found: Found, sort: str) -> RenderableType:
    """Return all groups, one below the other."""
    parts: list[RenderableType] = []
    if not all(group.path for group in found.groups):
        parts.append(Text(FROM_RECORDS, style="dim"))
    for group in found.groups:
        members = _table("JOB", "SCRIPT", "STATE", "ITER", "IT/S", "TIME GOES TO", "SPEED", "PLAN", "MIN")
        for name, member in sort_members(group.status["members"], sort):
            members.add_row(name, *_cells(member))
        resources = Text()
        for name, resource in _parts(group.status, "resources").items():
            resources.append(f"{name} ", "dim")
            resources.append(f"{_share(resource, 'busy')} {_text(resource, 'holder')}  ")
        parts += [_headline(group), members, resources, *_use_table(group.status), Text("")]
    parts += [Text(f"Left out: {reason}", "red") for reason in found.left_out]
    return Group(*parts, Text(LEGEND, style="dim"))


def _headline(group: GroupView) -> Text:
    status = group.status
    name = f"Group of pilot job {_text(status, 'pilot_job')}"
    name += f" on {_text(status, 'node')}" if status.get("node") else ""
    total = _figure(status, "total_speed")
    running = sum(member.get("state") == "running" for member in status["members"].values())
    speed = "-" if total is None else f"{total:.2f} of {running}"
    text = Text(f"{name}: {_text(status, 'discipline')}, total speed {speed}", style="bold")
    changes = status.get("disciplines")
    if isinstance(changes, list) and len(changes) > 1 and isinstance(changes[-1], dict):
        text.append(f" ({counted(len(changes) - 1, 'change')}: {_text(changes[-1], 'reason')})", "not bold")
    if fault := _part(status, "fault"):
        text.append(f"\nError of the GPU: {_text(fault, 'cause')}", "red")
    if group.stale:
        text.append(f"\nThe runtime has not written for {group.age_s:.0f} s: it has died or hangs.", "red")
    return text


_LEFT: Final[Mapping[str, dict[str, Any]]] = {
    "SCRIPT": {"max_width": 13, "overflow": "ellipsis"},
    "STATE": {},
    "TIME GOES TO": {"min_width": BAR_WIDTH},
    "USE": {},
}
"""The columns whose content stands at the left, with their settings."""


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=False)
    for name in columns:
        table.add_column(name, no_wrap=True, **_LEFT.get(name, {"justify": "right"}))
    return table


def _cells(member: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    speed, predicted, promised = (_figure(member, key) for key in ("speed", "predicted_speed", "promised_speed"))
    rate, broken = _figure(member, "iterations_per_s"), bool(member.get("promise_broken"))
    off = speed is not None and bool(predicted) and abs(speed / (predicted or 1.0) - 1) > DIFFERS_BY
    estimated = "~" if speed is not None and member.get("solo_iteration_s") is None else ""
    shown = "-" if speed is None else f"{estimated}{speed:.2f}"
    return (
        cell(PurePath(_text(member, "script")).name),
        _state(member),
        _text(member, "iterations"),
        "-" if rate is None else f"{rate:.3g}",
        _stage_bar(_part(member, "share")),
        Text(f"{shown}{'!' if off else ' '}", style="bold red" if off else ""),
        "-" if predicted is None else f"{predicted:.2f}",
        Text(f"{f'{promised:.2f}' if promised else '-'}{'!' if broken else ' '}", style="bold red" if broken else ""),
    )


def _state(member: Mapping[str, Any]) -> str:
    if member.get("paused"):
        return "paused"
    if member.get("state") == "running" and member.get("isolation") == "process":
        return "process"
    if member.get("state") == "ended" and member.get("exit_code") is not None:
        return f"exit {_text(member, 'exit_code')}"
    return _text(member, "state")


def _use_table(status: Mapping[str, Any]) -> list[RenderableType]:
    """Return a table of what members, node and GPUs use, or nothing if the pilot job has not written it."""
    use = _part(status, "use")
    node = _part(use, "node")
    if not node:
        return []
    table = _table("USE", "CPU", "MEM GIB", "DISK MIB/S", "NET MIB/S", "GPU", "GPU GIB")
    for name in status["members"]:
        job = _part(_part(use, "jobs"), name)
        table.add_row(cell(name), *_host_cells(job), _share(job, "gpu_utilization"), _number(job, "gpu_mem_gib"))
    gpus = list(_parts(node, "gpus").items())
    gpu = gpus[0][1] if len(gpus) == 1 else {}
    cores, *rest = _host_cells(node)
    cores += f"/{count}" if (count := _figure(node, "cpu_count")) else ""
    table.add_row("node", cores, *rest, _share(gpu, "utilization"), _number(gpu, "mem_gib"))
    for name, gpu in gpus if len(gpus) > 1 else ():
        table.add_row(cell(f"gpu {name[:80]}"), *[""] * 4, _share(gpu, "utilization"), _number(gpu, "mem_gib"))
    return [table]


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a part of a status, {} for a malformed one, so that it hides none of the others."""
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


def _parts(whole: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the parts of a part, by their names, as many as a table may have."""
    parts = list(_part(whole, key).items())[:MOST_ROWS]
    return {name[:_LONGEST_TEXT]: part for name, part in parts if isinstance(part, dict)}


def _text(whole: Mapping[str, Any], key: str) -> str:
    text = whole.get(key)
    return str(text)[:_LONGEST_TEXT] if text != "" and isinstance(text, str | int) else "-"


def _figure(whole: Mapping[str, Any], key: str) -> float | None:
    figure: Any = whole.get(key)
    return figure if type(figure) in {int, float} and 0 <= figure <= _MOST else None


def _host_cells(usage: Mapping[str, Any]) -> list[str]:
    """Return CPU, memory, disk and network; the network is not counted by process."""
    return [_number(usage, key) for key in ("cpu_cores", "mem_gib", "disk_mib_per_s", "network_mib_per_s")]


def _number(usage: Mapping[str, Any], key: str) -> str:
    value = _figure(usage, key)
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _share(usage: Mapping[str, Any], key: str) -> str:
    value = _figure(usage, key)
    return "-" if value is None else f"{value:.0%}"
