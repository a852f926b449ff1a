"""Speed models by name."""

from muri.policies.options import SPEED_MODELS
from muri.policies.speed.fair import Fair
from muri.policies.speed.lockstep import Lockstep
from muri.policies.speed.measured import Measured
from muri.policies.speed.model import SpeedModel, SpeedModelError, UnknownSpeedModelError
from muri.policies.speed.pairs import InterferenceTable
from muri.policies.speed.reference import Reference


def speed_model(name: str, *, ordering: str = "best", table: InterferenceTable | None = None) -> SpeedModel:
    """Make a speed model.

    Args:
        name: One of `muri.policies.options.SPEED_MODELS`.
        ordering: "best" or "worst"; the model "fair" has no ordering and ignores it.
        table: Measured pairs, which "measured" needs and the others ignore. Lockstep does for the rest.

    Raises:
        UnknownSpeedModelError: No model has this name; lists those there are.
        SpeedModelError: "measured" was asked for without a table.
        OptionsError: The ordering is unknown.
    """
    match name:
        case "lockstep":
            return Lockstep(ordering)
        case "fair":
            return Fair()
        case "reference":
            return Reference(ordering)
        case "measured":
            if table is None:
                raise SpeedModelError(
                    "speed model 'measured' needs a table of measured pairs; give one, or take 'lockstep' or 'fair'"
                )
            # Few sites measure every pair: lockstep, the paper's model, gives the speeds of the others.
            return Measured(table, Lockstep(ordering))
    raise UnknownSpeedModelError(f"speed_model is {name!r}; valid are: {', '.join(SPEED_MODELS)}")
