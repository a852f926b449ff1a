"""The gradients that the micro-batches of one batch leave behind."""

import weakref
from collections.abc import Iterator
from typing import Any, Final

from muri.launcher.accumulation.losses import MEAN, Reduction, reduction_of, scale_between

_MOST_NODES: Final = 100_000


class Gradients:
    """Follows the parameters of one loop: whose gradients they are, and whether they are still there.

    Attributes:
        batch_norm: Whether the graph normalizes over the samples of a micro-batch.
    """

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[Any]] = []
        self._mark: tuple[weakref.ref[Any], int, int] | None = None
        self.batch_norm = False

    def look_at(self, loss: Any) -> None:
        """Learn the parameters from the loss's graph; costs a walk through it the first time only."""
        if self._parameters:
            return
        for node in _nodes(loss.grad_fn):
            if hasattr(node, "variable"):
                self._parameters.append(weakref.ref(node.variable))
            elif "BatchNorm" in node.name():
                self.batch_norm |= bool(getattr(node, "_saved_training", True))

    def mark(self) -> None:
        """Remember what was accumulated so far."""
        for parameter in self._alive():
            if parameter.grad is not None:
                self._mark = (weakref.ref(parameter), id(parameter.grad), parameter.grad._version)
                return

    @property
    def untouched(self) -> bool:
        """Whether nobody has cleared or changed what was accumulated since the last `mark`."""
        if self._mark is None:
            return True
        reference, identity, version = self._mark
        parameter = reference()
        if parameter is None or parameter.grad is None:
            return False
        return id(parameter.grad) == identity and parameter.grad._version == version

    def scale(self, factor: float) -> None:
        """Multiply all of them."""
        for parameter in self._alive():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clear(self) -> None:
        """Undo what was accumulated; a script that looks at its gradients still finds some."""
        self._mark = None
        for parameter in self._alive():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def forget_mark(self) -> None:
        """A new batch begins."""
        self._mark = None

    def _alive(self) -> Iterator[Any]:
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None:
                yield parameter


class Shares:
    """The factor of each micro-batch's loss.

    Means are taken over samples, or over weights of samples (classes' weights, ignored targets), whose sum is only
    known when all parts are: until then it is estimated from the first part, and corrected before the last.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._first: Reduction | None = None
        self._first_samples = 0
        self._estimated = 0.0
        self._seen = 0.0

    def next_share(self, loss: Any, part_samples: int, *, last: bool) -> tuple[float, float]:
        """Factors of a part's loss, and of the gradients that earlier parts left.

        Raises:
            UnknownLossError: The loss cannot be split.
        """
        reduction = reduction_of(loss, part_samples)
        if self._first is None:
            self._first, self._estimated, self._first_samples = reduction, self._samples / part_samples, part_samples
        ratio = scale_between(self._first, reduction, part_samples / self._first_samples)
        if reduction.kind != MEAN:
            return (1.0 if reduction.kind == "sum" else part_samples / self._samples), 1.0
        self._seen += ratio
        if not last:
            return ratio / self._estimated, 1.0
        correction = self._estimated / self._seen
        return ratio / self._seen, 1.0 if abs(correction - 1.0) < 1e-9 else correction


def _nodes(root: Any) -> Iterator[Any]:
    seen, stack = {root}, [root]
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
