"""`muri.accumulate`: splits a script's batches into micro-batches; their gradients add up to the whole batch's."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from muri.launcher.job.environment import AccumulateError, chosen_steps, leaves_steps_to_scheduler


class UnsplittableError(AccumulateError):
    """A loader gave something that cannot be cut into parts."""


_thread: Final = threading.local()
"""Its `more_to_come` tells whether the calling thread's micro-batch is not the last one of its batch."""


class accumulate:
    """Run each batch as `steps` micro-batches, with the gradient of the whole batch and the memory of one part.

    ::

        accumulate = muri.accumulate()          # as many as the scheduler chose; 1 outside of Muri
        for batch in loader:
            optimizer.zero_grad()
            for inputs, targets in accumulate(batch):
                accumulate.backward(loss_function(model(inputs), targets))
            optimizer.step()
            print(accumulate.loss)              # the whole batch's

    Args:
        steps: Number of micro-batches; None leaves it to the scheduler.

    Attributes:
        steps: That number. A batch with fewer samples is split into as many as it has.
        share: Samples of the current micro-batch over those of its batch.
        loss: Loss of the last batch, detached: its micro-batches' by share, as far as `backward` was given them.

    Raises:
        AccumulateError: `steps` is not a whole number of 1 or more.
    """

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise AccumulateError(f"muri.accumulate({steps!r}): give a whole number of 1 or more, or nothing")
        if steps is None:
            leaves_steps_to_scheduler.set()
        self.steps = chosen_steps() if steps is None else steps
        self.share = 1.0
        self.loss: Any = None
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        if self.steps > 1 and distributed is not None and distributed.is_available() and distributed.is_initialized():
            _let_exchanges_wait()

    def __call__(self, batch: Any) -> Iterator[Any]:
        """Yield the micro-batches of a batch, in order.

        Args:
            batch: Tensors, or mappings, lists, tuples and named tuples of them, which share their first dimension.

        Raises:
            UnsplittableError: The batch holds no tensor, or their lengths differ; never raised with one step.
        """
        self.loss, self.share = None, 1.0
        if self.steps == 1:
            yield batch
            return
        samples, start = sample_count(batch), 0
        for size in sizes_of(samples, self.steps):
            self.share = size / samples if samples else 1.0
            _thread.more_to_come = start + size < samples
            try:
                yield cut(batch, start, start + size, samples)
            finally:
                _thread.more_to_come = False
            start += size

    def backward(self, loss: Any) -> None:
        """Call `loss.backward()`, weighted so that the micro-batches' gradients add up to the whole batch's.

        The loss is a mean over the samples of the micro-batch. Of a loss that is a sum call `backward()` itself.
        """
        weighted = loss if self.share == 1.0 else loss * self.share
        weighted.backward()
        self.loss = weighted.detach() if self.loss is None else self.loss + weighted.detach()

    def __enter__(self) -> NoReturn:
        """Refuse the form of 0.2."""
        raise AccumulateError(
            "`with muri.accumulate():` was removed in 0.3: go through the micro-batches in the loop, "
            "`for part in accumulate(batch):` (docs/scripts.md)"
        )

    def __exit__(self, *_error: object) -> None:
        """Never called; `with` looks for it."""


def _let_exchanges_wait() -> None:
    """Let ranks exchange gradients with the last micro-batch only; a second call changes nothing."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    kind: Any = DistributedDataParallel
    plain = kind.forward
    if hasattr(plain, "muri_waits"):
        return

    @functools.wraps(plain)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not (getattr(_thread, "more_to_come", False) and torch.is_grad_enabled()):
            return plain(model, *args, **kwargs)
        with model.no_sync():  # DDP decides in forward whether backward exchanges gradients
            return plain(model, *args, **kwargs)

    forward.muri_waits = True  # type: ignore[attr-defined]
    kind.forward = forward


def sample_count(batch: Any) -> int:
    """Return the length of the first dimension, which all arrays of the batch must share."""
    counts = set(_lengths(batch))
    if len(counts) != 1:
        lengths = ", ".join(map(str, sorted(counts))) or "none"
        raise UnsplittableError(f"a batch must hold tensors with one common first dimension (found: {lengths})")
    return counts.pop()


def sizes_of(samples: int, steps: int) -> list[int]:
    """Return the sizes of at most `steps` micro-batches, as equal as possible, larger ones first; [0] for none."""
    steps = max(1, min(steps, samples))
    whole, rest = divmod(samples, steps)
    return [whole + (position < rest) for position in range(steps)]


def cut(batch: Any, start: int, stop: int, samples: int) -> Any:
    """Return the samples from `start` on, before `stop`, in the same structure; tensors are views, not copies.

    `samples` is `sample_count(batch)`; texts and other objects in a list of that length are one per sample.
    """
    if _is_array(batch):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        values = {key: cut(value, start, stop, samples) for key, value in batch.items()}
        return values if type(batch) is dict else _made_again(batch, values)
    if _is_sequence(batch):
        if not any(True for _ in _lengths(batch)) and len(batch) == samples:
            return batch[start:stop]
        parts = [cut(value, start, stop, samples) for value in batch]
        return _made_again(batch, *parts) if hasattr(batch, "_fields") else _made_again(batch, parts)
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


def _made_again(original: Any, *content: Any) -> Any:
    try:
        return type(original)(*content)
    except Exception as error:
        raise UnsplittableError(f"a batch of type {type(original).__name__} cannot be made again: {error}") from error
