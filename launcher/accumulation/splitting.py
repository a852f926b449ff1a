"""Cuts a batch of tensors, mappings and sequences along its first dimension into parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muri.launcher.job.environment import AccumulateError


class UnsplittableError(AccumulateError):
    """A loader gave something that cannot be cut into parts."""


def sample_count(batch: Any) -> int:
    """Number of samples: the length of the first dimension, which all arrays of the batch share.

    Raises:
        UnsplittableError: There is no array in it, or arrays differ in length.
    """
    counts = set(_lengths(batch))
    if len(counts) != 1:
        found = ", ".join(map(str, sorted(counts))) or "none"
        raise UnsplittableError(f"a batch must hold tensors with one common first dimension (found: {found})")
    return counts.pop()


def sizes_of(samples: int, steps: int) -> list[int]:
    """Sizes of at most `steps` micro-batches, as equal as possible, larger ones first; none is empty.

    Returns:
        The sizes; a single 0 for a batch without samples.
    """
    steps = max(1, min(steps, samples))
    whole, rest = divmod(samples, steps)
    return [whole + (position < rest) for position in range(steps)]


def varied(sizes: list[int]) -> list[int]:
    """Unequal sizes for the same samples; two parts of two samples stay as they are.

    Only parts of different sizes show what a loss is taken over. From four samples on no part gets larger than before.
    """
    if len(set(sizes)) > 1:
        return sizes
    size = sizes[0]
    if size > 3:
        return [*sizes[:-1], size - 2, 2]
    if size == 3:
        return [4, *sizes[1:-1], 2]
    return [4, *sizes[2:]] if len(sizes) > 2 else sizes


def cut(batch: Any, start: int, stop: int, samples: int) -> Any:
    """The samples from `start` on, before `stop`, in the same structure; tensors are views, not copies.

    Args:
        batch: Tensors or arrays, or mappings, lists, tuples and named tuples of them.
        start: First sample.
        stop: One after the last.
        samples: `sample_count(batch)`; texts and other objects in a list of that length are one per sample.
    """
    if _is_array(batch):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return _like_mapping(batch, {key: cut(value, start, stop, samples) for key, value in batch.items()})
    if _is_sequence(batch):
        if not any(True for _ in _lengths(batch)) and len(batch) == samples:
            return batch[start:stop]
        return _like_sequence(batch, [cut(value, start, stop, samples) for value in batch])
    return batch


def _lengths(batch: Any) -> Iterator[int]:
    if _is_array(batch):
        yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths(value)
    elif _is_sequence(batch):
        for value in batch:
            yield from _lengths(value)


def _is_array(value: Any) -> bool:
    """A tensor or array with a first dimension; scalars belong to the whole batch."""
    return hasattr(value, "ndim") and hasattr(value, "shape") and value.ndim > 0


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _like_mapping(original: Any, values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    try:
        return type(original)(values)
    except Exception as error:
        raise UnsplittableError(f"a batch of type {type(original).__name__} cannot be made again: {error}") from error


def _like_sequence(original: Any, values: list[Any]) -> Any:
    try:
        if hasattr(original, "_fields"):
            return type(original)(*values)
        return type(original)(values)
    except Exception as error:
        raise UnsplittableError(f"a batch of type {type(original).__name__} cannot be made again: {error}") from error


@dataclass
class SplitBatch:
    """A batch that is being handed out in parts.

    Attributes:
        iterator: The loader's iterator that it came from.
        whole: The batch.
        sizes: Samples of each part.
        position: The part that the loop works on.
        backward: Whether the part's gradient was computed.
        step: Whether the script asked for the optimizer's step after it.
        stepped: Whether the optimizer stepped on the whole batch.
        undone: The parts so far do not count; the whole batch comes next.
    """

    iterator: weakref.ref[Any]
    whole: Any
    sizes: list[int]
    position: int = 0
    backward: bool = False
    step: bool = False
    stepped: bool = False
    undone: bool = False

    @property
    def last(self) -> bool:
        """Whether the loop works on the batch's last part."""
        return self.position == len(self.sizes) - 1

    def part(self) -> Any:
        """The part at the present position."""
        start = sum(self.sizes[: self.position])
        return cut(self.whole, start, start + self.sizes[self.position], sum(self.sizes))
