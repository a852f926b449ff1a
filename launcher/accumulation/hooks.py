"""Hooks in PyTorch that let an unchanged training loop run on micro-batches.

Loaders hand out parts of a batch, backward passes are weighted, and what belongs to whole batches (optimizer steps,
`zero_grad`, schedules, gradient scaling and clipping, averaged models, DDP's exchange) waits for the last part. Every
hook calls PyTorch's own function in threads that do not split batches.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import Optimizer
from torch.utils.data import dataloader

from muri.launcher.accumulation.loop import SplitLoop, local

FETCH_AHEAD: Final = ("accelerate.data_loader", "lightning.pytorch.loops", "pytorch_lightning.loops")
"""Modules with loops that fetch a batch ahead of the one they train on; they have their own accumulation option."""

_OWNER: Final = "_muri_split_loop"
"""Attribute of a loader's iterator: the `SplitLoop` that it belongs to."""


class Patches:
    """The functions that replace PyTorch's own, and how to restore those."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []
        self._users = 0
        self._lock = threading.Lock()

    def wrap(self, place: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace one function; skip what this version of PyTorch lacks."""
        own = place.__dict__.get(name)
        if own is None:
            return
        plain = own.__func__ if isinstance(own, staticmethod) else own
        function: Any = functools.wraps(plain)(make(plain))
        if isinstance(own, staticmethod):
            function = staticmethod(function)
        setattr(place, name, function)
        self._done.append((place, name, own, function))

    def acquire(self, install: Callable[[], None]) -> None:
        """Install for the first of several users."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                install()

    def release(self) -> None:
        """Put everything back after the last user, unless other code replaced it since."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for place, name, own, function in reversed(self._done):
                if place.__dict__.get(name) is function:
                    setattr(place, name, own)
            self._done.clear()


patches: Final = Patches()


def install() -> None:
    """Put the hooks in place for the rest of the process."""
    patches.acquire(_install)


@contextmanager
def in_effect(steps: int) -> Iterator[None]:
    """Within the context, split what loaders give to the calling thread.

    Args:
        steps: Micro-batches per batch.
    """
    patches.acquire(_install)
    try:
        with local.looping(SplitLoop(steps)):
            yield
    finally:
        patches.release()


def _install() -> None:
    if not hasattr(Optimizer, "profile_hook_step"):
        raise NotImplementedError(f"batches are split from PyTorch 2.0 on; this is {torch.__version__}")
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # in torch.amp since 2.3
    # The script calls these itself, so only a patch can hand it parts and hold back what must wait for the last one.
    patches.wrap(dataloader._BaseDataLoaderIter, "__next__", _fetching)
    patches.wrap(torch.autograd, "backward", _weighting)
    patches.wrap(DistributedDataParallel, "forward", _exchanging_last)
    for owner in (Optimizer, torch.nn.Module):
        patches.wrap(owner, "zero_grad", _clearing)
    # Classes get their `step` wrapped when their first object is made; those that have one already are patched below.
    patches.wrap(Optimizer, "profile_hook_step", lambda plain: lambda step: _stepping(plain(step)))
    hooked: list[type] = [kind for kind in _family(Optimizer) if getattr(kind.__dict__.get("step"), "hooked", False)]
    for place in (*hooked, *_with_step_of_their_own(hooked)):
        patches.wrap(place, "step", _stepping)
    for schedule in _family(lr_scheduler.LRScheduler):
        patches.wrap(schedule, "step", _waiting)
    patches.wrap(swa_utils.AveragedModel, "update_parameters", _waiting)
    patches.wrap(scaler, "step", _scaled_stepping)
    for name in ("unscale_", "update"):
        patches.wrap(scaler, name, _waiting)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        patches.wrap(module, "clip_grad_norm_", _clipping)
        patches.wrap(module, "clip_grad_value_", _waiting)


def _family(root: type) -> Iterator[type]:
    yield root
    children: list[type] = root.__subclasses__()
    for child in children:
        yield from _family(child)


def _with_step_of_their_own(kinds: list[type]) -> list[Any]:
    """Optimizers made before the hooks, with a counting `step` that their schedule has put into the object."""
    found = gc.get_referrers(*kinds) if kinds else []
    return [thing for thing in found if type(thing) in kinds and "step" in vars(thing)]


def _fetching(plain: Callable[..., Any]) -> Callable[..., Any]:
    def next_batch(iterator: Any) -> Any:
        loop, owner = local.loop, vars(iterator).get(_OWNER)
        if owner is not None and owner is not loop:
            owner.lose("a loader is read in turn by several threads")
        if loop is None:
            return plain(iterator)
        if any(name in sys.modules for name in FETCH_AHEAD):
            loop.refuse("Lightning and Accelerate fetch batches ahead; use their own option to accumulate gradients")
        setattr(iterator, _OWNER, loop)
        fetch = functools.partial(plain, iterator)
        return loop.next_batch(iterator, iterator._dataset, fetch, training=torch.is_grad_enabled())

    return next_batch


def _weighting(plain: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> None:
        loop = local.loop
        if loop is None:
            plain(*args, **kwargs)
        else:
            loop.backward(plain, args, kwargs)

    return backward


def _stepping(plain: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        loop = local.loop
        closure = next((value for value in (*args, kwargs.get("closure")) if callable(value)), None)
        if loop is None or loop.may_step(closure=closure is not None):
            return plain(*args, **kwargs)
        with torch.enable_grad():
            return None if closure is None else closure()

    functools.update_wrapper(step, plain)
    step.hooked = True  # type: ignore[attr-defined] # so that PyTorch does not wrap it again
    return step


def _scaled_stepping(plain: Callable[..., Any]) -> Callable[..., Any]:
    def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        loop = local.loop
        return plain(scaler, *args, **kwargs) if loop is None or loop.may_step() else None

    return step


def _waiting(plain: Callable[..., Any]) -> Callable[..., Any]:
    def once_per_batch(*args: Any, **kwargs: Any) -> Any:
        return None if local.within_batch else plain(*args, **kwargs)

    return once_per_batch


def _clearing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        loop = local.loop
        if loop is None or not loop.keeps_gradients:
            plain(*args, **kwargs)

    return zero_grad


def _clipping(plain: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not local.within_batch:
            return plain(parameters, *args, **kwargs)
        return torch.zeros(())  # incomplete gradients have no norm yet

    return clip_grad_norm_


def _exchanging_last(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not (local.exchange_waits and torch.is_grad_enabled()):
            return plain(model, *args, **kwargs)
        with model.no_sync():  # DDP decides in forward whether backward exchanges gradients
            return plain(model, *args, **kwargs)

    return forward
