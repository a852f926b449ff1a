"""Why a group uses its GPUs as it does, and why it gets its CPUs and memory, in sentences for people."""

from typing import Final

from muri.policies.allocation import reasons as host_reasons
from muri.policies.allocation.servers import Host
from muri.policies.cycle.reasons import blanks
from muri.policies.hybrid.modes import Choice
from muri.policies.reason import Reason
from muri.policies.types import PlanJob

GIVES_BACK: Final = Reason("restarts on the GPUs that it has: a newcomer needs what it had above its share")
TOO_LITTLE: Final = Reason("restarts on the GPUs that it has: with what it holds it is slower than with its share")
GETS_MORE: Final = Reason("restarts on the GPUs that it has: what is left there gains more than that costs")
STARTS_ELSEWHERE: Final = Reason("GPUs of its own are free")
_DONE: Final = {"interleave": "they interleave", "plain": "they share without turns", "alone": "it runs alone"}


def decided(choice: Choice) -> Reason:
    """What became of a group, with the weighted speeds of the three ways."""
    plain = "unknown" if choice.plain is None else f"{choice.plain.value:.3g}"
    return Reason(
        "weighted speed: interleaved {:.3g}, plainly shared {}, alone {:.3g}: {}",
        (choice.interleave.value, plain, choice.alone.value, _DONE[choice.best.name]),
    )


def left_out(choice: Choice) -> Reason:
    """Why a job of a group doesn't run on its GPUs."""
    ids = tuple(job.job_id for job in choice.best.members)
    verb = "gets" if len(ids) == 1 else "get"
    return Reason(f"{blanks(len(ids))} {verb} the GPUs that it was to share: more weighted speed without it", ids)


def next_in_line(job: PlanJob) -> Reason:
    """Why such a job waits."""
    return Reason("no {} GPUs are free for it alone", (job.gpu_count,))


def share(host: Host, speed: float, usual: float) -> tuple[Reason, Reason]:
    """What a unit gets of its node, and what it makes of it."""
    effect = Reason("total speed {:.2f}, where the GPU-proportional share gives {:.2f}", (speed, usual))
    return host_reasons.share(host), effect
