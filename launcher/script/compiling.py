"""Keeps hooks away from `torch.compile`.

The compiler must never see a hook: what it traced of one would split the script's graph, and the parts were seen to
give another result. So a hook does nothing while it `is_compiling`, the compiler begins behind the hooks that it meets
outside of a graph, and it leaves alone what they call on Muri's behalf. All this begins when a script first compiles
something: many only import the compiler, as optimizers do, and would pay for it in every call.
"""

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any, Callable, Final

import torch

from muri.launcher.job.import_hooks import after_import
from muri.launcher.script.hooks import guarded_installation, replace

_HOOK: Final = "torch.compile"

_tells_compiling: Final = getattr(getattr(torch, "compiler", None), "is_compiling", None) or getattr(
    torch._utils, "is_compiling", None
)
is_compiling: Final[Callable[[], bool]] = _tells_compiling or bool
"""Whether `torch.compile` traces the caller, which takes it for a constant; PyTorch before 2.1 cannot tell."""

_passed_over: Final[list[Any]] = []
_methods_passed_over: Final[list[tuple[Any, str]]] = []
_left_alone: Final[list[tuple[dict[str, Any], str]]] = []
_fallbacks: Final[list[Callable[[], None]]] = []
_lock: Final = threading.Lock()


def pass_over(*hooks: Callable[..., Any]) -> None:
    """Let the compiler begin behind these functions, at what they call, as it does without hooks.

    Args:
        hooks: Any copy of each: the copies of one hook share its code.
    """
    _passed_over.extend(hooks)


def pass_over_method(place: Any, name: str) -> None:
    """Let the compiler begin behind what a class has by this name by then; other parts of Muri may replace it later."""
    _methods_passed_over.append((place, name))


def leave_alone(namespace: dict[str, Any], *functions: Callable[..., Any]) -> None:
    """Keep the compiler out of these functions and of all that they call.

    Args:
        namespace: The global names of the module whose hooks call them; it gets others in their place.
        functions: They have their own names there.
    """
    _left_alone.extend((namespace, function.__name__) for function in functions)


def unless_hidden(restore: Callable[[], None]) -> None:
    """Call this where hooks cannot be hidden, before the script first compiles something."""
    _fallbacks.append(restore)


def install() -> None:
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
        for restore in _fallbacks:
            restore()
        return
    for hook in [*_passed_over, *(getattr(place, name) for place, name in _methods_passed_over)]:
        skip(hook.__code__)
    for namespace, name in _left_alone:
        namespace[name] = compiler.disable(namespace[name])
