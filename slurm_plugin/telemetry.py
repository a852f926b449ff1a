"""What a host tells the controller about its members, small enough for a job's comment (1,024 bytes)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muri.profiler.records import STAGES
from muri.slurm_plugin import tags
from muri.slurm_plugin.view import View

LARGEST_BYTES: Final = 1024
"""Longer comments are cut off by some sites' databases; four members take about half of that."""

DIFFERS_BY: Final = 0.2
"""Measured and predicted speed that differ by more are pointed out."""

_DISCIPLINE: Final = "d"


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What the runtime measured of one member.

    Attributes:
        iteration_s: Seconds from one iteration's end to the next, lately.
        iterations: Iterations done; None when not told.
        stage_s: Seconds of an iteration in each stage, in the order of `STAGES`; () when not told.
        wait_s: Seconds of an iteration waiting for each stage's resource; () when not told.
        discipline: The discipline in force; None when not told.
    """

    iteration_s: float
    iterations: int | None = None
    stage_s: tuple[float, ...] = ()
    wait_s: tuple[float, ...] = ()
    discipline: str | None = None

    def speed(self, solo_iteration_s: float | None) -> float | None:
        """Normalized speed: 1 = as fast as alone; None when the time alone is not known."""
        return None if solo_iteration_s is None else solo_iteration_s / self.iteration_s


def compact(status: Mapping[str, Any]) -> str | None:
    """The token for the host job's comment; None when no member has done an iteration.

    Args:
        status: Content of the runtime's status file.
    """
    members = {job_id: member for job_id, member in status.get("members", {}).items() if _iteration_s(member)}
    if not members:
        return None
    report: dict[str, Any] = {job_id: _figures(member) for job_id, member in members.items()}
    if status.get("discipline"):
        report[_DISCIPLINE] = status["discipline"]
    token = tags.SPEED_PREFIX + tags.format_json(report)
    if len(token) > LARGEST_BYTES:
        token = tags.SPEED_PREFIX + tags.format_json({job_id: _short(_iteration_s(m)) for job_id, m in members.items()})
    return token


def _iteration_s(member: Mapping[str, Any]) -> float:
    rate = member.get("iterations_per_s")
    return 1 / rate if rate else float(member.get("iteration_s") or 0.0)


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _figures(member: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n": member.get("iterations", 0),
        "t": _short(_iteration_s(member)),
        "s": [_short(member["stage_s"][stage]) for stage in STAGES],
        "w": [_short(member["wait_s"][stage]) for stage in STAGES],
    }


def member_report(view: View, host_id: int | None, job_id: int) -> MemberReport | None:
    """What a member's host tells of it in its own comment; None when there is nothing that makes sense."""
    host = view.jobs.get(host_id) if host_id is not None else None
    report = tags.parse_json(tags.token(host.comment, tags.SPEED_PREFIX)) if host is not None else None
    if report is None:
        return None
    figures = report.get(str(job_id))
    discipline = report.get(_DISCIPLINE)
    try:
        if isinstance(figures, int | float):
            return MemberReport(float(figures)) if figures > 0 else None
        if not isinstance(figures, dict) or not figures["t"] > 0:
            return None
        stage_s, wait_s = (tuple(map(float, figures[key])) for key in ("s", "w"))
        return MemberReport(float(figures["t"]), int(figures["n"]), stage_s, wait_s, discipline)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def is_off_plan(measured: float | None, predicted: float | None) -> bool:
    """Whether a member runs more than 20 % slower or faster than was planned."""
    return measured is not None and predicted is not None and abs(measured - predicted) > DIFFERS_BY * predicted
