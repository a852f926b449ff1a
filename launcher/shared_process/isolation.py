"""Gives each session its own view of the state that Python keeps once per process.

Every patched function asks `current_session()`; in the runtime's own threads it does what it always did.
Nothing here knows of sockets or resources. docs/shared-process.md says what is isolated, how, and what stays shared.
"""

from muri.launcher.shared_process import (
    interpreter,
    local_imports,
    logs_and_warnings,
    random_generators,
    signals_and_exits,
    standard_files,
    threads_and_processes,
    torch_settings,
)
from muri.launcher.shared_process.local_imports import LocalModules
from muri.launcher.shared_process.state import SessionState

_installed: list[LocalModules] = []


def install() -> None:
    """Patch this process; call once, from its main thread, before any session starts."""
    standard_files.install_streams()
    interpreter.install_interpreter()
    interpreter.install_environment()
    threads_and_processes.install_threads()
    threads_and_processes.install_executors()
    signals_and_exits.install_signals()
    threads_and_processes.install_subprocesses()
    # Libraries: each is patched when a script imports it.
    random_generators.install_python_random()
    random_generators.install_numpy_random()
    random_generators.install_torch_random()
    torch_settings.install_default_dtype()
    torch_settings.install_torch_threads()
    torch_settings.install_torch_flags()
    threads_and_processes.install_autograd_threads()
    standard_files.install_file_numbers()
    threads_and_processes.at_session_start(standard_files.install_c_output().begin)
    # The patches below must tell a script's own modules from installed ones.
    modules = local_imports.install_local_modules()
    local_imports.install_first_use()
    local_imports.install_import_turns(modules)
    signals_and_exits.install_exits(modules)
    logs_and_warnings.install_log_configuration(modules)
    logs_and_warnings.install_log_handlers()
    logs_and_warnings.install_warnings()
    interpreter.install_settings()
    threads_and_processes.install_dangers()
    _installed.append(modules)


def forget(session: SessionState) -> None:
    """Drop everything that an ended session still holds: its own modules, and the rest."""
    torch_settings.forget_default_dtype(session)
    torch_settings.forget_torch_flags(session)
    for modules in _installed:
        modules.forget(session)
    session.belongings.clear()
