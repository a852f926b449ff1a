"""Gives each session its own view of what Python has once per process.

Every patch asks `current_session()` and does what it always did in the runtime's own threads.
Nothing here knows of sockets or resources. docs/isolation.md says what is isolated, how, and what stays shared.
"""

from collections.abc import Callable
from typing import Final

from muri.launcher.context import SessionState
from muri.launcher.isolation import (
    autograd_threads,
    c_output,
    environment,
    exits,
    file_numbers,
    import_hooks,
    import_turns,
    interpreter,
    local_modules,
    log_configuration,
    log_handlers,
    numpy_random,
    process_group,
    process_settings,
    python_random,
    signals,
    streams,
    subprocesses,
    threads,
    torch_dtype,
    torch_flags,
    torch_random,
    torch_threads,
    warning_filters,
)
from muri.launcher.isolation.exits import SessionExit
from muri.launcher.isolation.threads import begin
from muri.launcher.isolation.torch_flags import on_propagate

__all__ = ["SessionExit", "begin", "forget_modules", "install", "on_propagate"]

_forget: Final[list[Callable[[SessionState], None]]] = []


def forget_modules(session: SessionState) -> None:
    """Drop what a session that ended still has: process groups, modules from its own directories, and the rest."""
    for function in _forget:
        function(session)
    session.belongings.clear()


def install() -> None:
    """Patch this process; call once, from its main thread, before any session starts."""
    for module in (import_hooks, streams, interpreter, environment, threads, signals, subprocesses):
        module.install()
    libraries = (python_random, numpy_random, torch_random, torch_dtype, torch_threads, torch_flags, autograd_threads)
    for library in (*libraries, process_group):
        library.install()
    file_numbers.install()
    threads.at_session_start(c_output.install().begin)
    modules = local_modules.install()
    import_turns.install(modules)
    exits.install(modules)
    log_configuration.install(modules)
    log_handlers.install()
    warning_filters.install()
    process_settings.install()
    _forget.extend((process_group.close, torch_dtype.forget, torch_flags.forget, modules.forget))
