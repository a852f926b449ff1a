"""Speeds of models on one GPU without turns: measured ones, and estimates of the pairs that nobody measured."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Final

from muri.policies.speed.measured import InterferenceTable, PairSpeed
from muri.profiler.interference.models import estimated_ratio
from muri.profiler.records import StageProfile
from muri.simulator.model import SimulationError, TraceJob

_MOST_MODELS: Final = 1_000
"""Half a million pairs, which takes a few seconds; more models are a trace that names each job's own."""


class Pairs:
    """Speeds of every pair of a trace's models.

    Args:
        measured: The pairs that were measured.
        jobs: The jobs of the trace.
    """

    def __init__(self, measured: Iterable[PairSpeed], jobs: Sequence[TraceJob]) -> None:
        self._measured = InterferenceTable(tuple(measured))
        self._jobs = jobs

    @cached_property
    def table(self) -> InterferenceTable:
        """The measured pairs, and an estimate of every other one.

        Estimates are for two processes that share a GPU without turns, by queueing theory
        (`muri.profiler.interference.models`), from the profile of each model's first job by submit time.

        Raises:
            SimulationError: There are too many models.
        """
        known = self._measured
        profiles: dict[str, StageProfile] = {}
        for job in sorted(self._jobs, key=lambda job: (job.submit_s, job.job_id)):
            profiles.setdefault(job.key.model, job.profile)
        if len(profiles) > _MOST_MODELS:
            raise SimulationError(
                f"the trace has {len(profiles)} models; a policy that shares GPUs without turns needs the speeds of "
                f"all pairs, and can be simulated with at most {_MOST_MODELS} models; call jobs of one script alike"
            )
        estimated = (
            PairSpeed(model_a, model_b, *(1 / estimated_ratio(profiles[model_a], profiles[model_b]),) * 2)
            for model_a, model_b in combinations_with_replacement(sorted(profiles), 2)
            if known.speeds(model_a, model_b) is None
        )
        return InterferenceTable((*known.rows, *estimated))

    def speed(self, model: str, others: Iterable[str]) -> float:
        """Speed of a model on a GPU with others, 1 = as fast as alone: the product of its pair speeds."""
        speed = 1.0
        for other in others:
            found = self.table.speeds(model, other)
            assert found is not None
            speed *= found[0]
        return speed
