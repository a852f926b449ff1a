"""Which Python a job's script runs under, as far as that is known before it starts. Pure.

A dry run tells it: it runs the real script, which may activate an environment of its own. What it told holds for jobs
of the same model submitted in the same environment, and is the best guess for the same user's other models there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from muri.profiler.records import ProfileKey
from muri.slurm_plugin.records.roles import ManagedJob


@dataclass(frozen=True, slots=True)
class MeasuredPython:
    """What a dry run told.

    Attributes:
        key: Text of the model's key.
        user: The job's owner.
        environment: Digest of the environment that the job was submitted in.
        python: Path of the Python, "" for that of the site (`node_python`).
    """

    key: str
    user: str
    environment: str
    python: str


@dataclass(frozen=True, slots=True)
class KnownPythons:
    """What dry runs told, by model and by environment.

    Attributes:
        site: The directory of the site's Python (`node_python`): who submits with that one first in PATH uses it.
    """

    site: str = ""
    _of_model: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _of_environment: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Iterable[MeasuredPython], node_python: str = "") -> "KnownPythons":
        """Put together what was told."""
        of_model: dict[str, dict[str, str]] = {}
        of_environment: dict[tuple[str, str], frozenset[str]] = {}
        for each in told:
            of_model.setdefault(each.key, {})[each.environment] = each.python
            place = (each.user, each.environment)
            of_environment[place] = of_environment.get(place, frozenset()) | {each.python}
        return cls(str(PurePosixPath(node_python).parent), of_model, of_environment)

    def of_job(self, job: ManagedJob, key: ProfileKey) -> str | None:
        """Return the Python of a job's script.

        Returns:
            Its path; "" for that of the site, also for jobs that tell nothing of their environment; None where only a
            dry run can tell.
        """
        if job.facts is None or not job.facts.environment:
            return ""
        environment, measured = job.facts.environment, self._of_model.get(str(key), {})
        if environment in measured:
            return measured[environment]
        alike = self._of_environment.get((job.user, environment), frozenset())
        if len(alike) == 1:
            return next(iter(alike))
        first = job.facts.python
        is_sites = not first or str(PurePosixPath(first).parent) == self.site
        return "" if is_sites and not measured and not alike else None
