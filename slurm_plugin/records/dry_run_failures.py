"""Failed dry runs of a model, as the journal keeps them: how many, why, and until when they bar the next one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

RETRY_AFTER_S: Final = 86400.0
"""A model whose dry runs failed is tried again after a day: scripts and nodes are mended meanwhile."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is kept of a model's failed dry runs.

    Attributes:
        count: How many have failed since the last success, or since the earlier ones expired.
        why: The cause of the last.
        last_s: When that was, seconds since the epoch.
    """

    count: int
    why: str
    last_s: float

    def expired(self, now_s: float) -> bool:
        """Whether the model may be tried again whatever the count."""
        return now_s - self.last_s > RETRY_AFTER_S

    @property
    def fact(self) -> list[Any]:
        """As the journal keeps it."""
        return [self.count, self.why, self.last_s]


def read_failure(fact: Any, now_s: float) -> Failure | None:
    """Read a fact; one of a version that did not note the time counts as new. None when it is damaged."""
    try:
        count, why, *last_s = fact
        return Failure(int(count), str(why), float(last_s[0]) if last_s else now_s)
    except (TypeError, ValueError):
        return None


def current(facts: Mapping[str, Any], now_s: float) -> dict[str, Failure]:
    """Return what can be read and has not expired, by the profile key's text."""
    found = {key: read_failure(fact, now_s) for key, fact in facts.items()}
    return {key: each for key, each in found.items() if each is not None and not each.expired(now_s)}


def after_another(earlier: Failure | None, why: str, now_s: float) -> Failure:
    """Return what is kept after one more failure.

    Args:
        earlier: What has not expired of earlier ones.
        why: Its cause.
        now_s: When it happened, seconds since the epoch.
    """
    return Failure(1 if earlier is None else earlier.count + 1, why, now_s)
