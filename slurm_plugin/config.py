"""The configuration file: typed, validated, every key documented where it is defined."""

import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from muri.errors import UsageError
from muri.foreign_yaml import yaml_of
from muri.profiler.dryrun.messages import DEFAULT_ITERATIONS, DEFAULT_STEADY_S, LEAST_CONFIDENCE, Limits
from muri.slurm_plugin.private_files import why_unsafe
from muri.slurm_plugin.renamed import OLD_KEYS
from muri.text import nearest

DEFAULT_PATH = Path("/etc/muri/muri.yaml")


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
    ordering: Literal["best", "worst"] = Field("best", description="Stage ordering within a group (Eq. 3).")
    method: Literal["default", "rounds", "optimal"] = Field(
        "default",
        description="rounds: Algorithm 1; optimal: groups are chosen all at once; default: what the policy prefers.",
    )
    matching: Literal["certified", "rustworkx", "networkx", "priority-order"] = Field(
        "certified", description="How rounds find partners; networkx is the slow, readable reference."
    )
    objective: Literal["default", "efficiency", "throughput", "jct"] = Field(
        "default", description="What groups are chosen for: use of resources, work done, or short completion times."
    )
    speed_model: Literal["default", "lockstep", "fair"] = Field(
        "default", description="How members are expected to slow each other down; see also discipline."
    )
    min_speedup: float = Field(
        1.0, ge=1, le=4, description="A group must do this many times the work of its faster half alone."
    )
    min_speed: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Promise: beside others no job gets on slower than this, 1 being its speed alone; 0: none. A job's "
        "own --muri=min-speed counts where it is more.",
    )
    discipline: Literal["auto", "fair", "lockstep"] = Field(
        "auto", description="How members take turns at a resource; auto measures and takes the better."
    )
    isolation: Literal["process", "auto"] = Field(
        "process",
        description="process: each member has its own; auto: members whose model's runs showed no danger share one.",
    )
    join: bool = Field(
        True,
        description="Whether waiting jobs may join what runs; every job that may share then starts behind a pilot job "
        "(not with lockstep).",
    )
    joinable_share: float = Field(
        1.0,
        gt=0,
        description="How much of its node's CPUs and memory a job alone may hold, so that others can join it: "
        "1 is the part of its GPUs.",
    )
    pilot_qos: str = Field(
        "",
        description="QOS of pilot jobs, so that they do not count in the limits on jobs of users' QOS; empty: that of "
        "their members.",
    )
    wait_for_profiles_s: float = Field(
        60.0, ge=0, description="How long after its submission a job may wait for the dry runs of others."
    )
    max_wait_s: float = Field(
        86400.0, gt=0, description="A job held longer than this is released to Slurm's own queue, alone."
    )


class Preemption(Section):
    """Stopping running jobs for others; only jobs that have a checkpoint and say so."""

    enabled: bool = Field(False, description="Whether running jobs compete with waiting ones.")
    least_run_s: float = Field(600.0, ge=0, description="A job runs at least this long before it may be stopped.")
    restart_s: float = Field(60.0, ge=0, description="Estimated time that a stop and a new start cost a job.")


class Allocation(Section):
    """CPUs and memory that the policy synergy gives to jobs."""

    cpus: Literal["both", "raise-only", "off"] = Field(
        "both",
        description="both: a job gets the CPUs that the policy plans, fewer than it asked for only where "
        "`muri profile run --sweep` has measured its model; raise-only: never fewer; off: what it asked for.",
    )
    memory: Literal["raise-only", "off"] = Field(
        "raise-only",
        description="raise-only: a job gets the memory planned, never less than it asked for; off: what it asked for.",
    )


class Synergy(Section):
    """The policy synergy."""

    mechanism: Literal["tune", "proportional", "greedy"] = Field(
        "tune",
        description="tune: CPUs and memory by demand; proportional: by GPUs; greedy: all a job asks for, or it waits.",
    )
    order: Literal["fifo", "srtf", "las", "ftf"] = Field(
        "fifo", description="By submit time, remaining time, attained time or finish-time fairness."
    )


class Tiresias(Section):
    """The policies tiresias and tiresias-gittins."""

    queue_limits_gpu_s: tuple[float, ...] = Field(
        (3250.0, 7200.0), description="Attained GPU-seconds at which a job leaves the first queue, the second, ..."
    )
    promote_after: float = Field(
        8.0, gt=0, description="A job that waits this many times its attained time returns to the first queue."
    )
    service_history_gpu_s: tuple[float, ...] = Field(
        (),
        description="What past jobs needed in total, for tiresias-gittins; empty: each queue has the order of 2d-las.",
    )


class Horus(Section):
    """The policies horus and horus-f."""

    memory_weight: float = Field(0.5, ge=0, description="Cost of a GPU whose memory is full.")
    slowdown_weight: float = Field(0.5, ge=0, description="Cost of a slow-down by a factor of one.")
    jobs_per_round: int = Field(32, ge=1, description="How many waiting jobs of a partition a cycle tries to place.")
    queues: int = Field(3, ge=1, description="In how many queues of like jobs a partition's jobs wait under horus-f.")


class Profiling(Section):
    """How models without a profile are measured."""

    mode: Literal["in-place", "dry-run"] = Field(
        "in-place",
        description="in-place: jobs start at once, planned with an estimate, and are measured while they train; dry "
        "runs only where partition names spare nodes for them. dry-run: the first job of a model waits for a dry run.",
    )
    iterations: int = Field(
        DEFAULT_ITERATIONS, ge=3, description="Most iterations that a dry run measures, warm-up not counted."
    )
    warmup: Literal["auto"] | NonNegativeInt = Field(
        "auto",
        description="auto: skip iterations until their times settle, and stop once the means are certain; "
        "a number: skip that many iterations and measure all others.",
    )
    steady_s: float = Field(
        DEFAULT_STEADY_S, gt=0, description="Most seconds that a dry run measures, warm-up not counted."
    )
    at_once: int = Field(
        2, ge=0, description="Most dry runs at the same time; 0: none, so that mode: dry-run measures nothing."
    )
    time_limit_s: int = Field(300, ge=60, description="A dry run longer than this has failed.")
    partition: str = Field(
        "", description="Partition for dry runs; empty: the job's own, and none with mode: in-place."
    )
    attempts: int = Field(2, ge=1, description="Dry runs of a model that may fail before its jobs run alone.")
    retry_after_s: float = Field(
        86400.0, ge=0, description="A model whose dry runs failed is tried again after this time."
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="A dry run that has not started by then is cancelled; its user's next one goes behind others'.",
    )
    least_confidence: float = Field(
        LEAST_CONFIDENCE,
        ge=0,
        le=1,
        description="A measurement that is less certain plans as unknown, unless real runs confirm it.",
    )
    use_estimates: bool = Field(
        True,
        description="Plan with estimates from other GPU counts, or the model's graph, until the model is measured.",
    )

    @model_validator(mode="after")
    def _leaves_time_to_start(self) -> Self:
        if self.steady_s >= self.time_limit_s:
            raise ValueError(
                f"steady_s ({self.steady_s:g}) must be below time_limit_s ({self.time_limit_s}), which counts the start"
                " of the script too"
            )
        return self

    @property
    def in_place(self) -> bool:
        """Whether jobs are measured while they train, and nobody waits for a dry run."""
        return self.mode == "in-place"

    @property
    def starts_dry_runs(self) -> bool:
        """Whether the controller starts dry runs by itself."""
        return not self.in_place or bool(self.partition)

    @property
    def limits(self) -> Limits:
        """What a dry run may take."""
        fixed_warmup = None if self.warmup == "auto" else self.warmup
        return Limits(self.iterations, self.steady_s, fixed_warmup, self.time_limit_s)


class Profiles(Section):
    """The store of stage profiles, and when a profile is measured again."""

    drift_limit: float = Field(
        0.2, ge=0, description="A stage time that differs by more than this share is drift; 0 turns the watch off."
    )
    drift_after_s: float = Field(
        1800.0, gt=0, description="How long the difference must last before the model is measured again."
    )
    drift_again_s: float = Field(
        21600.0,
        ge=0,
        description="Least time between two drift marks of one model, in case a new measurement does not help.",
    )
    journal: Literal["auto", "delete"] = Field(
        "auto", description="delete: no write-ahead log; auto chooses this on network file systems."
    )


class Pilot(Section):
    """The pilot job, which holds a group's GPUs."""

    start_timeout_s: float = Field(
        180.0, gt=0, description="A pilot job that has not started by then is cancelled, and its members are regrouped."
    )
    attach_timeout_s: float = Field(
        300.0, gt=0, description="A pilot job gives its GPUs back when no member has attached by then."
    )
    telemetry_s: float = Field(
        300.0,
        gt=0,
        description="How often the pilot job reports its members' speeds to Slurm; of new members, and of changes by "
        "more than a fifth, within a minute.",
    )
    poll_s: float = Field(
        30.0, gt=0, description="The longest pause between two questions whether idle members are still queued."
    )
    hang_timeout_s: float = Field(
        900.0,
        ge=0,
        description="A script or runtime that hangs for this long is ended, and the cause is reported; 0: never.",
    )
    trace: bool = Field(
        False, description="Keep a trace of every stage beside the pilot job's log, in the run directory."
    )


class Events(Section):
    """Cycles between those of the timer, within seconds of an arrival, an end or a measurement."""

    enabled: bool = Field(
        True,
        description="Whether `muri-controller --events`, and --interval, run cycles on events; else only a timer does.",
    )
    gather_s: float = Field(1.0, ge=0, description="Events of this time share a cycle.")
    least_gap_s: float = Field(5.0, gt=0, description="Least time between the end of a cycle and one on an event.")
    most_share: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Most share of the time that cycles on events take; after a long one the gap grows.",
    )
    ends_poll_s: float = Field(
        5.0,
        ge=0,
        description="How often slurmctld is asked, while jobs wait, whether any have ended or been measured; 0: never.",
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
    gateway: Literal["auto", "pyslurm", "command"] = Field(
        "auto", description="How Muri talks to Slurm; auto: pyslurm where it works, else commands."
    )
    interval_s: float = Field(360.0, gt=0, description="Time between two cycles; `muri doctor` warns of missed cycles.")
    events: Events = Field(
        default_factory=Events,
        description="Cycles within seconds of an arrival, an end or a measurement, between those of the timer.",
    )
    gate: Literal["licence", "hold"] = Field(
        "licence",
        description="What keeps jobs until Muri starts them: the licence muri_gate of slurm.conf, or a hold (then "
        'muri.gate is "hold" in job_submit.lua, too).',
    )
    lease_s: float = Field(
        1200.0,
        ge=30,
        description="If no cycle follows for this long, Slurm starts every waiting job by itself (gate: licence).",
    )
    gate_watch_s: float = Field(
        60.0,
        ge=0,
        description="How long the controller stays after a cycle, until the members of new groups have started, to put "
        "them behind the gate again.",
    )
    cycle_limit_s: float = Field(
        300.0,
        gt=0,
        description="Repairs, and then starts, that take longer than half of this leave the rest to the next cycle.",
    )
    cycle_calls: int = Field(
        2000,
        ge=2,
        description="Repairs, and then starts, that take more than half as many calls to Slurm do the same.",
    )
    slurm_backlog: int = Field(
        1000,
        ge=1,
        description="Of the jobs that Slurm alone decides about, each partition gets one for each idle CPU and so many "
        "more at once, the highest priority first; at least bf_max_job_test of slurm.conf.",
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
        description="Memory of one GPU by GRES type, as {a100: 80, gpu: 24}; a type that is missing admits any group.",
    )
    grouping: Grouping = Field(default_factory=Grouping, description="Who may share GPUs.")
    preemption: Preemption = Field(default_factory=Preemption, description="Stopping running jobs for others.")
    allocation: Allocation = Field(
        default_factory=Allocation, description="CPUs and memory, where the policy plans them."
    )
    synergy: Synergy = Field(default_factory=Synergy, description="Options of synergy only.")
    tiresias: Tiresias = Field(default_factory=Tiresias, description="Options of tiresias and tiresias-gittins only.")
    horus: Horus = Field(default_factory=Horus, description="Options of horus and horus-f only.")
    profiling: Profiling = Field(default_factory=Profiling, description="How models without a profile are measured.")
    profiles: Profiles = Field(
        default_factory=Profiles, description="The store of profiles, and when one is measured again."
    )
    pilot: Pilot = Field(default_factory=Pilot, description="The pilot job, which holds a group's GPUs.")


def config_path(explicit: Path | None = None) -> Path | None:
    """Return the file to read: the given one, $MURI_CONFIG, or /etc/muri/muri.yaml when it exists."""
    if explicit is not None:
        return explicit
    if os.environ.get("MURI_CONFIG"):
        return Path(os.environ["MURI_CONFIG"])
    try:
        return DEFAULT_PATH if DEFAULT_PATH.exists() else None
    except PermissionError:  # its directory is closed; reading it says so
        return DEFAULT_PATH


def load_config(path: Path | None) -> Config:
    """Read and validate a configuration file; the defaults when `path` is None.

    Raises:
        ConfigError: The file cannot be read, is no YAML mapping, or a key or value is wrong.
    """
    if path is None:
        return Config()
    values = _document(path)
    try:
        _use_new_names(values)
        return Config.model_validate(values)
    except ValidationError as error:
        # Of a key that takes one of several kinds of values pydantic tells each kind.
        raise problems_of(path, dict.fromkeys(_explain(dict(problem)) for problem in error.errors())) from error
    except ValueError as error:
        raise problems_of(path, [str(error)]) from error


def old_keys_in(path: Path | None) -> Mapping[str, str]:
    """Return the keys of a configuration file that have another name now, with that name.

    Raises:
        ConfigError: The file cannot be read, or is no YAML mapping.
    """
    return {} if path is None else _use_new_names(_document(path))


def _document(path: Path) -> dict[str, Any]:
    """Return the keys and values of a configuration file.

    Raises:
        ConfigError: The file cannot be read, or is no YAML mapping.
    """
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


def _use_new_names(values: dict[str, Any]) -> Mapping[str, str]:
    """Replace old names of keys; returns those that were found, with their new names.

    Raises:
        ValueError: A key stands there under both names.
    """
    found = {}
    for old, new in OLD_KEYS.items():
        section, _, key = old.partition(".")
        if not isinstance(values.get(section), dict) or key not in values[section]:
            continue
        new_section, _, new_key = new.partition(".")
        place = values.setdefault(new_section, {})
        if isinstance(place, dict):  # else the file's reader says what is wrong there
            if new_key in place:
                raise ValueError(f"{old}: is called {new} now, which is there, too")
            place[new_key] = values[section].pop(key)
            found[old] = new
        if not values[section]:
            del values[section]
    return found


def problems_of(path: Path | None, problems: Collection[str]) -> ConfigError:
    """Return the error that tells all problems of a configuration file."""
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{path or 'the built-in configuration'} has {len(problems)} problem(s):\n{lines}")


def state_dir_of_refused(path: Path | None) -> Path | None:
    """Find the state_dir in a configuration that is refused for another reason: there a drain looks for the controller.

    Returns:
        None where it names none, cannot be read, or others could have written it.
    """
    try:
        require_trusted(path)
        text = "" if path is None else path.read_text(errors="replace")
    except (ConfigError, OSError):
        return None
    found = re.search(r"""^state_dir:\s*["']?(/[^"'#\n]*)""", text, re.MULTILINE)
    return None if found is None else Path(found[1].strip())


def require_trusted(path: Path | None) -> None:
    """Refuse a configuration that somebody else than root and this process's user could have written.

    Raises:
        ConfigError: Its owner or mode, or those of a directory above it, let others change it.
    """
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

_EITHER: Final[Any] = Literal["auto"] | NonNegativeInt

_KINDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    tuple[str, ...]: "a list such as [gpu]",
    tuple[float, ...]: "a list of numbers such as [3250, 7200]",
    dict[str, PositiveFloat]: "types and numbers such as {a100: 80}",
    _EITHER: "auto or a whole number from 0 on",
}
"""How the file names what a key takes, by the annotation of the key."""


def _field_at(location: tuple[Any, ...]) -> tuple[type[Section], str, FieldInfo | None]:
    """Return the innermost section on the way to a place, the name of what lies on the way there, and its field."""
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
    """Say what is wrong in words of the file."""
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
    if bounds and field.annotation != _EITHER:
        return f"{name}: must be {bounds[0]} {found}"
    if problem["type"] == "string_pattern_mismatch":
        return f"{name}: must be what its comment says: {field.description} {found}"
    return f"{name}: {_wanted(name, field, problem['input'])} {found}"


def _wanted(name: str, field: FieldInfo, value: Any) -> str:
    """Say what a key takes."""
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


def render_config(config: Config, *, comments: bool = True) -> str:
    """Write a configuration as YAML, each key under its description."""
    return "\n".join(_render_section(config, "", comments=comments)) + "\n"


def _render_section(section: Section, indent: str, *, comments: bool) -> list[str]:
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if comments:
            lines.append(f"{indent}# {field.description}")
        if isinstance(value, Section):
            lines.append(f"{indent}{name}:")
            lines += _render_section(value, indent + "  ", comments=comments)
        else:
            plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n...\n").strip()
            lines.append(f"{indent}{name}: {text}")
    return lines
