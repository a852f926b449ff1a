"""What jobs can train: models with measured stage times; for generated traces also with assumed memory and batches."""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np

from muri.policies.traits import FIRST_SYNC_SHARE, BatchModel, Demand, Sensitivity, ring_share
from muri.profiler.records import ProfileKey, StageProfile, reproducible
from muri.simulator.traces.rows import TraceError
from muri.text import yaml_of

LOAD_SHARES = {
    "shufflenet": 60 / 78,
    "vgg": 24 / 28,
    "gpt2": 0.06 / 0.09,
    "a2c": 0.0,
    "resnet": 60 / 78,
    "bert": 0.06 / 0.09,
    "dqn": 0.0,
}
"""Share of load in load + preprocess by the beginning of the model's name: Muri (SIGCOMM 2022), Table 1, for
ShuffleNet, VGG19, GPT-2 and A2C; the other models take that of the nearest kind: ResNet reads the same images as
ShuffleNet, BERT text as GPT-2 does, and DQN learns from a simulator's frames like A2C."""

OTHER_LOAD_SHARE = 0.5
_MS = 1000.0

GPU_MEM_GIB: Final = {
    "alexnet": 5.0,
    "bert": 11.0,
    "deepspeech": 8.0,
    "gnmt": 7.0,
    "lstm": 3.0,
    "m5": 4.0,
    "mobilenet": 9.0,
    "res18": 8.0,
    "res50": 13.0,
    "shufflenet": 6.0,
    "transformer": 10.0,
    "vae": 2.0,
}
"""Assumed, of a GPU with 16 GiB: what each model takes with its whole batch."""

FIXED_MEM_GIB: Final = 1.5
"""Assumed: memory of a model without any sample."""

FIXED_TIME_SHARE: Final = 0.1
"""Assumed: share of an iteration on one GPU that does not depend on the batch."""

MOST_STEPS: Final = 8
"""Assumed: accumulation steps into which a batch can be split."""

LARGEST_MEM_GIB: Final = 11.0
"""Assumed, of a GPU with 16 GiB: memory of a model with the largest batch of the table."""

OTHER_MEM_GIB: Final = 4.0
"""Assumed for a model of a single configuration, whose batch is never split."""

_BATCH_NAME: Final = re.compile(r"(?P<family>.+) \(batch size (?P<batch_size>\d+)\)")


@dataclass(frozen=True, slots=True)
class Model:
    """A model, by its profiles on some numbers of GPUs."""

    profiles: tuple[StageProfile, ...]  # By GPU count, ascending; at least one

    @property
    def name(self) -> str:
        """The model's name."""
        return self.profiles[0].key.model

    def profile(self, gpu_count: int) -> StageProfile:
        """Profile on this many GPUs, with the figures of the largest measured count up to it, else of the smallest."""
        fitting = [known for known in self.profiles if known.key.gpu_count <= gpu_count]
        return _on(fitting[-1] if fitting else self.profiles[0], gpu_count)

    def profile_bound_by(self, resource: str, gpu_count: int) -> StageProfile | None:
        """Profile with this bottleneck: the figures of the nearest GPU count that has it; None if none has."""
        bound = [known for known in self.profiles if known.bottleneck == resource]
        bound.sort(key=lambda known: (abs(known.key.gpu_count - gpu_count), known.key.gpu_count))
        return _on(bound[0], gpu_count) if bound else None


def _on(profile: StageProfile, gpu_count: int) -> StageProfile:
    return replace(profile, key=replace(profile.key, gpu_count=gpu_count))


def load_share(model: str) -> float:
    """Share of load in a model's load + preprocess time; one half for a model of no known kind."""
    name = model.lower().replace("-", "").replace("_", "")
    return next((share for kind, share in LOAD_SHARES.items() if name.startswith(kind)), OTHER_LOAD_SHARE)


def split_exactly(total: float, share: float) -> tuple[float, float]:
    """Two parts of about share : 1 − share whose sum in floating point is the total, to the last bit.

    The larger part is at least half of the total, so subtracting it from the total is exact (Sterbenz' lemma).
    """
    larger = total - total * min(share, 1 - share)
    smaller = total - larger
    return (larger, smaller) if share > 1 - share else (smaller, larger)


@cache
def measured_models() -> tuple[Model, ...]:
    """The Muri paper's eight models, by name."""
    return tuple(
        Model(tuple(_measured(name, entry["batch_size"], *row) for row in sorted(entry["by_gpu_count"].items())))
        for name, entry in sorted(_table()["measured"].items())
    )


def _measured(name: str, batch_size: int, gpu_count: int, row: dict[str, float]) -> StageProfile:
    load_s, preprocess_s = split_exactly(row["input_ms"] / _MS, load_share(name))
    propagate_s, synchronize_s = row["propagate_ms"] / _MS, row["synchronize_ms"] / _MS
    key = ProfileKey(name, batch_size, gpu_count, "gpu")
    return StageProfile(
        key, load_s, preprocess_s, propagate_s, synchronize_s, row["iteration_ms"] / _MS, source="import"
    )


@cache
def synergy_models() -> dict[str, Model]:
    """Synergy's models, measured on one GPU, by name."""
    models = {}
    for name, entry in sorted(_table()["synergy"].items()):
        load_s, preprocess_s, propagate_s, iteration_s = (
            entry[f"{figure}_ms"] / _MS for figure in ("load", "preprocess", "propagate", "iteration")
        )
        key = ProfileKey(name, entry["batch_size"], 1, "gpu")
        alone = StageProfile(key, load_s, preprocess_s, propagate_s, 0.0, iteration_s, source="import")
        models[name] = Model((alone,))
    return models


@cache
def profiles_bound_by(resource: str, gpu_count: int) -> tuple[StageProfile, ...]:
    """Profiles with this bottleneck of all models that can have it, by model name."""
    profiles = (model.profile_bound_by(resource, gpu_count) for model in measured_models())
    return tuple(profile for profile in profiles if profile is not None)


@cache
def _table() -> dict[str, Any]:
    text = files(__package__).joinpath("model_profiles.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml_of(text)
    return table


@dataclass(frozen=True, slots=True)
class SynergyFigures:
    """The figures of a model in Synergy's public simulator."""

    # Throughput over CPUs and memory per GPU, relative to the fair share of 3 CPUs and 62.5 GiB, and the demand
    sensitivity: Sensitivity
    speedup: float  # Iterations per second with the demand, relative to the fair share. Close to what the matrix says


def synergy_sensitivity(model: str) -> Sensitivity | None:
    """The sensitivity of one of Synergy's models by its name in traces; None of any other model."""
    known = synergy_figures().get(model)
    return None if known is None else known.sensitivity


@cache
def synergy_figures() -> dict[str, SynergyFigures]:
    """All of Synergy's models, by name."""
    text = files(__package__).joinpath("synergy_sensitivities.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml_of(text)
    cpus = tuple(float(count) for count in table["cpus"])
    mem_gib = tuple(float(amount) for amount in table["mem_gib"])
    return {name: _synergy_figures(entry, cpus, mem_gib) for name, entry in sorted(table["models"].items())}


def _synergy_figures(entry: dict[str, Any], cpus: tuple[float, ...], mem_gib: tuple[float, ...]) -> SynergyFigures:
    rows = entry.get("throughput", [[1.0] * len(mem_gib)] * len(cpus))
    throughput = tuple(tuple(float(value) for value in row) for row in rows)
    demand = Demand(float(entry["demand"]["cpus"]), float(entry["demand"]["mem_gib"]))
    return SynergyFigures(Sensitivity(cpus, mem_gib, throughput, demand), float(entry["speedup"]))


class BatchedModel(NamedTuple):
    """One of Synergy's models, with assumed memory, batch model and synchronization."""

    alone: StageProfile  # As measured on one GPU

    @property
    def name(self) -> str:
        """Name, as Synergy's tables have it."""
        return self.alone.key.model

    def profile(self, gpu_count: int) -> StageProfile:
        """Its profile: each GPU does the same work, and they synchronize afterwards."""
        synchronize_s = self._synchronize_s(gpu_count)
        return replace(
            _on(self.alone, gpu_count),
            synchronize_s=synchronize_s,
            iteration_s=self.alone.iteration_s + synchronize_s,
            gpu_mem_gib=GPU_MEM_GIB[self.name],
        )

    def batch_on(self, gpu_count: int) -> BatchModel:
        """How its batch can be split."""
        iteration_s, size = self.alone.iteration_s, self.alone.key.batch_size
        return BatchModel(
            size,
            FIXED_TIME_SHARE * iteration_s,
            (1 - FIXED_TIME_SHARE) * iteration_s / size,
            communicate_s=self._synchronize_s(gpu_count),
            fixed_mem_gib=FIXED_MEM_GIB,
            mem_gib_per_sample=(GPU_MEM_GIB[self.name] - FIXED_MEM_GIB) / size,
            max_accumulate_steps=min(MOST_STEPS, size),
        )

    def _synchronize_s(self, gpu_count: int) -> float:
        return FIRST_SYNC_SHARE * self.alone.iteration_s * ring_share(gpu_count)


@cache
def batched_models() -> tuple[BatchedModel, ...]:
    """Synergy's models, by name."""
    return tuple(BatchedModel(model.profile(1)) for model in synergy_models().values())


class TrainedModel(NamedTuple):
    """A configuration of a table of pair speeds."""

    name: str  # Its name in the table
    iteration_s: float  # Seconds of an iteration alone
    batch: BatchModel | None  # How its batch can be split; None: it cannot
    gpu_mem_gib: float  # Memory that it takes on each GPU

    def profile(self, gpu_count: int) -> StageProfile:
        """Its profile, which is the same on any number of GPUs."""
        batch_size = 0 if self.batch is None else self.batch.batch_size
        return StageProfile(
            ProfileKey(self.name, batch_size, gpu_count, "gpu"),
            load_s=0.0,
            preprocess_s=0.0,
            propagate_s=self.iteration_s,
            synchronize_s=0.0,
            iteration_s=self.iteration_s,
            gpu_mem_gib=self.gpu_mem_gib,
            source="import",
        )

    def batch_on(self, gpu_count: int) -> BatchModel | None:
        """How its batch can be split, the same on any number of GPUs."""
        return self.batch


PAIR_COLUMNS: Final = (
    "job_a",
    "job_b",
    "solo_a_iters_per_s",
    "solo_b_iters_per_s",
    "speed_a_fraction",
    "speed_b_fraction",
)
"""Columns of a table of pair speeds."""


def models_of_pairs(lines: Iterable[str]) -> tuple[TrainedModel, ...]:
    """The models of a table of pair speeds, by name.

    Raises:
        TraceError: A column is missing, or a speed alone is not a number above 0.
    """
    alone = _alone_s(lines)
    found: list[TrainedModel] = []
    for family, names in groupby(sorted(alone, key=lambda name: (_family(name), name)), key=_family):
        members = list(names)
        sizes = {name: int(match["batch_size"]) for name in members if (match := _BATCH_NAME.fullmatch(name))}
        if len(sizes) < 2:
            found += [TrainedModel(name, alone[name], None, OTHER_MEM_GIB) for name in members]
            continue
        fixed_s, per_sample_s = _fit([(size, alone[name]) for name, size in sizes.items()], family)
        per_sample_gib = (LARGEST_MEM_GIB - FIXED_MEM_GIB) / max(sizes.values())
        for name, size in sizes.items():
            batch = BatchModel(
                size,
                fixed_s,
                per_sample_s,
                fixed_mem_gib=FIXED_MEM_GIB,
                mem_gib_per_sample=per_sample_gib,
                max_accumulate_steps=MOST_STEPS,
            )
            found.append(TrainedModel(name, alone[name], batch, batch.mem_gib()))
    return tuple(sorted(found, key=lambda model: model.name))


def _alone_s(lines: Iterable[str]) -> dict[str, float]:
    """Seconds of an iteration alone by model."""
    reader = csv.DictReader(lines)
    missing = [column for column in PAIR_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"the table of pairs has no column {missing[0]}; it needs {', '.join(PAIR_COLUMNS)}")
    alone: dict[str, float] = {}
    for row in reader:
        for name, rate in ((row["job_a"], row["solo_a_iters_per_s"]), (row["job_b"], row["solo_b_iters_per_s"])):
            try:
                alone[name] = 1 / float(rate)
            except (ValueError, TypeError, ZeroDivisionError) as err:
                raise TraceError(
                    f"the table of pairs, line {reader.line_num}: {name} alone makes {rate!r} iterations per second; "
                    "it must be a number above 0"
                ) from err
    return alone


def _family(name: str) -> str:
    match = _BATCH_NAME.fullmatch(name)
    return match["family"] if match else name


def _fit(points: list[tuple[int, float]], family: str) -> tuple[float, float]:
    """α ≥ 0 and β of t = α + βB, by least squares of the relative errors."""
    sizes, times = np.array([point[0] for point in points], float), np.array([point[1] for point in points])
    matrix = np.stack([1 / times, sizes / times], axis=1)
    fixed_s, per_sample_s = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0].tolist()
    if fixed_s < 0:
        fixed_s, per_sample_s = 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
    if per_sample_s < 0:
        raise TraceError(
            f"the table of pairs: {family} trains larger batches in less time, which no batch model allows"
        )
    return reproducible(fixed_s), reproducible(per_sample_s)
