"""Why jobs get the CPUs and the memory that they get, in sentences for people."""

from muri.policies.allocation.servers import Host
from muri.policies.cycle.reasons import blanks, plural
from muri.policies.reason import Reason
from muri.policies.traits import Demand
from muri.policies.types import PlanJob

UNKNOWN = Reason("nothing is known of what CPUs and memory do for it: it gets its GPU-proportional share")
PROPORTIONAL = Reason("CPUs and memory follow the GPUs")
NOT_ALLOCATED = Reason("its node tells neither CPUs nor memory: they are not given out")
MOVED = Reason("moved: the place where it ran goes to more urgent jobs")


def gave_way(job: PlanJob) -> Reason:
    """Why a job has less than it could have had; some of it may be left over for it after all."""
    return Reason("it gave up what it had above its GPU-proportional share for job {}", (job.job_id,))


def share(host: Host) -> Reason:
    """What a job gets of its nodes."""
    template, values = _amounts(host)
    return Reason(f"it gets {template}", values)


def saturated(speed: float) -> Reason:
    """It gets what it demands."""
    return Reason("that is all it can use: {:.2f} × its speed with the GPU-proportional share", (speed,))


def below_demand(wanted: Demand, speed: float) -> Reason:
    """It gets less than it demands."""
    return Reason(
        "it could use {:.4g} CPUs and {:.4g} GiB, {:.2f} × as fast, but they are not free or not worth a restart",
        (wanted.cpus, wanted.mem_gib, speed),
    )


def restarted(before: Host, after: Host) -> Reason:
    """Why a running job starts anew on its own GPUs."""
    old, old_values = _amounts(before)
    new, new_values = _amounts(after)
    return Reason(
        f"restarts on the GPUs that it has, for its share changes: {old} before, {new} now", (*old_values, *new_values)
    )


def no_host_room(job: PlanJob, ahead: int, needed: Host) -> Reason:
    """Why a job waits although GPUs are free."""
    line = "it is next in line" if not ahead else f"{plural(ahead, 'job')} {'is' if ahead == 1 else 'are'} ahead of it"
    template, values = _amounts(needed)
    return Reason(
        f"{line}; a node of partition {{}} has {{}} free, but not with {template} beside",
        (job.partition, plural(job.gpu_count, "GPU"), *values),
    )


def _amounts(host: Host) -> tuple[str, tuple[object, ...]]:
    parts: list[str] = []
    values: list[object] = []
    for item in host:
        known = [(item.cpus, "{:.4g} CPUs"), (item.mem_gib, "{:.4g} GiB of memory")]
        amounts = " and ".join(text for amount, text in known if amount) or "neither CPUs nor memory"
        parts.append(amounts + (" on {}" if len(host) > 1 else ""))
        values += [amount for amount, _ in known if amount] + ([item.node] if len(host) > 1 else [])
    return blanks(len(parts)).format(*parts), tuple(values)
