"""The states of all random generators that a training script draws from, as plain JSON values."""

import base64
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def capture(generators: Iterable[Any] = ()) -> dict[str, Any]:
    """The states now: Python's, NumPy's and PyTorch's global generators and the given `torch.Generator` objects.

    Only libraries that the script has imported are looked at.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss]}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch is not None:
        state["torch"] = _text(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [_text(each) for each in torch.cuda.get_rng_state_all()]
    state["generators"] = [_text(generator.get_state()) for generator in generators]
    return state


def restore(state: Mapping[str, Any], generators: Iterable[Any] = ()) -> None:
    """Put the states back that `capture` returned.

    Args:
        state: What `capture` returned.
        generators: The same generators, in the same order.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import numpy as np  # (only for scripts that had it)

        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "torch" in state:
        import torch  # (only for scripts that had it)

        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all([_tensor(each) for each in state["cuda"]])
    for generator, text in zip(generators, state["generators"], strict=False):
        generator.set_state(_tensor(text))


def generators_of(loader: object) -> list[Any]:
    """The `torch.Generator` objects that a `DataLoader` shuffles with, each once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [getattr(holder, "generator", None) for holder in (loader, sampler, inner)]
    unique = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(unique.values())


def _text(tensor: Any) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
