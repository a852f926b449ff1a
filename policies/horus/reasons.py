"""Why Horus and its baselines put a job where they do, in sentences for people."""

from collections.abc import Sequence
from typing import Final

from muri.policies.cycle.placement import Shares
from muri.policies.cycle.reasons import blanks, plural
from muri.policies.horus.cost import utilization_of
from muri.policies.horus.queueing import JobQueue, typical
from muri.policies.reason import Reason
from muri.policies.types import PlanJob
from muri.profiler.records import ESTIMATES

AGED_FIRST: Final = Reason("a job that has waited longer than max_wait_s goes first and has no place yet")
STOPPED_ONCE: Final = Reason("it was stopped once for being slowed down, so it waits for GPUs of its own")
ALONE: Final = Reason("nobody else is on its GPUs")


def company(partners: Sequence[PlanJob], speed: float) -> Reason:
    """Who is on a job's GPUs as well, and how fast it is there."""
    if not partners:
        return ALONE
    ids = tuple(job.job_id for job in partners)
    return Reason(f"it shares GPUs with {blanks(len(ids))} at an expected {{:.2f}} of its speed alone", (*ids, speed))


def prediction(job: PlanJob) -> tuple[Reason, ...]:
    """What a job's utilisation is known from, where it was not measured."""
    if job.profile is None or job.profile.source not in ESTIMATES:
        return ()
    known_from = "its model's graph" if job.profile.source == "predicted" else "runs with another number of GPUs"
    return (
        Reason(
            "its model was never measured here: {:.0f} % use and {:.1f} GiB are predicted from {}",
            (100 * utilization_of(job), job.gpu_mem_gib, known_from),
        ),
    )


def placed(gpus: Shares) -> Reason:
    """Where a job goes."""
    names = tuple(f"{', '.join(str(gpu_id) for gpu_id in share.gpu_ids)} of {share.node}" for share in gpus)
    word = "GPU" if sum(share.gpu_count for share in gpus) == 1 else "GPUs"
    return Reason(f"it gets {word} {blanks(len(names))}", names)


def not_picked(ahead: int, per_round: int) -> Reason:
    """Why a round didn't look at a job."""
    return Reason("{} of the queues come before it, and a round looks at {}", (plural(ahead, "job"), per_round))


def queue_of(queue: JobQueue, number: int, count: int) -> Reason:
    """Which queue a job waits in."""
    tasks, use, gpus, mem_gib = typical(queue)
    return Reason(
        "it waits in queue {} of {} ({}; typically {:g} GPUs on {:g} nodes, {:.0f} % use, {:.1f} GiB), weight {:.1f}",
        (number, count, plural(len(queue.jobs), "job"), gpus, tasks, 100 * use, mem_gib, queue.weight),
    )


def too_slow(speed: float, partners: Sequence[PlanJob]) -> Reason:
    """Why a running job stops."""
    ids = tuple(other.job_id for other in partners)
    return Reason(
        f"stopped: beside {blanks(len(ids))} it gets on at {{:.2f}} of its speed alone, less than half", (*ids, speed)
    )
