"""Figures of the public Muri simulator (github.com/Rivendile/Muri, folder simulator, Apache-2.0, 2022)."""

from collections.abc import Mapping
from typing import Final

RUN_TIME_FACTOR: Final = 1.015
"""What every job's own iteration time is multiplied by (jobs.py, itertime_overhead_list)."""

SAME_TIME: Final = 1e-9
"""Events nearer than this, relative to their time, are one (util.py, search_dict_list)."""

SAME_TIME_S: Final = 1e-4
"""Under Muri and AntMan an arrival and a completion nearer than this are one event (run_sim.py)."""

TIRESIAS_LIMITS_GPU_S: Final = (3250.0, 7200.0)
"""Attained GPU-seconds at which a job leaves Tiresias' first and second queue (jobs.py, queue_limit)."""

UNLISTED_RESTART_S: Final = 10.0
"""Overhead of a model that the table does not list."""

_GPU_COUNTS: Final = (1, 2, 4, 8, 16, 32)

_OVERHEADS: Final[Mapping[str, tuple[float, ...]]] = {
    "vgg16": (7, 7, 8, 9, 9, 10),
    "vgg19": (7, 7, 8, 9, 10, 10),
    "resnet18": (4, 5, 5, 7, 7, 7),
    "shufflenet_v2_x1_0": (4, 4, 5, 5, 7, 8),
    "bert": (10, 10, 10, 10, 10, 10),
    "gpt2": (10, 10, 10, 10, 10, 10),
    "a2c": (38, 39, 39, 46, 46, 46),
    "dqn": (5, 5, 6, 6, 8, 8),
}


def restart_overhead_s(model: str, gpu_count: int) -> float:
    """Seconds that every event costs a running job (run_sim.py, overhead_dict).

    Args:
        model: Model name as in the trace.
        gpu_count: GPUs of the job; one that the table does not list counts as the next smaller one.
    """
    row = _OVERHEADS.get(model)
    if row is None:
        return UNLISTED_RESTART_S
    return float(max((listed, cost) for listed, cost in zip(_GPU_COUNTS, row, strict=True) if listed <= gpu_count)[1])
