"""The stage profile of a model: how long one iteration holds each resource, and which figures of training can be true.

Figures come from scripts, comments of users and old files. One beyond its bounds is refused where it enters, so that
nothing that computes with it overflows, divides by zero or exceeds what SQLite stores.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Final, NamedTuple

from muri.errors import UsageError


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a figure can be."""

    least: float  # The smallest value
    most: float  # The largest value
    unit: str = ""  # Unit of both, "" for plain numbers
    whole: bool = False  # Whether only whole numbers count

    def fault(self, value: object) -> str:
        """Return what is wrong with a value, such as "is -1; it must be ≥ 0 s"; "" when it can be true."""
        kind = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            found = repr(value)[:_LONGEST] if isinstance(value, (str, float)) else f"a {type(value).__name__}"
            return f"is {found}; it must be a {'whole ' if self.whole else ''}number"
        if isinstance(value, Integral) and abs(int(value)) > MOST_WHOLE:
            return f"has over 15 digits; it must be ≤ {self._text(self.most)}"
        number = float(value)
        if math.isfinite(number) and self.least <= number <= self.most:
            return ""
        return f"is {value}; it must be {self._law(number)}"

    def _law(self, number: float) -> str:
        if (self.least, self.most) == (0, 1):
            return "between 0 and 1"
        if self.most < number < math.inf:
            return f"≤ {self._text(self.most)}"
        return f"≥ {self._text(self.least)}" if self.least <= 0 or 0 < number < math.inf else f"> {self._text(0)}"

    def _text(self, value: float) -> str:
        return f"{value:g} {self.unit}".rstrip()


_LONGEST: Final = 40

MOST_WHOLE: Final = 2**53
"""Larger whole numbers lose digits as floats; SQLite stores up to 2⁶³."""

TIME_S: Final = Bounds(0, 86400, "s")
"""A part of an iteration."""

ITERATION_S: Final = Bounds(1e-9, 86400, "s")
"""A whole iteration takes some time, and at most a day."""

ITERATIONS: Final = Bounds(0, 10**12, whole=True)
BATCH_SIZE: Final = Bounds(0, MOST_WHOLE, whole=True)
GPU_COUNT: Final = Bounds(1, 10**6, whole=True)
GPU_MEM_GIB: Final = Bounds(0, 10**5, "GiB")
HOST_MEM_GIB: Final = Bounds(0, 10**6, "GiB")
GRADIENT_MIB: Final = Bounds(0, 10**8, "MiB")
CORES: Final = Bounds(0, 10**6)
CPU_COUNT: Final = Bounds(1, 10**6, whole=True)
VARIATION: Final = Bounds(0, 10**6)
"""A coefficient of variation, or a spread as a share of its mean."""

SHARE: Final = Bounds(0, 1)
RATIO: Final = Bounds(1, 10**6)
"""How many times as long something takes."""

PER_SECOND: Final = Bounds(1 / 86400, 1e9)
"""Iterations per second."""

DATASET_GIB: Final = Bounds(1e-9, 1e9, "GiB")
BATCH_MIB: Final = Bounds(1e-9, 1e9, "MiB")
BANDWIDTH_MIB_PER_S: Final = Bounds(1e-6, 1e9, "MiB/s")


def reproducible(value: float) -> float:
    """Keep 12 digits of a fitted figure, as the last ones depend on the processor's linear algebra."""
    return float(f"{value:.12g}")


STAGES: Final = ("load", "preprocess", "propagate", "synchronize")
"""The stages of one training iteration, in the order in which they happen (Muri, section 2)."""

RESOURCES: Final = ("storage", "cpu", "gpu", "network")
"""The resource that each stage of `STAGES` holds, in the same order."""

IN_PLACE: Final = "in-place"
"""The source of figures that were measured over a training job's first iterations."""

SOURCES: Final = ("dry-run", IN_PLACE, "run", "import", "edit", "scaled", "predicted", "average", "guess")
"""Measured in a dry run, over the first iterations of a job or over later ones, read from a file, typed in; estimated
from another GPU count or from the model's graph, the mean of the site's models, or a mere guess."""

DANGERS: Final[Mapping[str, str]] = {
    "accelerate": "accelerate or transformers",
    "children": "DataLoader workers or other child processes",
    "compile": "torch.compile",
    "environment": "a changed environment",
    "interpreter": "much Python code, or too short iterations to tell",
    "native": "ctypes or extension modules of its own",
    "packages": "packages of which Muri does not know that threads can share them",
    "patches": "patched functions of Python or PyTorch",
    "paths": "a changed sys.path",
    "ranks": "process groups",
    "settings": "limits, cores, priority, locale or switches of PyTorch of its own",
    "signals": "signals, their handlers or timers",
    "threads": "threads or executors of its own",
}
"""Uses by a script that threads of one process could not keep apart, found by
`muri.launcher.shared_process.danger_watch`; a newer version may know more. The names go through a job's comment, which
is short."""

DANGER_NAME: Final = re.compile("[a-z]{1,16}")
MOST_DANGERS: Final = 32

UNKNOWN_MODELS: Final = frozenset({"average", "guess"})
"""Sources that know nothing of the model itself."""

ESTIMATES: Final = frozenset({"scaled", "predicted"}) | UNKNOWN_MODELS
"""Sources that measure nothing: such a profile serves until there is a measured one."""


def dangers_text(names: Iterable[str]) -> str:
    """Return dangers as people read them."""
    return ", ".join(DANGERS.get(name, name) for name in names)


class ProfileError(UsageError):
    """A profile holds a figure that cannot be true."""


@dataclass(frozen=True, order=True)
class ProfileKey:
    """The model, size and owner that a profile is valid for."""

    model: str  # Model name as given with `--muri=model=…`, or a name derived from the job's script
    batch_size: int  # Samples per iteration and GPU; 0 when the user did not say
    gpu_count: int  # GPUs of the whole job
    gpu_type: str  # GRES type as Slurm names it, "gpu" when the cluster has no types
    user: str = ""  # Whose jobs it is valid for; "" when it is published, that is valid for all users

    def __str__(self) -> str:
        """Compact form for tables, logs and names of what is kept of it."""
        return f"{self.name} (batch {self.batch_size or '?'}, {self.gpu_count} × {self.gpu_type})"

    @property
    def name(self) -> str:
        """The model, told apart from other users' models of the same name."""
        return owned_name(self.model, self.user)

    @property
    def published(self) -> ProfileKey:
        """The key under which all users find it if an administrator has published it."""
        return ProfileKey(self.model, self.batch_size, self.gpu_count, self.gpu_type) if self.user else self

    @property
    def lookup_order(self) -> tuple[ProfileKey, ...]:
        """The keys that may speak for this one, the better first: its user's own, then the published one."""
        return (self, self.published) if self.user else (self,)

    def serves(self, user: str) -> bool:
        """Whether jobs of a user may be planned with what is known of it."""
        return self.user in ("", user)


def owned_name(model: str, user: str) -> str:
    """The name of a user's model; that of a published one (user "") is its own."""
    return f"{model} of {user}" if user else model


OLD_NAMES: Final = {"gpu_utilisation": "gpu_utilization"}
"""Names of 0.2 in stored and exported profiles, and what each is called now."""


@dataclass(frozen=True)
class ProfileDetail:
    """Figures of a measurement beside the mean stage times; None where not measured."""

    # 95th percentile of each stage's seconds per iteration, in the order of `STAGES`
    stage_p95_s: tuple[float, ...] | None = None
    stage_cv: tuple[float, ...] | None = None  # Coefficient of variation (standard deviation / mean) of each stage
    # Seconds per iteration in which each resource was used, also where another one owned the time;
    # `StageProfile.stage_s` counts only what the stage owns (Muri, section 4.2)
    busy_s: tuple[float, ...] | None = None
    iteration_p95_s: float | None = None  # 95th percentile of the iteration
    iteration_cv: float | None = None  # Coefficient of variation of the iteration
    host_mem_gib: float | None = None  # Peak host memory of all processes of the job
    cpu_cores: float | None = None  # Mean number of cores in use
    gpu_utilization: float | None = None  # Mean GPU utilization, 0 to 1
    gradient_mib: float | None = None  # Size of the gradients that the ranks exchange in an iteration
    confidence: float | None = None  # How far the means can be trusted, 0 to 1 (docs/profiles.md)
    warmup_iterations: int | None = None  # Iterations that were left out
    # What the run did that threads of one process could not keep apart, by the names in `muri.profiler.records`; ()
    # where it was looked for and nothing found
    dangers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give."""
        for name, values in self.figures():
            if len(values) != (len(STAGES) if name in PER_STAGE else 1):
                raise ProfileError(f"{name}: there must be one figure per stage, found {len(values)}")
            for value in values:
                if fault := _DETAIL_BOUNDS[name].fault(value):
                    raise ProfileError(f"{name} {fault}")
        if len(self.dangers or ()) > MOST_DANGERS:
            raise ProfileError(f"dangers: there may be {MOST_DANGERS} at most, found {len(self.dangers or ())}")
        for danger in self.dangers or ():
            if not (isinstance(danger, str) and DANGER_NAME.fullmatch(danger)):
                raise ProfileError(f"dangers: {str(danger)[:40]!r} is not the name of a danger")

    def figures(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """Names and values of what was measured."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self) if item.name != "dangers")
        return tuple(
            (name, value if isinstance(value, tuple) else (value,)) for name, value in values if value is not None
        )

    def to_dict(self) -> dict[str, Any]:
        """The measured figures, as plain JSON values."""
        figures = {name: list(value) if name in PER_STAGE else value[0] for name, value in self.figures()}
        return figures if self.dangers is None else {**figures, "dangers": list(self.dangers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProfileDetail:
        """Read what `to_dict` made; figures of a newer version are ignored (ProfileError: a figure cannot be true)."""
        values = {OLD_NAMES.get(name, name): value for name, value in values.items()}
        known: dict[str, Any] = {}
        try:
            for item in fields(cls):
                if (value := values.get(item.name)) is None:
                    continue
                if item.name in PER_STAGE or item.name == "dangers":
                    if not isinstance(value, (list, tuple)):
                        raise ProfileError(f"{item.name} must be a list, found {repr(value)[:40]}")
                    value = tuple(value)
                known[item.name] = value
            return cls(**known)
        except TypeError as error:
            raise ProfileError(f"the details of a profile must be numbers: {error}") from error


PER_STAGE: Final = frozenset({"stage_p95_s", "stage_cv", "busy_s"})
"""Details with one figure for each stage."""

_DETAIL_BOUNDS: Final[Mapping[str, Bounds]] = {
    "stage_p95_s": TIME_S,
    "stage_cv": VARIATION,
    "busy_s": TIME_S,
    "iteration_p95_s": TIME_S,
    "iteration_cv": VARIATION,
    "host_mem_gib": HOST_MEM_GIB,
    "cpu_cores": CORES,
    "gpu_utilization": SHARE,
    "gradient_mib": GRADIENT_MIB,
    "confidence": SHARE,
    "warmup_iterations": ITERATIONS,
}


@dataclass(frozen=True)
class StageProfile:
    """Mean stage times of one iteration, running alone."""

    key: ProfileKey  # What the figures are valid for
    load_s: float  # Seconds per iteration that storage owns
    preprocess_s: float  # Seconds per iteration that the CPU owns
    propagate_s: float  # Seconds per iteration that the GPU owns
    synchronize_s: float  # Seconds per iteration that the network owns
    # Wall-clock seconds of an iteration; less than the sum of the stages where the job overlaps them itself and the
    # source did not say which one owns the time
    iteration_s: float
    gpu_mem_gib: float = 0.0  # Peak GPU memory
    iterations: int = 0  # How many iterations the means are over
    measured_at: str = ""  # UTC time, ISO-8601
    source: str = "dry-run"  # How the figures came about, one of `SOURCES`
    detail: ProfileDetail = field(default_factory=ProfileDetail)  # What else was measured

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give."""
        key = (
            ("batch size", BATCH_SIZE, self.key.batch_size),
            ("number of GPUs", GPU_COUNT, self.key.gpu_count),
        )
        measured = fault_in(self.stage_s, self.iteration_s, self.gpu_mem_gib, self.iterations)
        if fault := measured or first_fault(key):
            raise ProfileError(f"profile of {self.key}: {fault}")

    @property
    def is_estimate(self) -> bool:
        """Whether nothing of it was measured under its key."""
        return self.source in ESTIMATES

    @property
    def is_unmeasured(self) -> bool:
        """Whether the model was never measured, on any number of GPUs: how it shares is a guess."""
        return self.is_estimate and self.source != "scaled"

    @property
    def says_nothing_of_model(self) -> bool:
        """Whether it only stands in for a model of which nothing is known."""
        return self.source in UNKNOWN_MODELS

    @property
    def stage_s(self) -> tuple[float, float, float, float]:
        """Seconds per stage in the order of `STAGES`."""
        return (self.load_s, self.preprocess_s, self.propagate_s, self.synchronize_s)

    @property
    def network_busy_s(self) -> float:
        """Seconds per iteration in which the network was used, also where another stage owned the time."""
        busy_s = self.detail.busy_s
        return max(self.synchronize_s, busy_s[-1] if busy_s else 0.0)

    @property
    def bottleneck(self) -> str:
        """The resource that the iteration holds longest; the earlier one on a tie."""
        return RESOURCES[max(range(len(STAGES)), key=lambda index: self.stage_s[index])]


def fault_in(stage_s: Sequence[float], iteration_s: float, gpu_mem_gib: float, iterations: int) -> str:
    """Return why the figures of a measurement cannot be true, "" when they can."""
    checks = [(f"{stage} time", TIME_S, value) for stage, value in zip(STAGES, stage_s)]
    checks += [
        ("iteration time", ITERATION_S, iteration_s),
        ("GPU memory", GPU_MEM_GIB, gpu_mem_gib),
        ("number of iterations", ITERATIONS, iterations),
    ]
    return first_fault(checks)


def first_fault(checks: Iterable[tuple[str, Bounds, float]]) -> str:
    """Return what is wrong with the first of some figures that cannot be true, after its name; "" when all can."""
    return next((f"{name} {fault}" for name, bounds, value in checks if (fault := bounds.fault(value))), "")


LEAST_COVERAGE: Final = 0.5
"""A profile whose stages cover less says nothing of what the job uses: it is planned as if there were none."""

UNEXPLAINED_SHARE: Final = 0.1
"""From this share on, what is in no stage is reported with its reason."""

WAITS_UNSEEN: Final = "the loop waited there for what hooks do not see (a file, a process, a sleep) or had no free core"
UNMARKED: Final = "the script marks its stages itself and leaves this out"


def coverage(stage_s: Sequence[float], iteration_s: float) -> float:
    """Share of the iteration that is in a stage, 0 to 1."""
    return min(1.0, sum(stage_s) / iteration_s) if iteration_s > 0 else 0.0


def says_little(stage_s: Sequence[float], iteration_s: float) -> str:
    """Why a job is planned as if it had no profile; "" where its stages explain enough."""
    covered = coverage(stage_s, iteration_s)
    return f"{1.0 - covered:.0%} of its iteration is in no stage" if covered < LEAST_COVERAGE else ""


def unexplained(stage_s: Sequence[float], iteration_s: float) -> str | None:
    """The share of the iteration in no stage, with its reason; None where that is little."""
    rest = 1.0 - coverage(stage_s, iteration_s)
    if rest < UNEXPLAINED_SHARE:
        return None
    use = "; planned as unknown" if says_little(stage_s, iteration_s) else ""
    return f"{rest:.0%}: {WAITS_UNSEEN}, or {UNMARKED}{use}"


@dataclass(frozen=True)
class OneGpu:
    """What all processes together use of one GPU now; None where it could not be read."""

    utilization: float | None = None  # Share of the time that any kernel ran, 0 to 1
    mem_gib: float | None = None  # GPU memory in use


@dataclass(frozen=True)
class NodeUse:
    """Use of a node by all processes since the look before."""

    cpu_cores: float | None = None  # Cores in use
    cpu_count: int = 0  # Cores that there are
    mem_gib: float | None = None  # Host memory in use
    disk_mib_per_s: float | None = None  # Read from and written to local disks
    network_mib_per_s: float | None = None  # Sent and received, loopback left out
    gpus: Mapping[int, OneGpu] = field(default_factory=dict)  # Each GPU that can be seen, by its number in /dev


@dataclass(frozen=True)
class JobUse:
    """Use by a job's processes since the look before. Linux counts no network traffic by process."""

    cpu_cores: float | None = None  # Cores in use
    mem_gib: float | None = None  # Host memory, shared pages once
    disk_mib_per_s: float | None = None  # Read from and written to storage, page cache hits left out
    gpu_utilization: float | None = None  # Share of the time that its kernels ran, summed over its GPUs
    gpu_mem_gib: float | None = None  # GPU memory on all of its GPUs


class Use(NamedTuple):
    """One look at a node and at each job on it, by name."""

    node: NodeUse
    jobs: Mapping[str, JobUse]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        gpus = {str(number): asdict(gpu) for number, gpu in self.node.gpus.items()}
        node = {**asdict(self.node), "gpus": gpus}
        return {"node": node, "jobs": {name: asdict(use) for name, use in self.jobs.items()}}


class Document(NamedTuple):
    """A measurement that is not a stage profile, such as how two models slow each other down."""

    name: str  # Its subject, unique in its kind
    measured_at: str  # UTC time, ISO-8601
    body: dict[str, Any]  # Plain JSON values; the module that owns the kind gives them their meaning
