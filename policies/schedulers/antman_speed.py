"""How fast an opportunistic job gets on beside a guaranteed one."""

from collections.abc import Sequence

from muri.policies.speed.figures import figures_of
from muri.policies.speed.model import Shape, shape_of
from muri.policies.types import PlanJob


def shape_to_share(job: PlanJob) -> Shape | None:
    """What sharing depends on; None for a job that must be alone or whose stage times are unknown."""
    if not job.groupable or job.profile is None or sum(job.profile.stage_s) <= 0:
        return None
    return shape_of(job.profile)


def leftover_speed(guaranteed: Shape, opportunistic: Shape) -> float:
    """Speed of an opportunistic job that only gets what a guaranteed one at full speed leaves over.

    With u^j for the share of its time alone during which a job uses resource j:

        s = min(1, min over j with u_o^j > 0 of  (1 - u_g^j) / u_o^j)

    so the resource that is scarcest for it decides; 0 where the guaranteed job never lets go of one it needs.
    """
    share: Sequence[Sequence[float]] = figures_of((guaranteed, opportunistic)).share.tolist()
    return max(0.0, min(1.0, *((1 - of_first) / of_second for of_first, of_second in share if of_second > 0)))
