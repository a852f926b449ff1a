"""Hooks of the collectives that a script calls: they, and waits for asynchronous ones, are `synchronize`."""

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import distributed

from muri.launcher.automatic.communication import drain
from muri.launcher.automatic.watch import SYNCHRONIZE, Watch, replace, switch_off, thread, watching

_COLLECTIVES_HOOK: Final = "torch.distributed"
COLLECTIVES: Final = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
)
_ALWAYS_ASYNCHRONOUS: Final = frozenset({"isend", "irecv", "batch_isend_irecv"})


def install_collectives() -> None:
    """Patch what this PyTorch has of them, where it is defined and where it is exported."""
    if not distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d  # (not in every build)

    for name in COLLECTIVES:
        plain = getattr(c10d, name, None)
        if plain is None:
            continue
        hooked = synchronizing(plain, asynchronous=name in _ALWAYS_ASYNCHRONOUS)
        for place in (c10d, distributed):
            if getattr(place, name, None) is plain:
                replace(place, name, hooked)
    replace(c10d.Work, "wait", synchronizing(c10d.Work.wait, asynchronous=False))


def synchronizing(plain: Callable[..., Any], *, asynchronous: bool) -> Callable[..., Any]:
    """The collective as a stage, unless it only starts: then its work's `wait` is the stage."""

    @functools.wraps(plain)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if thread.busy:  # a part of another collective, or of a fetch
            return plain(*args, **kwargs)
        watch = _begin(gated=not (asynchronous or kwargs.get("async_op")))
        if watch is None:
            return plain(*args, **kwargs)
        thread.busy = True
        try:
            return plain(*args, **kwargs)
        finally:
            thread.busy = False
            _end(watch)

    return collective


def _begin(*, gated: bool) -> Watch | None:
    try:
        watch = watching(_COLLECTIVES_HOOK)
        if watch is None:
            return None
        drain(watch)  # what the communication thread still has to send comes first, on every rank
        if not gated:
            return None
        watch.clock.enter(SYNCHRONIZE)
    except Exception as error:
        switch_off(_COLLECTIVES_HOOK, error)
        return None
    return watch


def _end(watch: Watch) -> None:
    try:
        watch.clock.leave()
    except Exception as error:
        switch_off(_COLLECTIVES_HOOK, error)
