"""Constants of the controller. They are no keys of muri.yaml; tests and the twin shorten them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the controller is tuned to.

    Attributes:
        gate_watch_s: How long the controller stays after a cycle, until the members of new groups have started, to put
            them behind the gate again. Slurm starts a job within seconds of its release, or not before it plans anew.
        cycle_limit_s: Repairs, and then starts, that take longer than half of this leave the rest to the next cycle:
            the lease has to be extended, and events to be served.
        cycle_calls: Repairs, and then starts, that take more than half as many calls to Slurm do the same: slurmctld
            has other users.
        pilot_start_timeout_s: A pilot that has not started by then is canceled, and its members are grouped anew. Its
            GPUs were free when it was submitted, so something else has taken them.
        attach_timeout_s: A pilot gives its GPUs back when no member has attached by then. Members start after it, at
            the pace of Slurm's scheduler.
        telemetry_s: How often a pilot reports its members' speeds to Slurm; of new members, and of changes by more than
            a fifth, within a minute. Each report is a call to slurmctld.
        poll_s: The longest pause between two questions whether idle members are still queued.
        wait_for_profiles_s: How long after its submission a job may wait for the dry runs of others.
        dry_run_start_timeout_s: A dry run that has not started by then is canceled; its user's next one goes behind
            others'.
        least_confidence: A measurement that is less certain plans as unknown, unless real runs confirm it.
        drift_limit: A stage time that differs by more than this share is drift; 0 turns the watch off.
        drift_after_s: How long the difference must last before the model is measured again.
        drift_again_s: Least time between two drift marks of one model, in case a new measurement does not help.
        joinable_share: How much of its node's CPUs and memory a job alone may hold, so that others can join it: 1 is
            the part of its GPUs.
        restart_s: Estimated time that a stop and a new start cost a job.
    """

    gate_watch_s: float = 60.0
    cycle_limit_s: float = 300.0
    cycle_calls: int = 2000
    pilot_start_timeout_s: float = 180.0
    attach_timeout_s: float = 300.0
    telemetry_s: float = 300.0
    poll_s: float = 30.0
    wait_for_profiles_s: float = 60.0
    dry_run_start_timeout_s: float = 600.0
    least_confidence: float = 0.1
    drift_limit: float = 0.2
    drift_after_s: float = 1800.0
    drift_again_s: float = 21600.0
    joinable_share: float = 1.0
    restart_s: float = 60.0
