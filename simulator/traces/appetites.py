"""What made-up jobs train: Synergy's models, with appetites for CPUs, host memory, GPU memory and batches.

Stage times and throughput over CPUs and memory are Synergy's (model_profiles.yaml, synergy_sensitivities.yaml),
measured on one GPU. It says nothing of several GPUs, of GPU memory and of smaller batches: those figures are assumed.
"""

from functools import cache
from typing import Final, NamedTuple

from muri.policies.traits import FIRST_SYNC_SHARE, BatchModel, ring_share
from muri.profiler.records import StageProfile
from muri.simulator.traces.profiles import Model, Stages, synergy_models

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
"""Assumed: what a model takes without any sample."""

FIXED_TIME_SHARE: Final = 0.1
"""Assumed: share of an iteration on one GPU that doesn't depend on the batch."""

MOST_STEPS: Final = 8
"""Assumed: accumulation steps into which a batch can be split."""


class HungryModel(NamedTuple):
    """What a job trains.

    Attributes:
        alone: What is known of it on one GPU.
    """

    alone: Model

    @property
    def name(self) -> str:
        """Name, as Synergy's tables have it."""
        return self.alone.name

    @property
    def gpu_mem_gib(self) -> float:
        """Memory that it takes on each GPU."""
        return GPU_MEM_GIB[self.name]

    def profile(self, gpu_count: int) -> StageProfile:
        """Its profile: on several GPUs every one does the same work, and they synchronize after it."""
        alone = self._on_one
        synchronize_s = self._synchronize_s(gpu_count)
        stages = Stages(
            alone.load_s,
            alone.preprocess_s,
            alone.propagate_s,
            synchronize_s,
            alone.iteration_s + synchronize_s,
            self.gpu_mem_gib,
        )
        return Model(self.name, self.alone.batch_size, ((gpu_count, stages),)).profile(gpu_count)

    def batch_on(self, gpu_count: int) -> BatchModel:
        """How its batch can be split."""
        iteration_s, size = self._on_one.iteration_s, self.alone.batch_size
        return BatchModel(
            size,
            FIXED_TIME_SHARE * iteration_s,
            (1 - FIXED_TIME_SHARE) * iteration_s / size,
            communicate_s=self._synchronize_s(gpu_count),
            fixed_mem_gib=FIXED_MEM_GIB,
            mem_gib_per_sample=(self.gpu_mem_gib - FIXED_MEM_GIB) / size,
            max_accumulate_steps=min(MOST_STEPS, size),
        )

    @property
    def _on_one(self) -> Stages:
        return self.alone.stages[0][1]

    def _synchronize_s(self, gpu_count: int) -> float:
        return FIRST_SYNC_SHARE * self._on_one.iteration_s * ring_share(gpu_count)


@cache
def hungry_models() -> tuple[HungryModel, ...]:
    """Synergy's models, by name."""
    return tuple(HungryModel(model) for model in synergy_models().values())
