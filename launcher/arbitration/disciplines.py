"""The disciplines by name, and the arbiter of each."""

from collections.abc import Mapping
from typing import Final

from muri.launcher.arbitration.arbiter import Arbiter, FairArbiter
from muri.launcher.arbitration.discipline_choice import DisciplineChoice
from muri.launcher.arbitration.lockstep import LockstepArbiter
from muri.launcher.arbitration.plain import PlainArbiter
from muri.launcher.arbitration.switching import SwitchingArbiter
from muri.launcher.clock import STAGE_COUNT

DISCIPLINES: Final = ("auto", "fair", "lockstep", "plain")


def make_arbiter(
    discipline: str,
    members: list[str],
    ordering: list[str | None],
    predicted_speed: Mapping[str, float] | None = None,
) -> Arbiter:
    """The arbiter of a discipline.

    Args:
        discipline: "auto", "fair", "lockstep" or "plain". A group of more than four has no rotation: auto is fair
            there. Auto is never plain: that is for members whose pairs were measured.
        members: The members' ids.
        ordering: Members in the planned ordering, None for a place that stays empty; used by
            lockstep only, `members` when empty.
        predicted_speed: Predicted normalized speed of each member in the group; used by auto only.

    Raises:
        UsageError: Lockstep was asked for more than four members.
    """
    places = ordering or list(members)
    if discipline == "lockstep":
        return LockstepArbiter(places)
    if discipline == "plain":
        return PlainArbiter()
    if discipline == "fair" or len(places) > STAGE_COUNT:
        return FairArbiter()
    choice = DisciplineChoice(("fair", "lockstep"), dict(predicted_speed or {}))
    return SwitchingArbiter({"fair": FairArbiter, "lockstep": lambda: LockstepArbiter(places)}, choice)
