"""What a run on fake tensors would hold in memory and write."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not type it
    """Counts the storages that operators make until they are freed.

    The storages of fake tensors hold nothing but know their size, so this tells what a real run would hold.

    Attributes:
        now_bytes: Alive at this moment.
        peak_bytes: The most that was alive at once.
        kernels: Operators that compute something (not views), forward and backward.
        moved_bytes: Size of what these wrote.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not type it
        self.now_bytes = 0
        self.peak_bytes = 0
        self.kernels = 0
        self.moved_bytes = 0
        self._known: set[int] = set()

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Don't count these (parameters, inputs): they are there before."""
        for tensor in tensors:
            self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count what it made."""
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._count(tensor.untyped_storage())
        if made and not func.is_view:
            self.kernels += 1
            self.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in made)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in self._known:
            return
        self._known.add(identity)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._freed, identity, size)

    def _freed(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now_bytes -= size
