"""Values that outlive the controller's process: it may run for one cycle at a time. The journal keeps them."""

from collections.abc import Mapping
from typing import Any, Final

from muri.slurm_plugin.records.journal import COUNTERS

Labels = tuple[str, ...]
"""Values of a metric's labels, in their order."""

_BETWEEN: Final = "/"
"""Between the values in the journal; no label's value holds one."""


class Counters:
    """Sums by metric and labels.

    Args:
        facts: What the journal holds of them.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._values = {name: _read(values) for name, values in facts.items()}

    def add(self, name: str, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to one sum."""
        values = self._values.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, name: str, value: float) -> None:
        """Remember a value that has no labels."""
        self._values[name] = {(): value}

    def of(self, name: str) -> dict[Labels, float]:
        """Return the sums of one metric by labels, in alphabetical order."""
        return dict(sorted(self._values.get(name, {}).items()))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what the journal is to hold."""
        text = {
            name: {_BETWEEN.join(labels): value for labels, value in values.items()}
            for name, values in self._values.items()
        }
        return {COUNTERS: dict(text)}


def _read(values: Any) -> dict[Labels, float]:
    """Read one metric's sums; a damaged one begins anew."""
    if not isinstance(values, dict):
        return {}
    numbers = {text: value for text, value in values.items() if isinstance(value, int | float) and value >= 0}
    return {tuple(text.split(_BETWEEN)) if text else (): float(value) for text, value in numbers.items()}
