"""The default process group of `torch.distributed`: each session has its own, shared by the threads it starts.

`torch.distributed` keeps its groups in one object per process, `distributed_c10d._world`. A stand-in leads to the
session's. A table in C++ holds the names of all groups, so a session's names carry its member's id.
"""

import contextlib
import logging
import weakref
from types import FunctionType, ModuleType
from typing import Any, Final

from muri.launcher.job.import_hooks import after_import
from muri.launcher.job.session import PerSession, SessionState, current_session

logger = logging.getLogger("muri.launcher")

_WITH_DEFAULT_GROUP: Final = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
"""Modules with `group=group.WORLD` as a default argument that scripts may import only after they have a group."""

_TABLES: Final = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
)


class World:
    """The process groups of one session; its attributes are those of `distributed_c10d._World`."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        self.registered: list[str] = []
        for name in _TABLES:
            setattr(self, name, {})


_worlds: PerSession[World] = PerSession(World)


class WorldProxy:
    """Replaces `distributed_c10d._world`."""

    def __init__(self, plain: Any) -> None:
        self.__dict__["_plain"] = plain

    def _target(self) -> Any:
        session = current_session()
        return self._plain if session is None else _worlds.of(session)

    def __getattr__(self, name: str) -> Any:
        """Read from the session's groups; compute from them whatever this PyTorch has as a property."""
        target = self._target()
        computed = getattr(type(self._plain), name, None)
        if isinstance(target, World) and not hasattr(target, name) and isinstance(computed, property):
            return computed.fget(target)  # type: ignore[misc]
        return getattr(target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(), name, value)


def _patch_names(c10d: Any) -> None:
    plain_name, register = c10d._process_group_name, c10d._register_process_group
    unregister, unregister_all = c10d._unregister_process_group, c10d._unregister_all_process_groups

    def process_group_name(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        name = plain_name(*args, **kwargs)
        return name if session is None else f"{name}@{session.member}"

    def register_process_group(name: str, group: Any) -> None:
        register(name, group)
        session = current_session()
        if session is not None:
            _worlds.of(session).registered.append(name)

    def unregister_process_group(name: str) -> None:
        session = current_session()
        if session is not None and name in (own := _worlds.of(session).registered):
            own.remove(name)
        unregister(name)

    def unregister_all_process_groups() -> None:
        session = current_session()
        if session is None:
            unregister_all()
            return
        own = _worlds.of(session).registered
        while own:
            unregister(own.pop())

    c10d._process_group_name = process_group_name
    c10d._register_process_group = register_process_group
    c10d._unregister_process_group = unregister_process_group
    c10d._unregister_all_process_groups = unregister_all_process_groups


def _patch(c10d: Any) -> None:
    if not hasattr(c10d, "_world") or not hasattr(c10d, "_WorldMeta"):
        logger.warning("this PyTorch is too old: only one member of the group may call init_process_group")
        return
    c10d._world = WorldProxy(c10d._world)
    _patch_names(c10d)


_kept_groups: Final[dict["weakref.ref[Any]", Any]] = {}


def _keep_groups(module: ModuleType) -> None:
    """Let no DistributedDataParallel be the last to hold its process group.

    Its reducer, in C++, would wait for the end of gloo's threads while it holds the interpreter's lock, and one of them
    may want that lock to drop a tensor: the whole process would hang. Python's own reference gives the lock away.
    """
    model = module.DistributedDataParallel
    plain = model._ddp_init_helper

    def make_reducer(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, *args, **kwargs)
        for holder in (self.reducer, self.logger):  # the logger holds the reducer, too
            if holder is not None:
                _kept_groups[weakref.ref(holder, _kept_groups.pop)] = self.process_group
        return made

    model._ddp_init_helper = make_reducer


def _forget_default_arguments(module: ModuleType) -> None:
    """Clear default arguments that hold a session's group, because all sessions share the function.

    PyTorch takes None for the default group, too.
    """
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for holder in (module, *classes):
        for function in vars(holder).values():
            defaults = getattr(function, "__defaults__", None)
            if isinstance(function, FunctionType) and defaults:
                function.__defaults__ = tuple(None if _is_group(value) else value for value in defaults)


def _is_group(value: Any) -> bool:
    return type(value).__name__.startswith("ProcessGroup")


def close_process_groups(session: SessionState) -> None:
    """Tear down the groups that a script left, as the end of its process would: otherwise its peers would wait."""
    world = session.belongings.pop(_worlds, None)
    if world is None or world.default_pg is None:
        return
    for group in sorted(world.pg_names, key=world.pg_names.get, reverse=True):
        with contextlib.suppress(Exception):  # a group may be broken already
            getattr(group, "abort", group.shutdown)()
    for name in list(world.registered):
        with contextlib.suppress(Exception):
            _unregister(name)
    world.__dict__.clear()


def _unregister(name: str) -> None:
    from torch._C._distributed_c10d import _unregister_process_group  # the session has used torch

    _unregister_process_group(name)  # type: ignore[arg-type, unused-ignore] # a NewType of str in the stubs


def install_process_groups() -> None:
    """Patch `torch.distributed` once it is imported."""
    after_import("torch.distributed.distributed_c10d", _patch)
    after_import("torch.nn.parallel.distributed", _keep_groups)
    for name in _WITH_DEFAULT_GROUP:
        after_import(name, _forget_default_arguments)
