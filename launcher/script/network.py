"""Hooks of the work on the network: collectives that a script calls, and `DistributedDataParallel`.

Collectives, and waits for asynchronous ones, are the stage `synchronize`. One thread per script sends DDP's gradients,
in the order in which backward hands them over. A member that waits for the network at the end of backward gives the GPU
back: two members that each hold the GPU of one rank and wait for the other rank would deadlock. `torch.compile` must
never see these hooks (`compute` says how); collectives that it takes into a graph are not a stage.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Callable, Final

import torch
from torch import distributed

from muri.launcher.job.script import after_import
from muri.launcher.job.stage_clock import SYNCHRONIZE
from muri.launcher.script.compute import is_compiling, leave_alone, pass_over
from muri.launcher.script.hooks import Watch, replace, switch_off, thread, watching

_COMMUNICATION_KEY: Final = "communication"

_COLLECTIVES_HOOK: Final = "torch.distributed"
COLLECTIVES: Final = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier"),
    *("recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "send", "send_object_list"),
)
_ALWAYS_ASYNCHRONOUS: Final = frozenset({"isend", "irecv", "batch_isend_irecv"})
_DDP_HOOK: Final = "DistributedDataParallel"
_REBUILDING_FORWARDS: Final = 3
"""DDP agrees on its buckets across ranks in one of its first forward passes."""


class Communication:
    """The communication thread of one script, a gated lane of its clock; `jobs` has what is not sent yet."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._work, name="communication", daemon=True).start()

    def submit(self, send: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Send in the communication thread, as the stage `synchronize`; the result is on the device of `like`."""
        devices = [like.device] if like.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
        self.jobs.put(lambda: self._do(send, future, stream))
        return future

    def _work(self) -> None:
        thread.busy = True
        while True:
            self.jobs.get()()  # keeps none, and so no gradients, while it waits for the next

    def _do(self, send: Callable[[], torch.Tensor], future: torch.futures.Future[torch.Tensor], stream: Any) -> None:
        clock = self._watch.clock
        try:
            with torch.cuda.stream(stream), torch.no_grad(), clock.lane():
                clock.enter(SYNCHRONIZE)
                try:
                    result = send()
                finally:
                    clock.leave()
                future.set_result(result)
        except BaseException as error:  # also the end of the script, while this waited for the network
            failure = error if isinstance(error, Exception) else RuntimeError(f"gradients were not sent: {error!r}")
            future.set_exception(failure)  # type: ignore[arg-type]
        finally:
            self.jobs.task_done()


def install_collectives() -> None:
    """Patch the collectives that this PyTorch has, where they are defined and where they are exported."""
    if not distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d  # not in every build

    hooks = {}
    for name in COLLECTIVES:
        plain = getattr(c10d, name, None)
        if plain is None:
            continue
        hooked = hooks[plain] = synchronizing(plain, asynchronous=name in _ALWAYS_ASYNCHRONOUS)
        for place in (c10d, distributed):
            if getattr(place, name, None) is plain:
                replace(place, name, hooked)
    wait = synchronizing(c10d.Work.wait, asynchronous=False)
    replace(c10d.Work, "wait", wait)
    pass_over(wait)
    leave_alone(globals(), _begin, _end)
    after_import("torch.distributed._functional_collectives", functools.partial(_share_rewrites, hooks))


def _share_rewrites(hooks: dict[Callable[..., Any], Callable[..., Any]], functional: ModuleType) -> None:
    """Let the compiler take hooked collectives into its graphs, as it does those that they replace."""
    rewrites = getattr(functional, "traceable_collective_remaps", {})  # (since PyTorch 2.1)
    rewrites.update({hooks[plain]: rewrite for plain, rewrite in rewrites.items() if plain in hooks})


def synchronizing(plain: Callable[..., Any], *, asynchronous: bool) -> Callable[..., Any]:
    """A collective that runs as a stage; of an asynchronous one, only `wait` is the stage."""

    @functools.wraps(plain)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or thread.busy:  # busy inside another collective, or inside a fetch
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
        communication: Communication | None = watch.memory.get(_COMMUNICATION_KEY)
        if communication is not None and communication.jobs.unfinished_tasks:  # they come first, on every rank
            with watch.clock.suspended():
                communication.jobs.join()
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


_senders: weakref.WeakKeyDictionary[Any, GradientSender] = weakref.WeakKeyDictionary()
_forwards: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class GradientSender:
    """The communication hook of one DDP module."""

    def __init__(self, module: Any) -> None:
        self._group = module.process_group
        self.settles_later = module.find_unused_parameters and not module.static_graph
        self.inner: tuple[Hook, Any] | None = None  # the hook that the script has registered, and its state

    def __getstate__(self) -> dict[str, Any]:
        """Copy nothing: a copied or unpickled module has no hook any more."""
        return {"inner": None}

    def start(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Send a bucket of gradients at once, as DDP or the script's hook would."""
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


def send_gradients(sender: GradientSender, bucket: Any) -> Any:
    """The function that DDP calls."""
    return _send(sender, bucket)


def _send(sender: GradientSender, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    watch = watching(_DDP_HOOK)
    if watch is None:
        return sender.start(bucket)
    communication: Communication | None = watch.memory.get(_COMMUNICATION_KEY)
    if communication is None:
        communication = watch.memory.setdefault(_COMMUNICATION_KEY, Communication(watch))
    future = communication.submit(lambda: sender.start(bucket).wait(), bucket.buffer())
    if bucket.is_last():
        with ExitStack() as waiting:
            elsewhere = watch.backward_thread not in {None, threading.get_ident()}
            waiting.enter_context(watch.clock.suspended(owner=elsewhere))
            communication.jobs.join()
            if sender.settles_later:  # DDP itself still tells the other ranks what was unused
                watch.after_backward.push(waiting.pop_all())
    return future


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
        if not is_compiling():
            _lend_sender(module, register)

    @functools.wraps(register)
    def register_comm_hook(module: Any, state: object, hook: Hook) -> None:
        sender = None if is_compiling() else _sender_of(module)
        if sender is None or sender.inner is not None:
            register(module, state, hook)
        else:
            module._check_comm_hook(hook)
            module.logger._set_comm_hook_name(hook.__qualname__)
            sender.inner = (hook, state)

    replace(ddp, "__init__", construct)
    replace(ddp, "register_comm_hook", register_comm_hook)
    pass_over(construct, register_comm_hook, send_gradients)
    pass_over(ddp._ddp_init_helper)  # Muri's, where models do not hold their process groups alone
    leave_alone(globals(), _lend_sender, _sender_of, _send)
    _install_builtin_hooks(ddp)
    _install_forward(ddp)


def _lend_sender(module: Any, register: Callable[..., None]) -> None:
    try:
        if watching(_DDP_HOOK) is None or module._comm_hooks or getattr(module, "mixed_precision", None) is not None:
            return
        if getattr(module, "_use_python_reducer", False):  # the compiler sends its gradients, and no buckets
            return
        sender = GradientSender(module)
        register(module, sender, send_gradients)
        _senders[module] = sender
    except Exception as error:
        switch_off(_DDP_HOOK, error)


def _sender_of(module: Any) -> GradientSender | None:
    return _senders.get(module)


def _install_builtin_hooks(ddp: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # (not in every build)

    fp16 = distributed.BuiltinCommHookType.FP16_COMPRESS  # type: ignore[attr-defined]
    plain = ddp._register_builtin_comm_hook

    @functools.wraps(plain)
    def register_builtin(module: Any, kind: Any) -> None:
        sender = None if is_compiling() else _sender_of(module)
        if sender is None:
            plain(module, kind)
        elif kind == fp16:
            sender.inner = (default_hooks.fp16_compress_hook, module.process_group)

    ddp._register_builtin_comm_hook = register_builtin
    pass_over(register_builtin)


def _install_forward(ddp: Any) -> None:
    if not hasattr(ddp, "_pre_forward"):  # before PyTorch 2.0: the buffers' broadcast counts as propagation
        return
    plain = ddp._pre_forward
    hooked = synchronizing(plain, asynchronous=False)

    @functools.wraps(plain)
    def pre_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        talks = not is_compiling() and _talks_before(module)
        return (hooked if talks else plain)(module, *args, **kwargs)

    ddp._pre_forward = pre_forward
    pass_over(pre_forward)
    leave_alone(globals(), _talks_before)


def _talks_before(module: Any) -> bool:
    """Whether DDP talks to the other ranks before this forward pass."""
    count = _forwards.get(module, 0)
    _forwards[module] = count + 1
    return bool(count < _REBUILDING_FORWARDS or module._check_sync_bufs_pre_fwd())
