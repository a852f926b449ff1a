"""Samples of a dataset as bytes and back, equal and independent of each other."""

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any


def encode(item: object) -> bytes:
    """An item as bytes.

    Raises:
        Exception: It cannot be pickled; which error depends on the item.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(item)
    return buffer.getvalue()


def decode(content: bytes) -> Any:
    """A new item, equal to the encoded one."""
    return pickle.loads(content)


class _Pickler(pickle.Pickler):
    """Pickles plain tensors as their own elements.

    PyTorch pickles the whole storage that a tensor looks into: a row of a large tensor would take
    the large tensor's size.
    """

    def reducer_override(self, value: Any) -> Any:
        """How to pickle a value; NotImplemented: as usual."""
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or not _is_plain(torch, value):
            return NotImplemented
        elements = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return _tensor, (value.dtype, tuple(value.shape), elements)


def _is_plain(torch: Any, value: Any) -> bool:
    return bool(
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    )


def _tensor(dtype: Any, shape: Sequence[int], elements: bytes) -> Any:
    import torch  # -- the core imports without PyTorch

    if not elements:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(elements), dtype=dtype).reshape(shape)
