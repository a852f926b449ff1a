"""Stage times of known models, for traces that state none; the figures and their sources are in model_profiles.yaml."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from muri.profiler.records import RESOURCES, ProfileKey, StageProfile

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
ShuffleNet, VGG19, GPT-2 and A2C; the others take that of the nearest kind: ResNet reads the same images as
ShuffleNet, BERT text as GPT-2 does, and DQN learns from a simulator's frames like A2C."""

OTHER_LOAD_SHARE = 0.5
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Stages:
    """One iteration's stage times and length, seconds, and the GPU memory that it takes; 0: unknown."""

    load_s: float
    preprocess_s: float
    propagate_s: float
    synchronize_s: float
    iteration_s: float
    gpu_mem_gib: float = 0.0

    @property
    def bottleneck(self) -> str:
        """The resource held longest; the earlier one on a tie."""
        times = (self.load_s, self.preprocess_s, self.propagate_s, self.synchronize_s)
        return RESOURCES[times.index(max(times))]


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of a model.

    Attributes:
        name: Its name.
        batch_size: Samples per iteration and GPU.
        stages: By GPU count, ascending; at least one.
        gpu_type: GRES type of the GPUs that they were measured on.
    """

    name: str
    batch_size: int
    stages: tuple[tuple[int, Stages], ...]
    gpu_type: str = "gpu"

    def profile(self, gpu_count: int) -> StageProfile:
        """Profile with so many GPUs: the figures of the largest measured count that is no larger, else the smallest."""
        fitting = [stages for count, stages in self.stages if count <= gpu_count]
        return self._profile(fitting[-1] if fitting else self.stages[0][1], gpu_count)

    def profile_bound_by(self, resource: str, gpu_count: int) -> StageProfile | None:
        """Profile with this bottleneck: the figures of the nearest GPU count that has it; None if none has."""
        fitting = [(abs(count - gpu_count), count, stages) for count, stages in self.stages]
        bound = [item for item in fitting if item[2].bottleneck == resource]
        return self._profile(min(bound, key=lambda item: item[:2])[2], gpu_count) if bound else None

    def _profile(self, stages: Stages, gpu_count: int) -> StageProfile:
        return StageProfile(
            key=ProfileKey(self.name, self.batch_size, gpu_count, self.gpu_type),
            load_s=stages.load_s,
            preprocess_s=stages.preprocess_s,
            propagate_s=stages.propagate_s,
            synchronize_s=stages.synchronize_s,
            iteration_s=stages.iteration_s,
            gpu_mem_gib=stages.gpu_mem_gib,
            source="import",
        )


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
        Model(name, int(entry["batch_size"]), tuple((int(n), _measured(name, row)) for n, row in _by_gpus(entry)))
        for name, entry in sorted(_table()["measured"].items())
    )


@cache
def synergy_models() -> dict[str, Model]:
    """Synergy's models, measured on one GPU, by name."""
    return {
        name: Model(name, int(entry["batch_size"]), ((1, _synergy(entry)),))
        for name, entry in sorted(_table()["synergy"].items())
    }


@cache
def profiles_bound_by(resource: str, gpu_count: int) -> tuple[StageProfile, ...]:
    """Profiles with this bottleneck of all models that can have it, by model name."""
    profiles = (model.profile_bound_by(resource, gpu_count) for model in measured_models())
    return tuple(profile for profile in profiles if profile is not None)


@cache
def _table() -> dict[str, Any]:
    text = files(__package__).joinpath("model_profiles.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


def _by_gpus(entry: dict[str, Any]) -> list[tuple[int, dict[str, float]]]:
    return sorted(entry["by_gpu_count"].items())


def _measured(name: str, row: dict[str, float]) -> Stages:
    load_s, preprocess_s = split_exactly(row["input_ms"] / _MS, load_share(name))
    return Stages(
        load_s, preprocess_s, row["propagate_ms"] / _MS, row["synchronize_ms"] / _MS, row["iteration_ms"] / _MS
    )


def _synergy(row: dict[str, float]) -> Stages:
    return Stages(
        row["load_ms"] / _MS, row["preprocess_ms"] / _MS, row["propagate_ms"] / _MS, 0.0, row["iteration_ms"] / _MS
    )
