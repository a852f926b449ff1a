"""What CPUs and host memory do to a job: its throughput, and the stages that become longer or shorter. Pure."""

from muri.policies.speed.model import Shape
from muri.policies.traits import Demand, Sensitivity

_LOAD, _PREPROCESS = 0, 1


def throughput_ratio(sensitivity: Sensitivity | None, given: Demand, fair: Demand) -> float:
    """Throughput of a job alone with what it is given, relative to the GPU-proportional share.

    Args:
        sensitivity: None of a job that nothing makes faster or slower.
        given: CPUs and memory per GPU; infinite where unlimited.
        fair: The GPU-proportional share, per GPU.
    """
    if sensitivity is None or given == fair:
        return 1.0
    usual = sensitivity.throughput_at(*fair)
    return sensitivity.throughput_at(*given) / usual if usual > 0 else 1.0


def shape_with(shape: Shape, sensitivity: Sensitivity | None, given: Demand, fair: Demand) -> Shape:
    """The stages of a job with what it is given; those on GPU and network stay as they are.

    What CPUs change is the preprocess stage, what memory changes is the load stage. Where a stage has less time than
    the throughput says is saved, the other one loses the rest.

    Args:
        shape: With the GPU-proportional share.
        sensitivity: None of a job that nothing makes faster or slower.
        given: CPUs and memory per GPU; infinite where unlimited.
        fair: The GPU-proportional share, per GPU.
    """
    ratio = throughput_ratio(sensitivity, given, fair)
    if ratio == 1.0 or ratio <= 0:
        return shape
    by_cpus = throughput_ratio(sensitivity, Demand(given.cpus, fair.mem_gib), fair) or ratio
    iteration_s = shape.iteration_s / ratio
    preprocess_s = shape.stage_s[_PREPROCESS] + shape.iteration_s / by_cpus - shape.iteration_s
    load_s = shape.stage_s[_LOAD] + iteration_s - shape.iteration_s / by_cpus
    load_s, preprocess_s = load_s + min(0.0, preprocess_s), preprocess_s + min(0.0, load_s)
    stage_s = (max(0.0, load_s), max(0.0, preprocess_s), *shape.stage_s[2:])
    return Shape(stage_s, iteration_s, shape.gpu_mem_gib, shape.model)
