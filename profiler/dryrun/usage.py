"""Completes what a script found out about itself with what it was seen to use. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from muri.profiler.dryrun.contention import undisturbed
from muri.profiler.telemetry.sample import Usage

LEAST_SAMPLES: Final = 3
"""Fewer samples of the steady work say less than those of the whole run."""

UNDISTURBED: Final = 0.95
"""Below this share of the work on its cores the result says that others were there."""

_ONLY_HERE: Final = ("steady_since_s", "busy_cores", "core_count")


def with_usage(found: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    """The result of a dry run.

    Args:
        found: What the script's own process wrote: the figures or an error, since when it worked steadily, and
            how many of its cores were in use by anybody.
        usage: Of the script and its processes, from start to end.
    """
    if "error" in found:
        return dict(found)
    steady = usage.since(float(found["steady_since_s"]))
    means, peaks = (steady if len(steady.samples) >= LEAST_SAMPLES else usage).mean, usage.peak
    detail = dict(found["detail"])
    seen = {
        "host_mem_gib": peaks.host_mem_gib,
        "cpu_cores": means.cpu_cores,
        "gpu_utilisation": means.gpu_utilisation,
    }
    detail |= {name: value for name, value in seen.items() if value is not None}
    stopped = str(found["stopped"])
    if means.cpu_cores is not None:
        share = undisturbed(means.cpu_cores, float(found["busy_cores"]), int(found["core_count"]))
        detail["confidence"] *= share
        stopped += f"; {1 - share:.0%} of the work on its cores was not its own" if share < UNDISTURBED else ""
    figures = {name: value for name, value in found.items() if name not in _ONLY_HERE}
    gpu_mem_gib = max(float(found["gpu_mem_gib"]), peaks.gpu_mem_gib or 0.0)
    return figures | {"gpu_mem_gib": gpu_mem_gib, "detail": detail, "stopped": stopped}
