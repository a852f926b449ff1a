"""Hooks of the work on the GPU, and how hooks hide from `torch.compile`.

Forward, backward and optimizer step are the stage `propagate`. The compiler must never see a hook: a traced hook would
split the script's graph, and the parts were seen to give another result. So a hook does nothing while it
`is_compiling`, the compiler begins behind the hooks that it meets outside of a graph, and it leaves the calls on Muri's
behalf alone. All this begins when a script first compiles something: many only import the compiler, as optimizers do,
and would pay for it in every call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer

from muri.launcher.job.script import after_import
from muri.launcher.script.hooks import (
    BACKWARD_HOOK,
    Watch,
    begin_propagate,
    end_propagate,
    guarded_installation,
    offer_to_yield,
    replace,
    switch_off,
    thread,
    watching,
)

_STEP_HOOK: Final = "optimizer step"

MAX_GRADIENT_HOOKS: Final = 64
"""At how many of an optimizer's parameters, evenly spread, backward offers to yield."""

_plain_call: Final = torch.nn.Module.__call__


def install() -> None:
    """Patch PyTorch."""
    _install_forward()
    _install_backward()
    _install_step()
    leave_alone(globals(), begin_propagate, end_propagate, offer_to_yield)
    leave_alone(globals(), _begin_waiting, _end_waiting, _after_step, _note_optimizer)
    pass_over(_gradient_done)


def _install_forward() -> None:
    plain = _plain_call

    # A patched call costs a third of a global forward pre-hook, which takes every module off its fast path.
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return plain(module, *args, **kwargs)
        if thread.depth:
            offer_to_yield("forward")
            return plain(module, *args, **kwargs)
        if thread.busy:
            return plain(module, *args, **kwargs)
        watch = begin_propagate("forward", module=module, evaluated=not (module.training and torch.is_grad_enabled()))
        if watch is None:
            return plain(module, *args, **kwargs)
        try:
            return plain(module, *args, **kwargs)
        finally:
            end_propagate("forward", watch)

    replace(torch.nn.Module, "__call__", functools.wraps(plain)(call))
    pass_over(call)


def _install_backward() -> None:
    for name in ("backward", "grad"):  # Tensor.backward looks it up here
        hooked = _in_backward(getattr(torch.autograd, name), trains=name == "backward")
        replace(torch.autograd, name, hooked)
    pass_over(hooked)


def _in_backward(plain: Callable[..., Any], *, trains: bool) -> Callable[..., Any]:
    @functools.wraps(plain)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or thread.busy:
            return plain(*args, **kwargs)
        watch = begin_propagate(BACKWARD_HOOK, trained=trains, joins=True)
        try:
            waiting = _begin_waiting()
            try:
                return plain(*args, **kwargs)
            finally:
                if waiting is not None:
                    _end_waiting(waiting)
        finally:
            if watch is not None:
                end_propagate(BACKWARD_HOOK, watch)

    return hooked


def _begin_waiting() -> Watch | None:
    """Tell the hooks that autograd calls, perhaps in its own threads, which thread waits for it."""
    watch = watching("DistributedDataParallel")
    if watch is None or watch.backward_thread is not None:
        return None
    watch.backward_thread = threading.get_ident()
    return watch


def _end_waiting(watch: Watch) -> None:
    watch.backward_thread = None
    watch.after_backward.close()


def _install_step() -> None:
    if not hasattr(Optimizer, "profile_hook_step"):
        _install_step_before_2_0()
        return
    plain = Optimizer.profile_hook_step
    plain_patch = Optimizer._patch_step_function

    @functools.wraps(plain_patch)
    def patch_step_function(optimizer: Any) -> None:  # when an optimizer is made, copied or unpickled
        plain_patch(optimizer)
        _note_optimizer()

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        return plain(_step_in_stage(step))

    # Every optimizer class has its `step` wrapped with this when its first object is made.
    replace(Optimizer, "profile_hook_step", staticmethod(profile_hook_step))
    replace(Optimizer, "_patch_step_function", patch_step_function)
    pass_over(_step_in_stage(Optimizer.step), patch_step_function, profile_hook_step)


def _note_optimizer() -> None:
    watch = watching(_STEP_HOOK)
    if watch is not None:
        watch.iterations.made()


def _install_step_before_2_0() -> None:
    base: Any = Optimizer
    plain = base._hook_for_profile

    # Each object calls this when it is made; PyTorch marks the class whose `step` it has wrapped.
    @functools.wraps(plain)
    def hook_for_profile(optimizer: Any) -> None:
        kind = type(optimizer)
        if not getattr(kind.step, "hooked", None):
            kind.step = _step_in_stage(kind.step)
        plain(optimizer)
        _note_optimizer()

    replace(base, "_hook_for_profile", hook_for_profile)


def _step_in_stage(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or thread.depth or thread.busy:
            return step(optimizer, *args, **kwargs)
        watch = begin_propagate(_STEP_HOOK, trained=True, joins=True)
        if watch is None:
            return step(optimizer, *args, **kwargs)
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            end_propagate(_STEP_HOOK, watch)
        _after_step(optimizer)
        return result

    return stepping


def _after_step(optimizer: Any) -> None:
    try:
        watch = watching(_STEP_HOOK)
        if watch is not None:
            if watch.clock.shared:
                _let_gradients_yield(optimizer)
            watch.iterations.stepped(optimizer)
    except Exception as error:
        switch_off(_STEP_HOOK, error)


_yielding: weakref.WeakSet[Any] = weakref.WeakSet()


def _let_gradients_yield(optimizer: Any) -> None:
    """From the second backward on, gradients of the optimizer's parameters are yield points."""
    if optimizer in _yielding or not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):  # (since PyTorch 2.1)
        return
    _yielding.add(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_leaf]
    for parameter in parameters[:: max(1, -(-len(parameters) // MAX_GRADIENT_HOOKS))]:
        parameter.register_post_accumulate_grad_hook(_gradient_done)


def _gradient_done(_parameter: torch.Tensor) -> None:
    if not is_compiling() and thread.depth:
        offer_to_yield("backward")


_HOOK: Final = "torch.compile"

_tells_compiling: Final = getattr(getattr(torch, "compiler", None), "is_compiling", None) or getattr(
    torch._utils, "is_compiling", None
)
is_compiling: Final[Callable[[], bool]] = _tells_compiling or bool
"""Whether `torch.compile` traces the caller, which takes it for a constant; PyTorch before 2.1 cannot tell."""

_passed_over: Final[list[Any]] = []
_left_alone: Final[list[tuple[dict[str, Any], str]]] = []
_lock: Final = threading.Lock()


def pass_over(*hooks: Callable[..., Any]) -> None:
    """Let the compiler begin behind these hooks, at the functions that they call; copies of a hook share its code."""
    _passed_over.extend(hooks)


def leave_alone(namespace: dict[str, Any], *functions: Callable[..., Any]) -> None:
    """Keep the compiler out of functions and of all that they call, by other ones under their names in a namespace."""
    _left_alone.extend((namespace, function.__name__) for function in functions)


def hide_from_compiler() -> None:
    """Hide all hooks when the script first compiles something; call when it is known which ones there are."""
    after_import("torch._dynamo", _await_first_use)


def _await_first_use(compiler: ModuleType) -> None:
    """Hide the hooks when the compiler makes its first context: it looks at no frame without one."""
    context = getattr(compiler.eval_frame, "OptimizeContext", None)
    if context is None:
        _hide(compiler)
        return
    plain = context.__init__

    @functools.wraps(plain)
    def construct(made: Any, *args: Any, **kwargs: Any) -> None:
        with _lock:
            if context.__init__ is construct:
                guarded_installation(_HOOK, functools.partial(_hide, compiler))
                replace(context, "__init__", plain)
        plain(made, *args, **kwargs)

    replace(context, "__init__", construct)


def _hide(compiler: ModuleType) -> None:
    skip = getattr(compiler.eval_frame, "skip_code", None)
    if _tells_compiling is None or skip is None:
        replace(torch.nn.Module, "__call__", _plain_call)
        return
    for hook in _passed_over:
        skip(hook.__code__)
    for namespace, name in _left_alone:
        namespace[name] = compiler.disable(namespace[name])
