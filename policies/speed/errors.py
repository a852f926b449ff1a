"""What can be wrong with the input of a speed model."""

from muri.errors import UsageError
from muri.policies.options import OptionsError


class SpeedModelError(UsageError):
    """Groups, shapes or parameters that a speed model cannot evaluate."""


class InterferenceError(SpeedModelError):
    """A table of measured interference holds something that no measurement can give."""


class UnknownSpeedModelError(OptionsError):
    """No speed model has this name."""
