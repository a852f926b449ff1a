"""Which class an operator belongs to, by the name that PyTorch gives it."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

_CLASSES: Final = {
    "convolutions": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    "matmuls": "linear matmul mm bmm addmm baddbmm einsum bilinear addbmm __matmul__ __rmatmul__",
    "normalisations": "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm native_layer_norm",
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


def class_of(name: str) -> str | None:
    """The class of an operator, such as "convolutions" for "conv2d".

    Args:
        name: The operator without namespace and overload; a trailing underscore (in place) does not matter.

    Returns:
        One of `OPERATOR_CLASSES`; None for views, which compute nothing.
    """
    plain = name if name.startswith("__") else name.rstrip("_")
    if plain in _VIEW_NAMES:
        return None
    return _CLASS_OF.get(plain, "others")


def count(names: Iterable[str]) -> dict[str, int]:
    """How many operators of each class there are."""
    classes = (class_of(name) for name in names)
    return dict(Counter(kind for kind in classes if kind is not None))
