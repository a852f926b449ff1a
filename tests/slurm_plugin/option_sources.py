"""Where the sources of `--muri` lie, and what its C parser answers."""

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SPANK_SOURCE = REPOSITORY / "slurm_plugin" / "spank"
JOB_SUBMIT_SOURCE = REPOSITORY / "slurm_plugin" / "job_submit"


@dataclass(frozen=True)
class Outcome:
    """What the option parser made of some options."""

    mark: str | None
    error: str
