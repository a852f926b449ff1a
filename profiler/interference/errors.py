"""What can go wrong when pairs are measured or times are fitted."""

from muri.errors import MuriError, UsageError


class InterferenceError(UsageError):
    """A record of two models side by side holds something that no measurement can give."""


class FitError(UsageError):
    """The points do not determine the line."""


class PairFailedError(MuriError):
    """Two scripts could not be measured side by side; the text says which one failed and how."""


class PairUnstartableError(UsageError):
    """A pair is to be measured in a way that makes no sense."""
