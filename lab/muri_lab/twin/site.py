"""What a virtual cluster consists of, and how long its parts take; the delays were measured on the sandbox."""

from dataclasses import dataclass, field
from typing import Literal

from muri.slurm_plugin.records.cluster import Node, Reservation
from muri.slurm_plugin.records.limits import NO_SITE_LIMITS, SiteLimits


@dataclass(frozen=True, slots=True)
class Delays:
    """How long things take, in seconds; see docs/testing.md for where each figure comes from.

    Attributes:
        submit_s: From sbatch's start to a job in the queue.
        read_s: A snapshot.
        change_s: Any other call to slurmctld.
        new_job_s: The controller's submission of a job of its own, in all.
        decide_s: A decision of the controller.
        launch_s: From a job's start to its batch script.
        end_s: From a script's end until its job's resources are free.
        run_s: `muri run`, from its start to the script's first line, alone.
        srun_s: How much longer that takes for a job of several ranks, alone or not.
        pilot_s: From a placeholder's start until its runtime takes members.
        join_s: `muri run`, from its start to the script's first line, in a runtime that is ready.
        attach_s: The part of that which comes after the runtime has been found.
        busy_s: How much longer that takes where members of the group are at work already.
        crowd_s: How much longer that takes for each other rank that starts at the same time; 0 where every node has
            cores to spare, unlike a sandbox, all of whose nodes share a few.
        crowd_alone_s: How much longer `muri run` takes alone for each job beyond the number of cores that starts at the
            same time; 0 as for `crowd_s`.
        leave_s: From the last iteration of a member to the end of its batch script.
        notice_s: From the end of the last member at work until the placeholder asks whether any is left.
        dry_run_s: What a dry run takes beside its iterations.
        stop_s: From SIGTERM to the end of a script that saves nothing.
    """

    submit_s: float = 0.007
    read_s: float = 0.012
    change_s: float = 0.004
    new_job_s: float = 0.03
    decide_s: float = 0.01
    launch_s: float = 0.02
    end_s: float = 0.01
    run_s: float = 0.075
    srun_s: float = 0.05
    pilot_s: float = 0.47
    join_s: float = 0.16
    attach_s: float = 0.03
    busy_s: float = 0.07
    crowd_s: float = 0.0
    crowd_alone_s: float = 0.0
    leave_s: float = 0.03
    notice_s: float = 0.3
    dry_run_s: float = 8.0
    stop_s: float = 0.2


@dataclass(frozen=True, slots=True)
class SlurmConf:
    """What of slurm.conf matters here; the defaults are Slurm's own.

    Attributes:
        tick_s: Period in which slurmctld looks whether its main scheduler has work; a constant of Slurm's.
        tick_at_s: When the ticks are, in seconds from the beginning.
        bf_interval_s: Between two passes of the backfill scheduler.
        bf_at_s: When these are, in seconds from the beginning.
        cred_expire_s: How long a requeued job waits.
        min_job_age_s: How long slurmctld remembers jobs that have ended.
        kill_wait_s: From SIGTERM to SIGKILL.
        def_mem_per_cpu_mib: Memory of jobs that ask for none, for each CPU (DefMemPerCPU); 0 for none.
        gate_licence: Whether slurm.conf has the license `muri_gate`.
        gate: How muri.lua keeps jobs.
    """

    tick_s: float = 1.0
    tick_at_s: float = 0.0
    bf_interval_s: float = 30.0
    bf_at_s: float = 0.15
    cred_expire_s: float = 120.0
    min_job_age_s: float = 300.0
    kill_wait_s: float = 30.0
    def_mem_per_cpu_mib: int = 0
    gate_licence: bool = True
    gate: Literal["licence", "hold"] = "licence"


@dataclass(frozen=True, slots=True)
class Site:
    """A virtual cluster.

    Attributes:
        nodes: Its nodes, idle.
        limits: What it allows.
        conf: Its slurm.conf.
        delays: How long things take.
        reservations: Reservations of administrators.
        visible_cpus: CPUs that a job can use at most, however many a node has; 0 for no such bound. The nodes of a
            sandbox share those of its machine.
    """

    nodes: tuple[Node, ...]
    limits: SiteLimits = NO_SITE_LIMITS
    conf: SlurmConf = field(default_factory=SlurmConf)
    delays: Delays = field(default_factory=Delays)
    reservations: tuple[Reservation, ...] = ()
    visible_cpus: int = 0


def plain_nodes(
    count: int, gpus: int, cpus: int = 64, mem_mib: int = 512_000, partitions: tuple[str, ...] = ("main",)
) -> tuple[Node, ...]:
    """Return equal idle nodes, named n1, n2 and so on."""
    return tuple(
        Node(f"n{number}", True, "IDLE", partitions, cpus, 0, gpus, 0, "gpu", mem_mib, 0)
        for number in range(1, count + 1)
    )
