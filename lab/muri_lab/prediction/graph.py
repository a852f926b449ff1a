"""Read a module's features: one training step on fake tensors, and its exported graph.

Fake tensors have a shape and no data: a step takes milliseconds and no memory, whatever the model's size. This module
imports PyTorch; import it only where a model is at hand.
"""

import copy
import logging
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from muri.errors import UsageError
from muri_lab.prediction.features import GraphFeatures

_CLASSES: Final = {
    "convolutions": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    "matmuls": "linear matmul mm bmm addmm baddbmm einsum bilinear addbmm __matmul__ __rmatmul__",
    "normalizations": "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm native_layer_norm",
    "attentions": "scaled_dot_product_attention multi_head_attention_forward",
    "recurrents": "rnn_tanh rnn_relu lstm gru rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell",
    "embeddings": "embedding embedding_bag",
    "elementwise": "relu gelu silu elu selu celu leaky_relu prelu hardtanh relu6 hardswish hardsigmoid mish softplus "
    "sigmoid tanh log_sigmoid softmax log_softmax add sub rsub mul div neg pow exp log sqrt rsqrt abs clamp "
    "clamp_min clamp_max where masked_fill dropout feature_dropout maximum minimum square sin cos "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__ __imul__ __truediv__ __pow__ __neg__",
}
_CLASS_OF: Final = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
_VIEWS: Final = (
    "view reshape flatten unflatten transpose permute t squeeze unsqueeze expand expand_as contiguous select slice "
    "narrow split chunk unbind getitem __getitem__ detach alias to size dim shape numel lift_fresh_copy "
    "movedim swapaxes view_as unfold_view clone zeros ones empty full arange zeros_like ones_like "
    "_assert_tensor_metadata split_with_sizes __get__ __len__ is_floating_point stride type float long register_hook "
    "requires_grad_ is_contiguous data_ptr"
)
_VIEW_NAMES: Final = frozenset(_VIEWS.split())
WEIGHTED: Final = frozenset({"convolutions", "matmuls", "attentions", "recurrents", "embeddings"})
"""Classes that count for the depth."""


class GraphError(UsageError):
    """The model's forward pass cannot be followed without data."""


def class_of(name: str) -> str | None:
    """Return the class of an operator, such as "convolutions" for "conv2d"; None for views, which compute nothing."""
    plain = name if name.startswith("__") else name.rstrip("_")
    if plain in _VIEW_NAMES:
        return None
    return _CLASS_OF.get(plain, "others")


def count(names: Iterable[str]) -> dict[str, int]:
    """How many operators of each class there are."""
    classes = (class_of(name) for name in names)
    return dict(Counter(kind for kind in classes if kind is not None))


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make until they are freed; those of fake tensors know their size."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0  # Alive at this moment
        self.peak_bytes = 0  # The most that was alive at once
        self.kernels = 0  # Operators that compute something (not views), forward and backward
        self.moved_bytes = 0  # Size of what these wrote
        self._known: set[int] = set()

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Don't count these (parameters, inputs): they are there before."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and count its results."""
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._count(tensor.untyped_storage())
        if made and not func.is_view:
            self.kernels += 1
            self.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in made)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in self._known:
            return
        self._known.add(identity)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._freed, identity, size)

    def _freed(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now_bytes -= size


class _Step(NamedTuple):
    """Figures of a training step on fake tensors."""

    forward_flops: int
    training_flops: int
    activation_bytes: int
    live: LiveBytes
    functions: tuple[str, ...]


def features_of(module: nn.Module, example_inputs: Sequence[Any]) -> GraphFeatures:
    """Return the features of a module's training step; nothing is computed, and the module is left as it is.

    Args:
        module: The model; it may be on the meta device.
        example_inputs: Positional arguments of its forward pass with the batch in the first dimension; only shapes and
            types count.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = _fake_copy(module, mode).train()
    inputs = tuple(_fake(value, mode) for value in example_inputs)
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)]
    if not tensors or tensors[0].dim() == 0:
        raise GraphError("the model's first input must be a tensor with the batch in its first dimension")
    step = _run(fake, inputs, mode)
    counts, depth, method = _operators(fake, inputs, mode, step.functions)
    return GraphFeatures(
        batch_size=tensors[0].shape[0],
        input_elements=sum(math.prod(item.shape[1:]) for item in tensors),
        input_bytes=sum(_size(item) for item in tensors),
        parameters=sum(item.numel() for item in module.parameters()),
        parameter_bytes=sum(_size(item) for item in (*module.parameters(), *module.buffers())),
        gradient_bytes=sum(_size(item) for item in module.parameters() if item.requires_grad),
        activation_bytes=step.activation_bytes,
        working_bytes=max(0, step.live.peak_bytes - step.activation_bytes),
        forward_flops=step.forward_flops,
        training_flops=step.training_flops,
        kernels=step.live.kernels,
        moved_bytes=step.live.moved_bytes,
        **counts,
        depth=depth,
        method=method,
    )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu", requires_grad=value.requires_grad)


def _fake_copy(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers are fake; tied ones stay tied."""
    stand_ins: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        fake = _fake(tensor.detach(), mode)
        is_parameter = isinstance(tensor, nn.Parameter)
        stand_ins[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(module, stand_ins)


class _Functions(TorchFunctionMode):
    """Notes the names of the functions that are called, the outermost only."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def _run(module: nn.Module, inputs: tuple[Any, ...], mode: FakeTensorMode) -> _Step:
    """Forward and backward pass on fake tensors."""
    live, functions = LiveBytes(), _Functions()
    own = [*module.parameters(), *module.buffers(), *(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))]
    live.ignore(own)
    kept = _Kept(own)
    # Without mkldnn recurrent layers show their matrix products, which the counter of FLOPs knows
    with (
        _told(),
        _quiet(),
        mode,
        torch.backends.mkldnn.flags(enabled=False),
        FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU) as flops,
        live,
    ):
        with torch.autograd.graph.saved_tensors_hooks(kept.add, _same):
            with functions:
                output = module(*inputs)
            loss = _loss(output)
        forward_flops = flops.get_total_flops()
        if loss is not None:
            torch.autograd.backward(loss)
    return _Step(forward_flops, flops.get_total_flops(), kept.size_bytes, live, tuple(functions.names))


class _Kept:
    """Sums up what autograd keeps, each storage once."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        self.size_bytes = 0
        self._alive = list(own)  # an address is unique only as long as what lives there
        self._seen = {tensor.untyped_storage()._cdata for tensor in own}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.size_bytes += storage.nbytes()
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _loss(output: Any) -> torch.Tensor | None:
    """Return a stand-in for the loss that keeps its inputs, as most do."""
    leaves = [item for item in tree_leaves(output) if isinstance(item, torch.Tensor) and item.requires_grad]
    return torch.stack([item.square().mean() for item in leaves]).sum() if leaves else None


@contextmanager
def _told() -> Iterator[None]:
    """Explain in the user's terms why a forward pass could not be followed."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if type(error).__name__ in {"DataDependentOutputException", "DynamicOutputShapeException"}:
            raise GraphError(
                f"the model's forward pass depends on its data ({reason}), so its features can't be read without "
                "running it; measure it with `muri profile run` instead"
            ) from error
        raise GraphError(
            f"the model's forward pass fails for these inputs: {type(error).__name__}: {reason}. "
            "Do shapes and types match the model's inputs?"
        ) from error


def _operators(
    module: nn.Module, inputs: tuple[Any, ...], mode: FakeTensorMode, functions: tuple[str, ...]
) -> tuple[dict[str, int], int, str]:
    """Operators by class, the depth, and the method: the exported graph, else the functions called."""
    graph = _exported(module, inputs, mode)
    if graph is None:
        counts = count(functions)
        return counts, sum(counts.get(kind, 0) for kind in WEIGHTED), "hooks"
    names = {node: _name(node.target) for node in graph.nodes if node.op == "call_function"}
    return count(names.values()), _longest(graph, names), "export"


def _exported(module: nn.Module, inputs: tuple[Any, ...], mode: FakeTensorMode) -> torch.fx.Graph | None:
    """The graph as torch.export sees it; None where it refuses, which it does for many reasons."""
    try:
        with _quiet(), mode:
            exported: torch.fx.Graph = torch.export.export(module, inputs).graph
            return exported
    except Exception:  # for many reasons; the functions that were called tell nearly the same
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch from printing graphs, tracebacks and warnings beside its exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _name(target: Any) -> str:
    """The operator's name: "conv2d" for aten.conv2d.default."""
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet or target, "__name__", target))


def _longest(graph: torch.fx.Graph, names: dict[torch.fx.Node, str]) -> int:
    """Weighted operators on the longest path; the nodes of a graph are in topological order."""
    depth: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        before = max((depth[source] for source in node.all_input_nodes), default=0)
        depth[node] = before + (class_of(names.get(node, "getitem")) in WEIGHTED)
    return max(depth.values(), default=0)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


_ATTENTION_ON_CPU: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""PyTorch's counter knows the formula but not that the CPU's fused kernel needs it."""
