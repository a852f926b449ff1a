"""When a dry run also measures how a model's throughput follows its CPUs, and what it tells of CPUs and memory. Pure.

Source: Synergy (Mohan et al., OSDI 2022), section 3.1: a job is profiled on arrival, by bisection over its CPUs.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from muri.profiler.dryrun.messages import READS
from muri.profiler.errors import SensitivityError
from muri.profiler.records import StageProfile
from muri.profiler.sensitivity.memory_axis import Dataset, measured_overlap
from muri.profiler.sensitivity.record import SensitivityProfile
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.records.comment_reports import SWEEP, sweep_in
from muri.slurm_plugin.records.roles import ManagedJob, profile_key
from muri.units import MIB, MIB_PER_GIB

log = logging.getLogger("muri.controller")

SHARES: Final = 2
"""A sweep goes up to so many GPU-proportional shares: more CPUs are rarely free beside a GPU."""


def sweep_cpus(job: ManagedJob, cycle: CycleInput) -> int | None:
    """CPUs of a dry run that measures the CPU axis as well; None where it does not.

    Only jobs of one GPU are swept: Muri takes each GPU of a larger job to want the same.
    """
    config, key = cycle.config, profile_key(job, cycle.view.node_index)
    if job.gpu_count != 1 or config.allocation.cpus == "off" or cycle.knowledge.traits.is_measured(key):
        return None
    nodes = cycle.view.node_index.in_partition(config.profiling.partition or job.partition)
    shares = [min(node.cpu_count, SHARES * node.cpu_count // node.gpu_count) for node in nodes if node.gpu_count]
    greatest = max(job.cpu_count, min(shares, default=0))
    return greatest if greatest > 1 else None


def sensitivity_in(measured: Mapping[str, Any], profile: StageProfile, asked_cpus: int) -> SensitivityProfile | None:
    """What a dry run tells of the CPU axis, and of the dataset; None where it tells nothing that can be true of CPUs.

    Args:
        measured: What it left in a comment.
        profile: The stage profile in it, with the memory of the processes.
        asked_cpus: The most CPUs that it could have had.
    """
    told = measured.get(SWEEP)
    if not isinstance(told, Mapping):
        return None
    try:
        cpu = sweep_in(told, asked_cpus)
        return SensitivityProfile(
            str(profile.key),
            profile.measured_at,
            cpu,
            dataset=_dataset_in(measured, profile),
            process_gib=profile.detail.host_mem_gib,
        )
    except (SensitivityError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        log.warning("what the dry run of %s says of its CPUs cannot be true: %s", profile.key, error)
        return None


def _dataset_in(measured: Mapping[str, Any], profile: StageProfile) -> Dataset | None:
    """The dataset that a script keeps in `muri.cache`; None where it has none, or figures that cannot be true."""
    told = measured.get(READS)
    if not isinstance(told, Mapping):
        return None
    try:
        item_mib = float(told["item_bytes"]) / MIB
        dataset_mib, batch_mib = float(told["items"]) * item_mib, float(told["batch_items"]) * item_mib
        rate, overlap = float(told["bytes_per_s"]) / MIB, _overlap(profile, workers=told["workers"] is True)
        return Dataset(dataset_mib / MIB_PER_GIB, min(batch_mib, dataset_mib), rate, overlap)
    except (SensitivityError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        log.warning("what the dry run of %s says of its dataset cannot be true: %s", profile.key, error)
        return None


def _overlap(profile: StageProfile, *, workers: bool) -> float:
    """How much of its reading a job hides: all where workers prefetch, whose work the stages do not show."""
    if workers or profile.detail.busy_s is None:
        return float(workers)
    return measured_overlap(profile.iteration_s, profile.load_s, profile.detail.busy_s[0])
