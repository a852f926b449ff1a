"""Where the sources of `--muri` lie, and what becomes of some options."""

from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SPANK_SOURCE = REPOSITORY / "slurm_plugin" / "spank"
JOB_SUBMIT_SOURCE = REPOSITORY / "slurm_plugin" / "job_submit"
CLI_FILTER_SOURCE = REPOSITORY / "slurm_plugin" / "cli_filter"


@dataclass(frozen=True)
class Outcome:
    """The mark or the reason for which there is none, and what the SPANK plugin sends."""

    mark: str | None
    error: str
    texts: str = field(default="", compare=False)
