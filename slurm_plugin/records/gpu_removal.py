"""What was found out by trying: whether, and by which request, a waiting job's GPUs can be taken away. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from muri.slurm_plugin.records.limits import PartitionLimits

WAYS: Final = ("gres/gpu:0,gres/muri:1", "gres/gpu:0")
"""Requests per node in whose favor a job may lose its GPUs, the better one first.

Slurm 24.11 replaces a waiting job's request only by one that asks for something; the count-only GRES `muri` is that,
and counts who shares. Slurm 26.05 takes either.
"""

PER_NODE: Final = "--gres=gpu:N"
TYPED: Final = "--gres=gpu:TYPE:N"
PER_GPU: Final = "--gres=gpu:N with a default for each GPU"
"""Jobs to which their partition gives CPUs or memory for each GPU.

Slurm takes their GPUs away only by a request that names GPUs and nothing else."""
EVERY_FORM: Final = (PER_NODE, "--gpus-per-node=N", "--gpus=N", "--gpus-per-task=N")
"""Those of jobs without a type of GPU."""

_TRY_AGAIN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class TriedForm:
    """What became of one way of asking for GPUs.

    Attributes:
        form: How the GPUs were asked for, such as "--gres=gpu:N".
        request: The request per node that took them away; "" where none did.
        why: Why none did, or why that could not be told; "" where one did.
        conclusive: Whether the answer holds until slurmctld starts anew.
    """

    form: str
    request: str = ""
    why: str = ""
    conclusive: bool = True


@dataclass(frozen=True, slots=True)
class GpuRemoval:
    """Whether a waiting job's GPUs can be taken away, which a group needs.

    Attributes:
        site: What it was found out on: Slurm's version, start and settings, and the partitions that Muri serves;
            another one means another try.
        tried_s: When, seconds since the epoch.
        forms: Each form of request that was tried.
        why: Why nothing was tried, "" where something was.
    """

    site: str = ""
    tried_s: float = 0.0
    forms: tuple[TriedForm, ...] = ()
    why: str = "it has not been tried yet whether Slurm can take a waiting job's GPUs away"

    def way_for(self, gpu_request: str, partition: PartitionLimits) -> TriedForm:
        """Return what is known of jobs that ask per node, with --gres or --gpus-per-node.

        Args:
            gpu_request: Such as "gres/gpu:1" or "gres/gpu:a100:2".
            partition: The job's.
        """
        wanted = TYPED if re.search(r"gpu:[A-Za-z_]", gpu_request) else PER_NODE
        if partition.has_defaults_per_gpu:
            wanted = PER_GPU
        found = next((form for form in self.forms if form.form == wanted), None)
        return found or TriedForm(wanted, why=self.why or "this form of request was not tried", conclusive=False)

    def holds(self, site: str, now_s: float) -> bool:
        """Whether there is no need to try again, on this site at this time."""
        settled = bool(self.forms) and all(form.conclusive for form in self.forms)
        return self.site == site and (settled or 0 <= now_s - self.tried_s < _TRY_AGAIN_S)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job that asks for GPUs can be submitted.

    Attributes:
        partition: A partition whose nodes have GPUs.
        gpu_type: The GPUs' type there, "gpu" when they have none.
        defaults_per_gpu: Whether a partition that Muri serves gives CPUs or memory for each GPU.
        served: Partitions that Muri serves, as configured; empty for all.
    """

    partition: str
    gpu_type: str
    defaults_per_gpu: bool = False
    served: tuple[str, ...] = ()


NOT_TRIED: Final = GpuRemoval()
