"""Parts of a virtual cluster, and their delays, which were measured on the sandbox."""

from dataclasses import dataclass, field
from typing import Literal

from muri.slurm_plugin.records.cluster import Node, Reservation
from muri.slurm_plugin.records.limits import NO_SITE_LIMITS, PartitionLimits, SiteLimits


@dataclass(frozen=True, slots=True)
class Delays:
    """Durations in seconds; see docs/testing.md for the source of each figure."""

    submit_s: float = 0.007  # From sbatch's start to a job in the queue
    read_s: float = 0.012  # A snapshot
    change_s: float = 0.004  # Any other call to slurmctld
    new_job_s: float = 0.03  # The controller's submission of a job of its own, in all
    decide_s: float = 0.01  # A decision of the controller
    launch_s: float = 0.02  # From a job's start to its batch script
    end_s: float = 0.01  # From a script's end until its job's resources are free
    run_s: float = 0.075  # `muri run`, from its start to the script's first line, alone
    srun_s: float = 0.05  # How much longer that takes for a job of several ranks, alone or not
    pilot_s: float = 0.47  # From a placeholder's start until its runtime takes members
    join_s: float = 0.16  # `muri run`, from its start to the script's first line, in a runtime that is ready
    attach_s: float = 0.03  # The part of that which comes after the runtime has been found
    busy_s: float = 0.07  # How much longer that takes where members of the group are at work already
    crowd_s: float = 0.0  # more `join_s` for each other rank that starts at once; 0: every node has cores to spare
    crowd_alone_s: float = 0.0  # more `run_s` for each job beyond the cores that starts at once
    leave_s: float = 0.03  # From the last iteration of a member to the end of its batch script
    notice_s: float = 0.3  # From the end of the last member at work until the placeholder asks whether any is left
    dry_run_s: float = 8.0  # beside its iterations
    stop_s: float = 0.2  # From SIGTERM to the end of a script that saves nothing


@dataclass(frozen=True, slots=True)
class SlurmConf:
    """What of slurm.conf matters here; the defaults are Slurm's own."""

    tick_s: float = 1.0  # Period in which slurmctld looks whether its main scheduler has work; a constant of Slurm's
    tick_at_s: float = 0.0  # When the ticks are, in seconds from the beginning
    bf_interval_s: float = 30.0  # Between two passes of the backfill scheduler
    bf_at_s: float = 0.15  # When these are, in seconds from the beginning
    cred_expire_s: float = 120.0  # How long a requeued job waits
    min_job_age_s: float = 300.0  # How long slurmctld remembers jobs that have ended
    kill_wait_s: float = 30.0  # From SIGTERM to SIGKILL
    def_mem_per_cpu_mib: int = 0  # Memory of jobs that ask for none, for each CPU (DefMemPerCPU); 0 for none
    gate_license: bool = True  # Whether slurm.conf has the license `muri_gate`
    gate: Literal["license", "hold"] = "license"  # How muri.lua keeps jobs


@dataclass(frozen=True, slots=True)
class Site:
    """A virtual cluster."""

    nodes: tuple[Node, ...]  # Its nodes, idle
    limits: SiteLimits = NO_SITE_LIMITS
    conf: SlurmConf = field(default_factory=SlurmConf)  # Its slurm.conf
    delays: Delays = field(default_factory=Delays)  # How long things take
    reservations: tuple[Reservation, ...] = ()  # Reservations of administrators
    visible_cpus: int = 0  # most CPUs of a job; 0: no bound. A sandbox's nodes share those of its machine


def plain_nodes(count: int, gpus: int, cpus: int = 64, mem_mib: int = 512_000) -> tuple[Node, ...]:
    """Return equal idle nodes, named n1, n2 and so on."""
    return tuple(
        Node(f"n{number}", True, "IDLE", ("main",), cpus, 0, gpus, 0, "gpu", mem_mib, 0)
        for number in range(1, count + 1)
    )


def shared_cpus(jobs_on_cpu: int = 8) -> SiteLimits:
    """Return limits with which so many jobs may share a CPU, by default as on the sandbox (OverSubscribe=YES:8)."""
    return SiteLimits((PartitionLimits("main", oversubscribe=jobs_on_cpu),))
