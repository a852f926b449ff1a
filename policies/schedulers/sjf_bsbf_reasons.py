"""Why SJF-BSBF put a job where it is, or let it wait, in sentences for people."""

from typing import Final

from muri.policies.cycle import reasons
from muri.policies.cycle.packed import Holding
from muri.policies.reason import Reason
from muri.policies.types import PlanJob
from muri.policies.wise_sharing.choice import Choice
from muri.policies.wise_sharing.partners import Offers

_NO_DURATION: Final = Reason("its remaining time is not known, so nobody can tell whether sharing pays")
_NOBODY: Final = Reason(
    "no job of the same user and partition holds GPUs alone, with memory left and a known speed beside it"
)


def kept(holding: Holding) -> Reason:
    """Where a running job stays, and with whom."""
    stays = reasons.kept(holding.job.gpu_count, holding.shares)
    partners = holding.partners
    if not partners:
        return stays
    beside = reasons.blanks(len(partners))
    return Reason(f"{stays.template}, beside {beside}", (*stays.values, *(partner.job_id for partner in partners)))


def steps(accumulate_steps: int) -> tuple[Reason, ...]:
    """That the batch is divided."""
    if accumulate_steps == 1:
        return ()
    return (Reason("each batch is computed in {} steps, for the memory of its GPUs", (accumulate_steps,)),)


def joined(holding: Holding, choice: Choice, *, tests_pairs: bool) -> tuple[Reason, ...]:
    """Whom a job joins, and what that comes to."""
    where = reasons.sharing(holding.job.gpu_count, holding.shares)
    template = where.template.replace("them to run apart; they share", "it to run apart; it shares")
    found = [Reason(template, where.values)]
    for partner in choice.partners:
        other = partner.holding.job.job_id
        if tests_pairs:
            text = "sharing with job {} now ends both after {} on average; one after the other it would be {}"
            found.append(Reason(text, (other, *_durations(partner.now_s, partner.after_s))))
        else:
            found.append(Reason("job {} is the first whose GPUs have the memory; nobody asks if it pays", (other,)))
    return (*found, *steps(choice.sub_batch.accumulate_steps))


def not_shared(job: PlanJob, offers: Offers, *, tests_pairs: bool) -> Reason:
    """Why a job that finds no free GPUs joins nobody."""
    if not job.groupable:
        return reasons.must_run_alone(job)
    if job.profile is None:
        return reasons.NEEDS_PROFILE_TO_SHARE
    if tests_pairs and job.remaining_s is None:
        return _NO_DURATION
    if offers.partners:
        held = sum(len(partner.gpus) for partner in offers.partners)
        count = len(offers.partners)
        verb = "holds" if count == 1 else "hold"
        return Reason(
            f"{{}} that it could share with {verb} {{}}, but not as it needs them",
            (reasons.plural(count, "job"), reasons.plural(held, "GPU")),
        )
    if offers.refused is None:
        return _NOBODY
    refused = offers.refused
    return Reason(
        "sharing with job {} now would end both after {} on average; waiting for it to end comes to {}",
        (refused.holding.job.job_id, *_durations(refused.now_s, refused.after_s)),
    )


def _durations(*seconds: float) -> tuple[str, ...]:
    return tuple(reasons.duration(value) for value in seconds)
