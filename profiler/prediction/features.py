"""What a model's graph tells about its appetite, without training it (Horus, section 4)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

from muri.errors import UsageError

METHODS: Final = ("export", "hooks")
"""How operators were counted: in the graph of torch.export, or as the functions that the forward pass called."""


class FeaturesError(UsageError):
    """Features hold a figure that no graph has."""


@dataclass(frozen=True, slots=True)
class GraphFeatures:
    """Figures of one training step of a model, for the whole batch where they grow with it.

    Attributes:
        batch_size: Samples in the step.
        input_elements: Elements of one sample.
        input_bytes: Size of the batch.
        parameters: Number of parameters, trained or not.
        parameter_bytes: Their size, with the buffers.
        gradient_bytes: Size of the gradients of those that are trained.
        activation_bytes: What autograd keeps between forward and backward pass, parameters excluded.
        working_bytes: What forward and backward pass hold at their peak beside inputs, parameters and all kept
            activations: gradients of activations, and of those parameters that have theirs by then.
        forward_flops: Floating-point operations of the forward pass; a multiplication with its addition counts two.
        training_flops: Those of forward and backward pass together.
        kernels: Operators executed in forward and backward pass; a recurrent layer has some for each time step.
        moved_bytes: Size of what these write.
        convolutions: Convolutions called in a forward pass; the next seven likewise.
        matmuls: Linear layers and matrix products.
        normalisations: Batch, layer, group and similar normalisations.
        attentions: Scaled dot-product attentions.
        recurrents: RNN, LSTM and GRU layers or cells.
        embeddings: Look-ups in embeddings.
        elementwise: Activations, sums, products, dropout.
        others: The rest that computes something, such as pooling; views don't count.
        depth: Convolutions, matrix products, attentions, recurrent layers and look-ups on the longest path; where
            the graph could not be exported, all of them.
        method: One of `METHODS`.
    """

    batch_size: int
    input_elements: int
    input_bytes: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    activation_bytes: int
    working_bytes: int
    forward_flops: int
    training_flops: int
    kernels: int = 0
    moved_bytes: int = 0
    convolutions: int = 0
    matmuls: int = 0
    normalisations: int = 0
    attentions: int = 0
    recurrents: int = 0
    embeddings: int = 0
    elementwise: int = 0
    others: int = 0
    depth: int = 0
    method: str = "export"

    def __post_init__(self) -> None:
        """Refuse what no graph has.

        Raises:
            FeaturesError: A figure is negative or no whole number, or the batch is empty.
        """
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "method":
                if value not in METHODS:
                    raise FeaturesError(f"features: method is {value!r}; choose from {', '.join(METHODS)}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise FeaturesError(f"features: {item.name} is {value!r}; it must be a whole number ≥ 0")
        if self.batch_size < 1:
            raise FeaturesError("features: batch_size is 0; there must be at least one sample")

    @property
    def operators(self) -> int:
        """Operators of a forward pass."""
        return sum(getattr(self, name) for name in OPERATOR_CLASSES)

    def scaled(self, batch_size: int) -> Self:
        """The same model with another batch size: what grows with the batch grows in proportion to it.

        Raises:
            FeaturesError: The batch is empty.
        """
        if batch_size < 1:
            raise FeaturesError(f"features: a batch of {batch_size} samples; there must be at least one")
        factor = batch_size / self.batch_size
        grown = {name: round(getattr(self, name) * factor) for name in _PER_BATCH}
        fixed = min(self.gradient_bytes, self.working_bytes)  # gradients of parameters don't grow
        working_bytes = fixed + round((self.working_bytes - fixed) * factor)
        return replace(self, batch_size=batch_size, working_bytes=working_bytes, **grown)

    def vector(self) -> tuple[float, ...]:
        """Numbers for a regression, in the order of `VECTOR`: logarithms, since models differ by powers of ten."""
        batch = self.batch_size
        derived = (
            self.activation_bytes / batch,
            self.training_flops / batch,
            self.training_flops / max(self.moved_bytes, 1),
            self.training_flops / max(self.kernels, 1),
            self.training_flops / max(self.input_bytes, 1),
        )
        return tuple(math.log1p(value) for value in (*(getattr(self, name) for name in _FIGURES), *derived))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` made; figures of a newer version are ignored.

        Raises:
            FeaturesError: A figure is missing or impossible.
        """
        try:
            return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})
        except TypeError as error:
            raise FeaturesError(f"features are incomplete: {error}") from error


OPERATOR_CLASSES: Final = (
    "convolutions",
    "matmuls",
    "normalisations",
    "attentions",
    "recurrents",
    "embeddings",
    "elementwise",
    "others",
)

_PER_BATCH: Final = ("input_bytes", "activation_bytes", "forward_flops", "training_flops", "moved_bytes")
_FIGURES: Final = tuple(item.name for item in fields(GraphFeatures) if item.name != "method")

VECTOR: Final = (
    *_FIGURES,
    "activation_bytes_per_sample",
    "training_flops_per_sample",
    "training_flops_per_byte",
    "training_flops_per_kernel",
    "training_flops_per_input_byte",
)
"""What each number of `GraphFeatures.vector` is the logarithm (of one plus the figure) of."""
