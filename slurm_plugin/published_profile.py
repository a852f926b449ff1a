"""A dry run's result as it travels in a job's comment, which Slurm limits. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin import tags

MOST_BYTES: Final = 1024
"""Slurm's limit on a job's comment."""

_DIGITS: Final = 4
_ERROR_CHARACTERS: Final = 300

_DISPENSABLE: Final = (
    "stage_p95_s",
    "stage_cv",
    "iteration_p95_s",
    "iteration_cv",
    "busy_s",
    "cpu_cores",
    "gpu_utilisation",
    "warmup_iterations",
    "host_mem_gib",
    "gradient_mib",
    "confidence",
)
"""Details in the order in which they are left out where there is no room for them."""


def comment_with(comment: str, token: str, result: Mapping[str, Any]) -> str:
    """The comment with a result in it.

    Args:
        comment: The job's comment, whose other text is kept.
        token: Name of the dry run.
        result: What it found, or an error.
    """
    if "error" in result:
        return _written(comment, {"error": str(result["error"])[:_ERROR_CHARACTERS], "token": token})
    values = {name: _rounded(value) for name, value in result.items() if name != "stopped"} | {"token": token}
    for name in ("", *_DISPENSABLE):
        values["detail"] = {key: value for key, value in values.get("detail", {}).items() if key != name}
        text = _written(comment, values)
        if len(text.encode()) <= MOST_BYTES:
            break
    return text


def profile_in(measured: Mapping[str, Any], key: ProfileKey, measured_at: str) -> StageProfile:
    """The profile that a comment tells of.

    Raises:
        ProfileError: A figure cannot be true.
        KeyError, TypeError, ValueError: One is missing or is no number.
    """
    return DryRunResult.from_dict(measured).profile(key, measured_at)


def _written(comment: str, value: Mapping[str, Any]) -> str:
    return tags.with_token(comment, tags.PROFILE_PREFIX, tags.format_json(dict(value)))


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
