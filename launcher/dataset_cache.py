"""`muri.cache`: keeps a fixed part of a dataset in memory, so that every epoch hits for the same share.

Training reads each item once per epoch in random order. A cache that makes room for new items, such
as the page cache, throws away what comes round next; keeping what came first and replacing nothing
gives a hit rate of cache size over dataset size in every epoch (MinIO, in Synergy, section 3.1). It is also the
hit rate that `muri profile sensitivity` counts on.
"""

import logging
import math
import multiprocessing.context
import operator
import sys
from collections.abc import Sequence
from typing import Any, Final

from muri.errors import UsageError
from muri.launcher.item_bytes import decode, encode
from muri.launcher.shared_items import SharedItems

logger = logging.getLogger("muri.launcher")

GIB: Final = 1024**3


class CacheError(UsageError, ValueError):
    """A script asked for a cache that cannot be."""


def cache(dataset: Any, *, gib: float) -> "CachedDataset":
    """Keep items of a map-style dataset in memory, in all of its loader's workers, until `gib` are full.

    The first items that are read stay, and none is replaced. Wrap what reads and decodes; random
    augmentation belongs outside, or its first outcome is what every later epoch sees.

    Args:
        dataset: Has `__len__` and `__getitem__` with whole numbers, such as torch.utils.data.Dataset.
        gib: Most memory, in GiB, for all workers together.

    Returns:
        A dataset that gives equal items, and passes other attributes on to the wrapped one.

    Raises:
        CacheError: It is no map-style dataset, or gib is no sensible size.
    """
    return CachedDataset(dataset, gib)


class CachedDataset:
    """A map-style dataset, part of which is kept in shared memory.

    Attributes:
        dataset: The wrapped dataset.
        gib: Most memory, in GiB.
    """

    def __init__(self, dataset: Any, gib: float) -> None:
        length = _length(dataset)
        _check_size(gib, length)
        self.dataset = dataset
        self.gib = gib
        self._length = length
        self._items = SharedItems(length, int(gib * GIB))

    def __len__(self) -> int:
        """How many items the wrapped dataset has now."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """The item, kept or from the dataset; what is no position in it is the dataset's affair."""
        place = self._place(index)
        if place is None:
            return self.dataset[index]
        content = self._items.get(place)
        if content is not None:
            return decode(content)
        item = self.dataset[index]
        self._keep(place, item)
        return item

    @property
    def __getitems__(self) -> Any:
        """How a DataLoader fetches a whole batch; None where the wrapped dataset cannot."""
        return self._batch if callable(getattr(self.dataset, "__getitems__", None)) else None

    @property
    def hit_rate(self) -> float:
        """Share of the items that are kept: in every epoch from the second on, this share hits."""
        return self._items.kept / self._length if self._length else 0.0

    @property
    def kept(self) -> int:
        """How many items are kept."""
        return self._items.kept

    @property
    def used_gib(self) -> float:
        """Memory in use, at most `gib`."""
        return self._items.used_bytes / GIB

    def __getattr__(self, name: str) -> Any:
        """Whatever else the wrapped dataset has."""
        if name.startswith("__") or name == "dataset":  # copying and pickling ask before there is a dataset
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        """The same cache in a process that is being spawned; elsewhere a copy begins with an empty one."""
        state = self.__dict__.copy()
        if multiprocessing.context.get_spawning_popen() is None:
            del state["_items"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the spawned process, or in the copy."""
        self.__dict__.update(state)
        if "_items" not in state:
            self._items = SharedItems(self._length, int(self.gib * GIB))

    def _place(self, index: Any) -> int | None:
        try:
            place = operator.index(index)
        except TypeError:
            return None
        if place < 0:
            place += self._length
        return place if 0 <= place < self._length else None

    def _keep(self, place: int, item: Any) -> None:
        if not self._items.undecided(place):
            return
        try:
            content = encode(item)
        except Exception as error:  # pickling a foreign object may raise anything
            logger.warning("muri.cache: items such as number %d cannot be kept: %s", place, error)
            self._items.refuse(place)
            return
        self._items.put(place, content)

    def _batch(self, indices: Sequence[Any]) -> list[Any]:
        """Several items, those that are not kept in one call."""
        places = [self._place(index) for index in indices]
        contents = [None if place is None else self._items.get(place) for place in places]
        missed = [number for number, content in enumerate(contents) if content is None]
        read = self.dataset.__getitems__([indices[number] for number in missed]) if missed else ()
        fresh = dict(zip(missed, read, strict=True))
        for number, item in fresh.items():
            place = places[number]
            if place is not None:
                self._keep(place, item)
        return [fresh[number] if content is None else decode(content) for number, content in enumerate(contents)]


def _length(dataset: Any) -> int:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.IterableDataset):
        raise CacheError(
            f"muri.cache: {type(dataset).__name__} is an iterable dataset; only map-style ones, whose items have "
            "numbers, can be cached"
        )
    kind = type(dataset)
    lacks = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if isinstance(dataset, type) or lacks:
        what = f"the class {dataset.__name__}, not an object of it" if isinstance(dataset, type) else kind.__name__
        wanted = f"; it has no {' and no '.join(lacks)}" if lacks else ""
        raise CacheError(f"muri.cache needs a map-style dataset with __len__ and __getitem__, not {what}{wanted}")
    return len(dataset)


def _check_size(gib: float, length: int) -> None:
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not (math.isfinite(gib) and gib > 0):
        raise CacheError(f"muri.cache: gib is {gib!r}; give the memory in GiB, for example gib=4")
    needed = SharedItems.table_bytes(length)
    if needed >= gib * GIB:
        raise CacheError(
            f"muri.cache: gib={gib:g} is too little: the table of {length} items alone takes {needed / GIB:.3g} GiB"
        )
