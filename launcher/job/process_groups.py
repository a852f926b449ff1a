"""Lets a DistributedDataParallel model be dropped at any time without a halt of the process."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any, Final

from muri.launcher.job.import_hooks import after_import

_kept: Final[dict[weakref.ref[Any], Any]] = {}


def keep_process_groups() -> None:
    """Let no such model be the last to hold its process group, from the import of PyTorch's module on.

    Its reducer, in C++, would wait for the end of gloo's threads while it holds the interpreter's lock, and one of them
    may want that lock to drop a tensor: the whole process would stop. Python's own reference gives the lock away.
    """
    after_import("torch.nn.parallel.distributed", _keep_groups)


def _keep_groups(module: ModuleType) -> None:
    model = module.DistributedDataParallel
    plain = model._ddp_init_helper

    def make_reducer(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, *args, **kwargs)
        for holder in (self.reducer, self.logger):  # the logger holds the reducer, too
            if holder is not None:
                _kept[weakref.ref(holder, _kept.pop)] = self.process_group
        return made

    model._ddp_init_helper = make_reducer
