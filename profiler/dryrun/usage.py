"""Completes what a script found out about itself with what it was seen to use. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from muri.profiler.telemetry.sample import Usage

LEAST_SAMPLES: Final = 3
"""Fewer samples of the steady work say less than those of the whole run."""

_ONLY_HERE: Final = "steady_since_s"


def with_usage(found: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    """The result of a dry run.

    Args:
        found: What the script's own process wrote: the figures or an error, and since when it worked
            steadily.
        usage: Of the script and its processes, from start to end.
    """
    if "error" in found:
        return dict(found)
    steady = usage.since(float(found[_ONLY_HERE]))
    means, peaks = (steady if len(steady.samples) >= LEAST_SAMPLES else usage).mean, usage.peak
    detail = dict(found["detail"])
    seen = {
        "host_mem_gib": peaks.host_mem_gib,
        "cpu_cores": means.cpu_cores,
        "gpu_utilisation": means.gpu_utilisation,
    }
    detail |= {name: value for name, value in seen.items() if value is not None}
    figures = {name: value for name, value in found.items() if name != _ONLY_HERE}
    gpu_mem_gib = max(float(found["gpu_mem_gib"]), peaks.gpu_mem_gib or 0.0)
    return figures | {"gpu_mem_gib": gpu_mem_gib, "detail": detail}
