"""How much device memory a training step needs, from the model's features (Horus, section 4.3)."""

from dataclasses import dataclass
from typing import Final

from muri.errors import UsageError
from muri.profiler.prediction.features import GraphFeatures

OPTIMIZER_STATES: Final = {"sgd": 0, "momentum": 1, "adam": 2}
"""Values that an optimizer keeps for each trained parameter; "adam" stands for AdamW too."""

DEFAULT_OPTIMIZER: Final = "adam"

FRAMEWORK_GIB: Final = 0.5
"""δ: CUDA context and the libraries' workspaces in a process. Stated, not measured: it depends on GPU and driver
(0.3 to 0.6 GiB are usual), and PyTorch's own peak (`torch.cuda.max_memory_allocated`) does not contain it."""

_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The terms of M = (B·A + P) + B·G + δ, in GiB, with the optimizer's state beside the parameters.

    Attributes:
        activations_gib: B·A: the batch and what autograd keeps of it for the backward pass.
        parameters_gib: P: parameters and buffers.
        optimizer_gib: What the optimizer keeps for each parameter.
        gradients_gib: B·G: gradients alive at the peak, of activations and of parameters.
        framework_gib: δ.
    """

    activations_gib: float
    parameters_gib: float
    optimizer_gib: float
    gradients_gib: float
    framework_gib: float = FRAMEWORK_GIB

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
    """Peak memory of a training step.

    The peak is that of the backward pass, or the optimizer's step where that needs more: it holds the
    gradients of all parameters.

    Args:
        features: Of the model with its batch.
        optimizer: One of `OPTIMIZER_STATES`.
        framework_gib: δ; 0 on a node without GPU.

    Raises:
        UsageError: The optimizer is not known.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise UsageError(f"unknown optimizer {optimizer!r}; choose from {', '.join(OPTIMIZER_STATES)}")
    kept_bytes = features.activation_bytes + features.input_bytes
    gradients_bytes = max(features.working_bytes, features.gradient_bytes - features.activation_bytes)
    return MemoryEstimate(
        activations_gib=kept_bytes / _GIB,
        parameters_gib=features.parameter_bytes / _GIB,
        optimizer_gib=OPTIMIZER_STATES[optimizer] * features.gradient_bytes / _GIB,
        gradients_gib=gradients_bytes / _GIB,
        framework_gib=framework_gib,
    )
