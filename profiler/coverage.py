"""How much of an iteration the stages explain, and why the rest is in none. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
    """What is in no stage, as a share with its reason; None where that is little."""
    rest = 1.0 - coverage(stage_s, iteration_s)
    if rest < UNEXPLAINED_SHARE:
        return None
    use = "; planned as unknown" if says_little(stage_s, iteration_s) else ""
    return f"{rest:.0%}: {WAITS_UNSEEN}, or {UNMARKED}{use}"
