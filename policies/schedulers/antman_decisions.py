"""What AntMan's seats look like in a plan, with speeds and reasons."""

from muri.policies.cycle import reasons
from muri.policies.reason import Reason
from muri.policies.schedulers.antman_seats import Seat
from muri.policies.schedulers.antman_speed import leftover_speed
from muri.policies.speed.model import Shape, shape_of
from muri.policies.types import Group, PlanJob, Solo, Waiting

_NOT_STOPPED = Reason("antman stops nothing that runs")
_NO_PROFILE = Reason("it shares with nobody while its model has no profile")


def group(seat: Seat) -> Group:
    """Two jobs that share: the guaranteed one at full speed, the other at what that leaves over.

    What was started by another policy may be two guaranteed jobs, or more than two: the first is given full
    speed here, each other one what the first leaves over.
    """
    shapes = [_shape(job) for job in seat.jobs]
    speeds = [1.0, *(leftover_speed(shapes[0], shape) for shape in shapes[1:])]
    used = sum(speed * _busy(shape) for speed, shape in zip(speeds, shapes, strict=True))
    first, second = seat.jobs[:2]
    why = Reason(
        "{} keeps its full speed; {} gets on at {:.2f} of its own with what is left over",
        (first.job_id, second.job_id, speeds[1]),
    )
    where = reasons.kept if seat.kept else reasons.sharing
    return Group(
        members=tuple(job.job_id for job in seat.jobs),
        gpus=seat.gpus,
        gpu_count=seat.gpu_count,
        period_s=0.0,
        efficiency=min(1.0, used),
        speed={job.job_id: speed for job, speed in sorted(zip(seat.jobs, speeds, strict=True), key=_job_id)},
        reasons=(why, where(seat.gpu_count, seat.gpus)),
        kept=seat.kept,
    )


def solo(seat: Seat) -> Solo:
    """A job that has its GPUs to itself."""
    (job,) = seat.jobs
    if seat.kept:
        return Solo(job.job_id, (reasons.kept(seat.gpu_count, seat.gpus), _NOT_STOPPED), seat.gpus, kept=True)
    return Solo(job.job_id, (reasons.given(job, seat.gpus),), seat.gpus)


def waiting(job: PlanJob, no_gpus: Reason, *, sharing: bool) -> Waiting:
    """A job that finds neither free GPUs nor anybody to join."""
    if not sharing:
        return Waiting(job.job_id, (no_gpus,))
    if not job.groupable:
        return Waiting(job.job_id, (no_gpus, reasons.must_run_alone(job)))
    if job.profile is None:
        return Waiting(job.job_id, (no_gpus, _NO_PROFILE))
    other = "guaranteed" if job.opportunistic else "opportunistic"
    nobody = Reason("no {} job of the same user, partition and GPU count can share its GPUs with it", (other,))
    return Waiting(job.job_id, (no_gpus, nobody))


def _job_id(item: tuple[PlanJob, float]) -> int:
    return item[0].job_id


def _shape(job: PlanJob) -> Shape:
    return Shape((0.0,) * 4, 1.0) if job.profile is None else shape_of(job.profile)


def _busy(shape: Shape) -> float:
    """Mean share of a resource's time that the job uses alone."""
    return sum(min(1.0, stage_s / shape.iteration_s) for stage_s in shape.stage_s) / len(shape.stage_s)
