"""A model's needs from its graph, without training it: features and peak memory (Horus, section 4).

Features lie beside the profiles in the store, as documents of the kind "features".
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple, Self

from muri.clock import GIB, now_text
from muri.errors import UsageError
from muri.profiler.estimates import FEATURES
from muri.profiler.records import Document, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore

METHODS: Final = ("export", "hooks")
"""How operators were counted: in the graph of torch.export, or as the functions that the forward pass called."""

OPERATOR_CLASSES: Final = (
    "convolutions",
    "matmuls",
    "normalizations",
    "attentions",
    "recurrents",
    "embeddings",
    "elementwise",
    "others",
)
_PER_BATCH: Final = ("input_bytes", "activation_bytes", "forward_flops", "training_flops", "moved_bytes")

log = logging.getLogger("muri.profiler")

OPTIMIZER_STATES: Final = {"sgd": 0, "momentum": 1, "adam": 2}
"""Values that an optimizer keeps for each trained parameter; "adam" stands for AdamW too."""

DEFAULT_OPTIMIZER: Final = "adam"
FRAMEWORK_GIB: Final = 0.5
"""δ: CUDA context and the libraries' workspaces in a process. Stated, not measured: it depends on GPU and driver (0.3
to 0.6 GiB are usual), and PyTorch's own peak (`torch.cuda.max_memory_allocated`) does not contain it.
"""


class FeaturesError(UsageError):
    """Features hold a figure that no graph has."""


@dataclass(frozen=True, slots=True)
class GraphFeatures:
    """Figures of one training step of a model, for the whole batch where they grow with it."""

    batch_size: int  # Samples in the step
    input_elements: int  # Elements of one sample
    input_bytes: int  # Size of the batch
    parameters: int  # Number of parameters, trained or not
    parameter_bytes: int  # Their size, with the buffers
    gradient_bytes: int  # Size of the gradients of those that are trained
    activation_bytes: int  # What autograd keeps between forward and backward pass, parameters excluded
    working_bytes: int  # peak beside inputs, parameters and kept activations: mainly gradients
    forward_flops: int  # Floating-point operations of the forward pass; a multiplication with its addition counts two
    training_flops: int  # Those of forward and backward pass together
    kernels: int = 0  # Operators executed in forward and backward pass; a recurrent layer has some for each time step
    moved_bytes: int = 0  # Size of what these write
    convolutions: int = 0  # Convolutions called in a forward pass; the next seven likewise
    matmuls: int = 0  # Linear layers and matrix products
    normalizations: int = 0  # of batches, layers, groups and the like
    attentions: int = 0  # Scaled dot-product attentions
    recurrents: int = 0  # RNN, LSTM and GRU layers or cells
    embeddings: int = 0  # Look-ups in embeddings
    elementwise: int = 0  # Activations, sums, products, dropout
    others: int = 0  # The rest that computes something, such as pooling; views don't count
    depth: int = 0  # heavy operators on the longest path, or all without an exported graph
    method: str = "export"  # One of `METHODS`

    def __post_init__(self) -> None:
        """Refuse what no graph has."""
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
        """The same model with another batch size: what grows with the batch grows in proportion to it."""
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
        """Read what `to_dict` made; figures of a newer version are ignored."""
        try:
            return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})
        except TypeError as error:
            raise FeaturesError(f"features are incomplete: {error}") from error


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


class KnownFeatures(NamedTuple):
    """The features of a key."""

    key: ProfileKey
    features: GraphFeatures


class Example(NamedTuple):
    """A measured profile whose features are known: something to learn from."""

    features: GraphFeatures
    profile: StageProfile

    @property
    def family(self) -> str:
        """Return the model's name up to the first slash, which is left out together in cross-validation."""
        return self.profile.key.model.partition("/")[0]


def put_features(store: ProfileStore, key: ProfileKey, features: GraphFeatures) -> None:
    """Store the features of a key; earlier ones are replaced."""
    now = now_text()
    store.put_document(FEATURES, Document(str(key), now, {"key": asdict(key), "features": features.to_dict()}))


def all_features(store: ProfileStore) -> tuple[KnownFeatures, ...]:
    """All features in the store, by key; what `put_features` did not write is left out, and the log names it."""
    found: list[KnownFeatures] = []
    for document in store.documents(FEATURES):
        try:
            found.append(_decode(document))
        except FeaturesError as error:
            log.warning("%s", error)
    return tuple(sorted(found))


def examples(store: ProfileStore, gpu_type: str, gpu_count: int = 1) -> tuple[Example, ...]:
    """Return published, measured profiles with features of a GPU type and count, by key.

    Users' own profiles are not used: predictions serve all users.
    """
    features = {known.key: known.features for known in all_features(store)}
    return tuple(
        Example(features[item.key], item)
        for item in store.list()
        if not item.key.user
        and item.key in features
        and not item.is_estimate
        and (item.key.gpu_type, item.key.gpu_count) == (gpu_type, gpu_count)
    )


def _decode(document: Document) -> KnownFeatures:
    try:
        key = ProfileKey(**document.body["key"])
        return KnownFeatures(key, GraphFeatures.from_dict(document.body["features"]))
    except (KeyError, TypeError) as error:
        raise FeaturesError(f"the features stored for {document.name} are incomplete: {error!r} is missing") from error


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The terms of M = (B·A + P) + B·G + δ, in GiB, with the optimizer's state beside the parameters."""

    activations_gib: float  # B·A: the batch and what autograd keeps of it for the backward pass
    parameters_gib: float  # P: parameters and buffers
    optimizer_gib: float  # What the optimizer keeps for each parameter
    gradients_gib: float  # B·G: gradients alive at the peak, of activations and of parameters
    framework_gib: float = FRAMEWORK_GIB  # δ

    @property
    def allocated_gib(self) -> float:
        """What PyTorch itself allocates at the peak: all but δ; this is a profile's `gpu_mem_gib`."""
        return self.activations_gib + self.parameters_gib + self.optimizer_gib + self.gradients_gib

    @property
    def total_gib(self) -> float:
        """What the device has to hold."""
        return self.allocated_gib + self.framework_gib


def estimate_memory(
    features: GraphFeatures, optimizer: str = DEFAULT_OPTIMIZER, framework_gib: float = FRAMEWORK_GIB
) -> MemoryEstimate:
    """Return the peak memory of a training step: of the backward pass or of the optimizer's step.

    Both hold the gradients of all parameters. `framework_gib` is δ, 0 on a node without GPU.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise UsageError(f"unknown optimizer {optimizer!r}; choose from {', '.join(OPTIMIZER_STATES)}")
    kept_bytes = features.activation_bytes + features.input_bytes
    gradients_bytes = max(features.working_bytes, features.gradient_bytes - features.activation_bytes)
    return MemoryEstimate(
        activations_gib=kept_bytes / GIB,
        parameters_gib=features.parameter_bytes / GIB,
        optimizer_gib=OPTIMIZER_STATES[optimizer] * features.gradient_bytes / GIB,
        gradients_gib=gradients_bytes / GIB,
        framework_gib=framework_gib,
    )
