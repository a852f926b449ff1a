"""Which model a job trained of which a log knows the size and the time only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby

from muri.profiler.records import StageProfile
from muri.simulator.traces.problems import TraceError
from muri.simulator.traces.profiles import Model, Stages, measured_models


@dataclass(frozen=True)
class Assignment:
    """Gives jobs profiles.

    A job whose name is that of a model trains this model. For any other each model is as likely as the others; the
    choice depends on the seed and the job's key only, so jobs with the same key (reruns of one experiment) train the
    same model, and no job's model depends on the other rows.

    Attributes:
        models: What jobs may train.
        seed: Another seed is another assignment.
    """

    models: Sequence[Model]
    seed: int = 0
    _made: dict[tuple[int, int], StageProfile] = field(default_factory=dict)

    def profile(self, key: str, gpu_count: int, job_name: str = "") -> StageProfile:
        """The profile of one job.

        Args:
            key: What reruns have in common.
            gpu_count: GPUs of the job.
            job_name: Its name, where the log knows it.

        Returns:
            The profile.
        """
        named = [number for number, model in enumerate(self.models) if model.name == job_name]
        choices = named or range(len(self.models))
        number = choices[self._hash(key) % len(choices)]
        made = self._made.get((number, gpu_count))
        if made is None:  # one record for all jobs that share it
            made = self._made[number, gpu_count] = self.models[number].profile(gpu_count)
        return made

    def _hash(self, key: str) -> int:
        text = f"{self.seed}\0{key}".encode(errors="surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def assignment_of(profiles: Iterable[StageProfile] | None, seed: int) -> Assignment:
    """An assignment among given profiles.

    Args:
        profiles: A site's own measured profiles; None: the eight models of the Muri paper.
        seed: For the choice.

    Returns:
        The assignment.

    Raises:
        TraceError: There are no profiles.
    """
    models = measured_models() if profiles is None else _models_of(profiles)
    if not models:
        raise TraceError("there are no profiles to assign; `muri profile list` shows what the store has")
    return Assignment(models, seed)


def _models_of(profiles: Iterable[StageProfile]) -> tuple[Model, ...]:
    """Models by name, batch size and GPU type, with the stages of each GPU count."""

    def kind(profile: StageProfile) -> tuple[str, int, str]:
        return profile.key.model, profile.key.batch_size, profile.key.gpu_type

    ordered = sorted(profiles, key=lambda profile: (*kind(profile), profile.key.gpu_count))
    return tuple(
        Model(name, batch_size, tuple((item.key.gpu_count, _stages(item)) for item in items), gpu_type)
        for (name, batch_size, gpu_type), items in groupby(ordered, key=kind)
    )


def _stages(profile: StageProfile) -> Stages:
    return Stages(*profile.stage_s, iteration_s=profile.iteration_s, gpu_mem_gib=profile.gpu_mem_gib)
