"""Hooks of `DistributedDataParallel`: its gradients are sent by the script's communication thread.

While a member waits for the network at the end of backward it gives the GPU back: two members that each
hold the GPU of one rank and wait for the other's rank would block each other.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import distributed

from muri.launcher.automatic.collectives import synchronizing
from muri.launcher.automatic.communication import communication_of
from muri.launcher.automatic.watch import Watch, replace, switch_off, watching

_DDP_HOOK: Final = "DistributedDataParallel"
_REBUILDING_FORWARDS: Final = 3
"""DDP agrees on its buckets across ranks in one of its first forward passes."""

_senders: "weakref.WeakKeyDictionary[Any, GradientSender]" = weakref.WeakKeyDictionary()
_forwards: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class GradientSender:
    """The communication hook of one DDP module.

    Attributes:
        inner: The hook that the script has registered, and its state.
    """

    def __init__(self, module: Any) -> None:
        self._group = module.process_group
        self._settles_later = module.find_unused_parameters and not module.static_graph
        self.inner: tuple[Hook, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copied or unpickled module has no hook any more: nothing of this one is used there."""
        return {"inner": None}

    def __call__(self, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
        """Send a bucket of gradients."""
        watch = self._watch()
        if watch is None:
            return self._start(bucket)
        communication = communication_of(watch)
        future = communication.submit(lambda: self._start(bucket).wait(), bucket.buffer())
        if bucket.is_last():
            with ExitStack() as waiting:
                waiting.enter_context(watch.clock.suspended(owner=_waits_elsewhere(watch)))
                communication.wait_until_idle()
                if self._settles_later:  # DDP itself still tells the other ranks what was unused
                    watch.after_backward.push(waiting.pop_all())
        return future

    def _watch(self) -> Watch | None:
        try:
            return watching(_DDP_HOOK)
        except Exception as error:
            switch_off(_DDP_HOOK, error)
            return None

    def _start(self, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
        if self.inner is not None:
            hook, state = self.inner
            return hook(state, bucket)
        tensor, size = bucket.buffer(), self._group.size()
        if tensor.is_sparse:
            tensor.div_(size)
        else:
            tensor.mul_(1.0 / size)  # bit for bit what DDP does without a hook
        work = distributed.all_reduce(tensor, group=self._group, async_op=True)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future


def _waits_elsewhere(watch: Watch) -> bool:
    return watch.backward_thread not in {None, threading.get_ident()}


def send_gradients(sender: GradientSender, bucket: Any) -> Any:
    """The function that DDP calls."""
    return sender(bucket)


send_gradients.__annotations__.clear()  # DDP takes its own types or none


def install_data_parallel() -> None:
    """Patch DDP."""
    if not distributed.is_available():
        return
    ddp = torch.nn.parallel.DistributedDataParallel
    init, register = ddp.__init__, ddp.register_comm_hook

    @functools.wraps(init)
    def construct(module: Any, *args: Any, **kwargs: Any) -> None:
        init(module, *args, **kwargs)
        _lend_sender(module, register)

    @functools.wraps(register)
    def register_comm_hook(module: Any, state: object, hook: Hook) -> None:
        sender = _senders.get(module)
        if sender is None or sender.inner is not None:
            register(module, state, hook)
        else:
            module._check_comm_hook(hook)
            module.logger._set_comm_hook_name(hook.__qualname__)
            sender.inner = (hook, state)

    replace(ddp, "__init__", construct)
    replace(ddp, "register_comm_hook", register_comm_hook)
    _install_builtin_hooks(ddp)
    _install_forward(ddp)


def _lend_sender(module: Any, register: Callable[..., None]) -> None:
    try:
        if watching(_DDP_HOOK) is None or module._comm_hooks or getattr(module, "mixed_precision", None) is not None:
            return
        sender = GradientSender(module)
        register(module, sender, send_gradients)
        _senders[module] = sender
    except Exception as error:
        switch_off(_DDP_HOOK, error)


def _install_builtin_hooks(ddp: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # (not in every build)

    fp16 = distributed.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]
    plain = ddp._register_builtin_comm_hook

    @functools.wraps(plain)
    def register_builtin(module: Any, kind: Any) -> None:
        sender = _senders.get(module)
        if sender is None:
            plain(module, kind)
        elif kind == fp16:
            sender.inner = (default_hooks.fp16_compress_hook, module.process_group)

    ddp._register_builtin_comm_hook = register_builtin


def _install_forward(ddp: Any) -> None:
    plain = ddp._pre_forward
    hooked = synchronizing(plain, asynchronous=False)

    @functools.wraps(plain)
    def pre_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        count = _forwards.get(module, 0)
        _forwards[module] = count + 1
        talks = count < _REBUILDING_FORWARDS or module._check_sync_bufs_pre_fwd()
        return (hooked if talks else plain)(module, *args, **kwargs)

    ddp._pre_forward = pre_forward
