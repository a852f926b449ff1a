"""Reads from autograd's graph whether a loss is a mean over the samples of its batch, a sum, or neither.

The gradient of a mean over B samples is the sum of its micro-batches' mean gradients, each times its share of B; that
of a sum is their plain sum. Hooks split a loss only if it is certainly one of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose, prod
from typing import Any, Final

MEAN: Final = "mean"
SUM: Final = "sum"
CONSTANT: Final = "constant"

_MEAN_REDUCTION: Final = 1
_SUM_REDUCTION: Final = 2

_LINEAR: Final = frozenset(
    {"Add", "Sub", "Neg", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Reshape"}
)
_OF_ONE_VALUE: Final = frozenset({"Pow", "Abs", "Square"})
_ENDS: Final = "AccumulateGrad"


class UnknownLossError(Exception):
    """The graph does not say what the loss is a mean of."""


@dataclass(frozen=True)
class Reduction:
    """How a loss depends on the number of its samples.

    Attributes:
        kind: "mean", "sum", or "constant": a term that does not depend on the samples.
        weights: Of each mean term, what it was divided by: its samples, or the sum of their weights.
        counts: Numbers of values that went in, as far as the graph tells them: they must grow with the samples.
    """

    kind: str
    weights: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


def reduction_of(loss: Any, samples: int) -> Reduction:
    """How a scalar loss was reduced.

    Args:
        loss: What `backward` is called on.
        samples: Samples of the micro-batch.

    Raises:
        UnknownLossError: The graph does not tell; the message names the operation.
    """
    if loss.grad_fn is None or loss.numel() != 1:
        raise UnknownLossError("the loss is no single value with a graph")
    return _of_node(loss.grad_fn, samples)


def _of_node(node: Any, samples: int) -> Reduction:
    kind = _operation(node)
    if kind == "Mean":
        return _of_mean(node, samples)
    if kind in {"Sum", "LinalgVectorNorm", "Norm"}:
        return _of_sum(node, samples)
    if kind == "Div":
        return _of_quotient(node, samples)
    if kind == "Mul":
        return _of_product(node, samples)
    if kind in _LINEAR:
        return _combined([_of_node(child, samples) for child in _children(node)])
    if hasattr(node, "_saved_reduction"):
        return _of_loss_function(node, samples)
    raise UnknownLossError(f"its graph ends with {node.name()}")


def _operation(node: Any) -> str:
    return str(type(node).__name__).partition("Backward")[0]


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _of_loss_function(node: Any, samples: int) -> Reduction:
    values = getattr(node, "_saved_self", None)
    counts = () if values is None else (float(values.numel()),)
    if node._saved_reduction == _SUM_REDUCTION:
        return Reduction(SUM, counts=counts)
    if node._saved_reduction != _MEAN_REDUCTION:
        raise UnknownLossError(f"{node.name()} does not reduce")
    weight = getattr(node, "_saved_total_weight", None)  # classes' weights and ignored targets change the divisor
    return Reduction(MEAN, (float(samples if weight is None else weight.item()),), counts)


def _of_mean(node: Any, samples: int) -> Reduction:
    sizes = node._saved_self_sym_sizes
    if not _over_samples(sizes, samples) or (_sum_of_dimensions(node) and len(sizes) > 1):
        raise UnknownLossError(f"a mean over {tuple(sizes)} is none over {samples} samples")
    return Reduction(MEAN, (float(samples),), (float(prod(sizes)),))


def _of_sum(node: Any, samples: int) -> Reduction:
    children = _children(node)
    if len(children) == 1 and _only_of_parameters(children[0]):
        return Reduction(CONSTANT)
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    if not sizes or not _over_samples(sizes, samples) or _sum_of_dimensions(node):
        raise UnknownLossError(f"{node.name()} over {tuple(sizes)} is no sum over {samples} samples")
    if any(_operation(child) in {"Mean", "Stack", "Cat"} for child in children):
        raise UnknownLossError("it sums what may be means")
    return Reduction(SUM, counts=(float(prod(sizes)),))


def _of_quotient(node: Any, samples: int) -> Reduction:
    return _scaled(node, samples, lambda other: other)


def _of_product(node: Any, samples: int) -> Reduction:
    return _scaled(node, samples, lambda other: 1 / other if other else float("nan"))


def _scaled(node: Any, samples: int, divisor_of: Callable[[float], float]) -> Reduction:
    """A term times a constant; a sum may be scaled by the number of samples, which differs between parts."""
    children = _children(node)
    if len(children) != 1:
        raise UnknownLossError("it scales one trained term by another")
    inner = _of_node(children[0], samples)
    if inner.kind != SUM:
        return inner
    divisor, elements = divisor_of(float(node._saved_other)), prod(getattr(children[0], "_saved_self_sym_sizes", ()))
    if not any(isclose(divisor, count, rel_tol=1e-6) for count in (samples, elements)):
        raise UnknownLossError(f"it divides a sum by {divisor:g}, with {samples} samples in the micro-batch")
    return Reduction(MEAN, (divisor,), (*inner.counts, divisor))


def _combined(terms: list[Reduction]) -> Reduction:
    kinds = {term.kind for term in terms}
    if not kinds or {MEAN, SUM} <= kinds or {SUM, CONSTANT} <= kinds:
        raise UnknownLossError("it adds terms of which some grow with the number of samples and some do not")
    kind = next(iter(kinds - {CONSTANT}), CONSTANT)
    weights = tuple(weight for term in terms for weight in term.weights)
    return Reduction(kind, weights, tuple(count for term in terms for count in term.counts))


def _over_samples(sizes: Any, samples: int) -> bool:
    return any(size and size % samples == 0 for size in sizes)


def _sum_of_dimensions(node: Any) -> bool:
    """Whether the node reduces only some of several dimensions."""
    return hasattr(node, "_saved_dim") and len(node._saved_self_sym_sizes) > 1


def _only_of_parameters(node: Any) -> bool:
    """Whether only powers and absolute values lie between here and one parameter."""
    while _operation(node) in _OF_ONE_VALUE:
        children = _children(node)
        if len(children) != 1:
            return False
        node = children[0]
    return _operation(node) == _ENDS


def scale_between(first: Reduction, now: Reduction, samples: float) -> float:
    """By how much the divisors of a later micro-batch are greater than the first's.

    Args:
        first: Of the first micro-batch.
        now: Of a later one.
        samples: How many times as many samples it has.

    Raises:
        UnknownLossError: The terms differ, their divisors grow by different factors, or they are taken over values
            that do not grow with the samples.
    """
    if len(first.counts) != len(now.counts) or not all(
        isclose(after, samples * before, rel_tol=1e-6) for before, after in zip(first.counts, now.counts)
    ):
        raise UnknownLossError("it is taken over values whose number does not follow that of the samples")
    if first.kind != now.kind or len(first.weights) != len(now.weights):
        raise UnknownLossError("it has other terms than for the batch's first part")
    pairs = zip(first.weights, now.weights)
    ratios = [after / before if before else float("nan") for before, after in pairs]
    if not all(isclose(ratio, ratios[0], rel_tol=1e-6) for ratio in ratios):
        raise UnknownLossError("its terms are divided by numbers that differ from part to part")
    return ratios[0] if ratios else 1.0


class Shares:
    """The factor of each micro-batch's loss.

    Means are taken over samples, or over weights of samples (classes' weights, ignored targets). The sum of weights is
    known only with the last part: until then it is estimated from the first part, and corrected before the last.
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
