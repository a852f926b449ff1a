"""The configuration file: typed, validated, every key documented where it is defined."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
)
from pydantic.fields import FieldInfo

from muri.errors import UsageError
from muri.profiler.dryrun.messages import DEFAULT_STEADY_S, Limits
from muri.slurm_plugin.private_files import why_unsafe
from muri.slurm_plugin.renamed import FIXED_KEYS, GONE_KEYS, OLD_GATE, OLD_KEYS, POLICY_KEYS
from muri.text import nearest, yaml_of

DEFAULT_PATH: Final = Path("/etc/muri/muri.yaml")


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the controller. They have no key in muri.yaml; tests and the twin shorten them."""

    # How long the controller stays after a cycle, until the members of new groups have started, to put them behind the
    # gate again. Slurm starts a job within seconds of its release, or not before it plans anew
    gate_watch_s: float = 60.0
    # Repairs, and then starts, that take longer than half of this leave the rest to the next cycle: the lease has to be
    # extended, and events to be served
    cycle_limit_s: float = 300.0
    # Repairs, and then starts, that take more than half as many calls to Slurm do the same: slurmctld has other users
    cycle_calls: int = 2000
    # A pilot that has not started by then is canceled, and its members are grouped anew. Its GPUs were free when it was
    # submitted, so something else has taken them
    pilot_start_timeout_s: float = 180.0
    # A pilot gives its GPUs back when no member has attached by then. Members start after it, at the pace of Slurm's
    # scheduler
    attach_timeout_s: float = 300.0
    # How often a pilot reports its members' speeds to Slurm; of new members, and of changes by more than a fifth,
    # within a minute. Each report is a call to slurmctld
    telemetry_s: float = 300.0
    poll_s: float = 30.0  # The longest pause between two questions whether idle members are still queued
    wait_for_profiles_s: float = 60.0  # How long after its submission a job may wait for the dry runs of others
    # A dry run that has not started by then is canceled; its user's next one goes behind others'
    dry_run_start_timeout_s: float = 600.0
    least_confidence: float = 0.1  # A measurement that is less certain plans as unknown, unless real runs confirm it
    drift_limit: float = 0.2  # A stage time that differs by more than this share is drift; 0 turns the watch off
    drift_after_s: float = 1800.0  # How long the difference must last before the model is measured again
    # Least time between two drift marks of one model, in case a new measurement does not help
    drift_again_s: float = 21600.0
    restart_s: float = 60.0  # Estimated time that a stop and a new start cost a job


TUNING: Final = Tuning()


class ConfigError(UsageError):
    """The configuration file cannot be read or holds a wrong value."""


class Section(BaseModel):
    """A part of the configuration that knows all its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Grouping(Section):
    """Who may share GPUs."""

    max_group_size: int = Field(4, ge=1, le=4, description="Most jobs that share the same GPUs; 1 turns sharing off.")
    max_gpus_per_job: int = Field(
        4, ge=1, description="Jobs that ask for more GPUs than this, on one node or several, run alone."
    )
    min_speed: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Minimum speed of a job in a group, 1 being its speed alone; 0 turns the limit off. A job's own "
        "--muri=min-speed wins where it is higher.",
    )
    discipline: Literal["auto", "fair", "lockstep"] = Field(
        "auto", description="How members take turns at a resource; auto measures and takes the better."
    )
    isolation: Literal["process", "auto"] = Field(
        "process",
        description="process: each member has its own process; auto: members share one where runs of their models "
        "showed no danger.",
    )
    join: bool = Field(
        True,
        description="Whether waiting jobs may join running ones. Every job that may share then starts behind a pilot "
        "job (not with lockstep).",
    )
    max_wait_s: float = Field(
        86400.0,
        gt=0,
        description="A job that Muri has kept waiting for longer is released to Slurm's own queue, alone.",
    )


class Preemption(Section):
    """Stopping running jobs for others; only jobs that have a checkpoint and say so."""

    enabled: bool = Field(False, description="Whether running jobs compete with waiting ones.")
    least_run_s: float = Field(600.0, ge=0, description="A job runs at least this long before it may be stopped.")


class Allocation(Section):
    """CPUs and memory that the policy synergy gives to jobs."""

    cpus: Literal["both", "raise-only", "off"] = Field(
        "both",
        description="both: a job gets the CPUs that the policy plans, fewer than it asked for only where "
        "`muri profile run --sweep` has measured its model; raise-only: never fewer; off: the CPUs that it asked for.",
    )
    memory: Literal["raise-only", "off"] = Field(
        "raise-only",
        description="raise-only: a job gets the planned memory, never less than it asked for; off: its own request.",
    )


class Profiling(Section):
    """How models without a profile are measured."""

    mode: Literal["in-place", "dry-run"] = Field(
        "in-place",
        description="in-place: jobs start at once, planned with an estimate, and are measured while they train; dry "
        "runs take place only on the nodes of `partition`. dry-run: the first job of a model waits for a dry run.",
    )
    at_once: int = Field(
        2, ge=0, description="Most dry runs at the same time; 0: none, so that mode: dry-run measures nothing."
    )
    time_limit_s: int = Field(
        300,
        gt=DEFAULT_STEADY_S,
        description="A dry run longer than this has failed: its script's start and warm-up, and a minute of measuring.",
    )
    partition: str = Field(
        "", description="Partition for dry runs; empty: the job's own, and none with mode: in-place."
    )

    @property
    def in_place(self) -> bool:
        """Whether jobs are measured while they train, without waiting for a dry run."""
        return self.mode == "in-place"

    @property
    def starts_dry_runs(self) -> bool:
        """Whether the controller starts dry runs by itself."""
        return not self.in_place or bool(self.partition)

    @property
    def limits(self) -> Limits:
        """Limits of a dry run."""
        return Limits(time_limit_s=self.time_limit_s)


class Pilot(Section):
    """The pilot job, which holds a group's GPUs."""

    qos: str = Field(
        "",
        description="QOS of pilot jobs, so that they do not count in the limits on jobs of users' QOS; empty: the "
        "QOS of their members.",
    )
    hang_timeout_s: float = Field(
        900.0,
        ge=0,
        description="A script or runtime that hangs for this long is ended, and the cause is reported; 0: never.",
    )
    trace: bool = Field(
        False, description="Write a trace of every stage beside the pilot job's log, in the run directory."
    )


class Events(Section):
    """Cycles between those of the timer, within seconds of an arrival, an end or a measurement."""

    enabled: bool = Field(
        True,
        description="Whether `muri-controller --events`, and --interval, run cycles on events; else only a timer does.",
    )
    notice_file: Path = Field(
        Path("/run/muri/notice"),
        description="File to which job_submit gives notice of jobs, on slurmctld's machine (as muri.notice in "
        "job_submit.lua).",
    )


class Config(Section):
    """Everything an administrator can set."""

    policy: str = Field(
        "auto",
        description="Decides which jobs start first, which share GPUs, and which CPUs and memory they get; "
        "`muri policies` lists all policies. auto follows Slurm's priorities (muri-slurm) where PriorityType is "
        "priority/multifactor.",
    )
    policy_options: dict[str, Any] = Field(
        {},
        description="Options of the policy that have no key of their own, such as {matching: networkx}; see "
        "docs/policies.md.",
    )
    gateway: Literal["auto", "pyslurm", "command"] = Field(
        "auto", description="How Muri talks to Slurm; auto: pyslurm where it works, else commands."
    )
    interval_s: float = Field(360.0, gt=0, description="Time between two cycles; `muri doctor` warns of missed cycles.")
    events: Events = Field(
        default_factory=Events,
        description="Cycles within seconds of an arrival, an end or a measurement, between those of the timer.",
    )
    gate: Literal["license", "hold"] = Field(
        "license",
        description="Keeps jobs waiting until Muri starts them: the license muri_gate of slurm.conf, or a hold (then "
        'set muri.gate to "hold" in job_submit.lua, too).',
    )
    lease_s: float = Field(
        1200.0,
        ge=30,
        description="If no cycle follows for this long, Slurm starts all waiting jobs by itself (gate: license).",
    )
    slurm_backlog: int = Field(
        1000,
        ge=1,
        description="Ungrouped jobs that Muri releases to Slurm per partition, beyond one for each idle CPU, the "
        "highest priority first; at least bf_max_job_test of slurm.conf.",
    )
    state_dir: Path = Field(
        Path("/var/lib/muri"),
        description="Directory of the journal, the profile store and the status file, for the controller's user alone.",
    )
    status_dir: Path = Field(
        Path("/run/muri/status"),
        description="Directory, made by the controller, where each user finds what was decided about their own jobs.",
    )
    metrics_file: str = Field(
        "",
        pattern=r"^(/[^\n]+\.prom)?$",
        description="Metrics for node_exporter's textfile collector, written after each cycle, such as "
        "/var/lib/prometheus/node-exporter/muri.prom; empty: none.",
    )
    metrics_listen: str = Field(
        "",
        pattern=r"^([^:\s]+:[0-9]{1,5})?$",
        description="Address at which `muri-controller --interval` serves the metrics, such as 127.0.0.1:9810; "
        "empty: none.",
    )
    partitions: tuple[str, ...] = Field((), description="Partitions that Muri serves; empty: all.")
    node_python: str = Field(sys.executable, description="Python on the compute nodes, with muri and torch installed.")
    gpu_mem_gib: dict[str, PositiveFloat] = Field(
        {},
        description="Memory of one GPU by GRES type, as {a100: 80, gpu: 24}; a type that is not listed has no limit.",
    )
    grouping: Grouping = Field(default_factory=Grouping, description="Who may share GPUs.")
    preemption: Preemption = Field(default_factory=Preemption, description="Stopping running jobs for others.")
    allocation: Allocation = Field(
        default_factory=Allocation, description="CPUs and memory, where the policy plans them."
    )
    profiling: Profiling = Field(default_factory=Profiling, description="How models without a profile are measured.")
    pilot: Pilot = Field(default_factory=Pilot, description="The pilot job, which holds a group's GPUs.")

    _tuning: Tuning = PrivateAttr(default_factory=lambda: TUNING)

    @property
    def tuning(self) -> Tuning:
        """The constants that have no key."""
        return self._tuning

    def tuned(self, **changes: Any) -> Self:
        """Return the same configuration on other constants."""
        copy = self.model_copy()
        copy._tuning = replace(self._tuning, **changes)
        return copy


def config_path(explicit: Path | None = None) -> Path | None:
    """Return the file to read: the given one, $MURI_CONFIG, or /etc/muri/muri.yaml if it exists."""
    if explicit is not None:
        return explicit
    if os.environ.get("MURI_CONFIG"):
        return Path(os.environ["MURI_CONFIG"])
    try:
        return DEFAULT_PATH if DEFAULT_PATH.exists() else None
    except PermissionError:  # its directory is closed; reading it says so
        return DEFAULT_PATH


def load_config(path: Path | None) -> Config:
    """Read and validate a configuration file, the defaults for None; a ConfigError lists all mistakes in it."""
    if path is None:
        return Config()
    values = _document(path)
    wrong, _ = _bring_up_to_date(values)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise problems_of(path, (*wrong, *(_explain(dict(problem)) for problem in error.errors()))) from error
    if wrong:
        raise problems_of(path, wrong)
    return config


def notes_on(path: Path | None) -> tuple[str, ...]:
    """Return advice on keys of 0.2 in a valid configuration file; a ConfigError where it cannot be read."""
    return () if path is None else _bring_up_to_date(_document(path))[1]


def _document(path: Path) -> dict[str, Any]:
    """Return the keys and values of a configuration file; a ConfigError where it cannot be read."""
    try:
        loaded = yaml_of(path.read_text(), str(path))
    except PermissionError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}. It holds no secrets: let users read it "
            f"(chmod a+rX {path.parent} {path}), or name another one with --config or MURI_CONFIG"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected keys and values, found a {type(loaded).__name__}")
    return loaded or {}


def _bring_up_to_date(values: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give keys of 0.2 their new names, and take out those that 0.3 does not have; return mistakes and advice.

    A file that lists all keys of 0.2 as they were shipped has no mistakes.
    """
    wrong, notes = [], []
    removed = {key: (f"it is always {value}", value) for key, value in FIXED_KEYS.items()}
    removed |= {key: (f"it is policy_options.{option} now", value) for key, (option, value) in POLICY_KEYS.items()}
    for key, (instead, value) in removed.items():
        if (own := _taken_out(values, key)) is _ABSENT:
            continue
        text = f"{key}: removed in 0.3: {instead}"
        if own == value:
            notes.append(f"{text}, and the file says nothing else; take it out")
        else:
            wrong.append(f"{text} (found {own!r})")
    gone = [key for key in GONE_KEYS if _taken_out(values, key) is not _ABSENT]
    notes += [f"{key}: removed in 0.3: {GONE_KEYS[key]}; take it out" for key in gone]
    for key, new in OLD_KEYS.items():
        if (own := _taken_out(values, key)) is _ABSENT:
            continue
        section, _, name = new.partition(".")
        target = values.setdefault(section, {})
        if isinstance(target, dict) and name in target:
            wrong.append(f"{key}: it is called {new} now, which is there, too")
        elif isinstance(target, dict):
            target[name] = own
        notes.append(f"{key}: it is called {new} now; Muri 0.4 will refuse the old name")
    notes += _respelled(values)
    for section in {key.partition(".")[0] for key in (*removed, *GONE_KEYS, *OLD_KEYS)} - Config.model_fields.keys():
        if values.get(section) == {}:
            del values[section]
    return tuple(wrong), tuple(notes)


def _respelled(values: dict[str, Any]) -> Iterator[str]:
    if values.get("gate") == OLD_GATE:
        values["gate"] = "license"
        yield f"gate: {OLD_GATE} is spelled license now; Muri 0.4 will refuse the old word"


_ABSENT: Final = object()


def _taken_out(values: dict[str, Any], key: str) -> Any:
    """Remove a key; returns its value, or `_ABSENT`."""
    section, _, name = key.rpartition(".")
    place = values.get(section) if section else values
    return place.pop(name, _ABSENT) if isinstance(place, dict) else _ABSENT


def problems_of(path: Path | None, problems: Collection[str]) -> ConfigError:
    """Return the error that lists all problems of a configuration file."""
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{path or 'the built-in configuration'} has {len(problems)} problem(s):\n{lines}")


def state_dir_of_refused(path: Path | None) -> Path | None:
    """Return the state_dir in a refused configuration, where a drain looks for the controller's lock.

    None where the file names none, cannot be read, or others could have written it.
    """
    try:
        require_trusted(path)
        text = "" if path is None else path.read_text(errors="replace")
    except (ConfigError, OSError):
        return None
    line = re.search(r"""^state_dir:\s*["']?(/[^"'#\n]*)""", text, re.MULTILINE)
    return None if line is None else Path(line[1].strip())


def require_trusted(path: Path | None) -> None:
    """Raise a ConfigError for a configuration that other users than root and this process's could have written."""
    if path is None:
        return
    try:
        reason = why_unsafe(path)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    if reason is not None:
        raise ConfigError(
            f"the configuration {path} is not safe to obey: {reason}. It and its directories must belong to root or "
            "to the controller's user, and only they may write there"
        )


_BOUNDS: Final = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}

_UNITS_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

_KINDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    tuple[str, ...]: "a list such as [gpu]",
    dict[str, PositiveFloat]: "types and numbers such as {a100: 80}",
    dict[str, Any]: "options and values such as {matching: networkx}",
}
"""Descriptions of a key's values, by its annotation."""


def _field_at(location: tuple[Any, ...]) -> tuple[type[Section], str, FieldInfo | None]:
    """Return the innermost section on the way to a place, the dotted name of its key, and the key's field."""
    section: type[Section] = Config
    inner: Any = Config
    names: list[str] = []
    field = None
    for part in location:
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            break
        section, field = inner, inner.model_fields.get(str(part))
        names.append(str(part))
        inner = None if field is None else field.annotation
    return section, ".".join(names), field


def _explain(problem: dict[str, Any]) -> str:
    """Describe a validation error in the file's terms."""
    section, name, field = _field_at(problem["loc"])
    found = f"(found {problem['input']!r})"
    if problem["type"] == "extra_forbidden" or field is None:
        valid = list(section.model_fields)
        near = nearest(str(problem["loc"][-1]), valid)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"{name}: unknown key; {hint}valid keys here: {', '.join(valid)}"
    if problem["type"] == "value_error":
        return f"{name}: {problem['ctx']['error']}"
    context = problem.get("ctx", {})
    bounds = [f"{word} {context[key]:g}" for key, word in _BOUNDS.items() if key in context]
    if bounds:
        return f"{name}: must be {bounds[0]} {found}"
    if problem["type"] == "string_pattern_mismatch":
        return f"{name}: must be as its comment says: {field.description} {found}"
    return f"{name}: {_wanted(name, field, problem['input'])} {found}"


def _wanted(name: str, field: FieldInfo, value: Any) -> str:
    """Describe the values of a key."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Section):
        first, inner = next(iter(kind.model_fields.items()))
        example = yaml.safe_dump(inner.default).split("\n")[0]
        return f"takes keys of its own, such as {{{first}: {example}}}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind in (int, float) and name.endswith("_s"):
        written = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", str(value))
        known = written is not None and written[2] in _UNITS_S
        example = f": {float(written[1]) * _UNITS_S[written[2]]:g}" if written is not None and known else ""
        return f"seconds, as a number{example}"
    return _KINDS[kind]


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys of muri.yaml, those of sections with dots, and their fields."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def render_config(config: Config) -> str:
    """Write a configuration as YAML, each key under its description."""
    return "\n".join(_render_section(config, "")) + "\n"


def _render_section(section: Section, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        lines.append(f"{indent}# {field.description}")
        if isinstance(value, Section):
            lines.append(f"{indent}{name}:")
            lines += _render_section(value, indent + "  ")
        else:
            plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n...\n").strip()
            lines.append(f"{indent}{name}: {text}")
    return lines
