"""`muri.accumulate`: splits a script's batches into micro-batches; their gradients add up to the whole batch's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from muri.launcher import automatic
from muri.launcher.accumulation.loop import local
from muri.launcher.accumulation.splitting import cut, sample_count, sizes_of
from muri.launcher.job.environment import AccumulateError, chosen_steps, declare


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

    `with muri.accumulate():` around a training loop that stays as it was lets hooks do the same;
    docs/scripts.md says what they ask of the loop.

    Args:
        steps: Number of micro-batches; None leaves it to the scheduler.

    Attributes:
        steps: That number. A batch with fewer samples is split into as many as it has.
        share: Samples of the current micro-batch over those of its batch.
        loss: Loss of the last batch, detached: its micro-batches' by share, as far as `backward` was given them.

    Raises:
        AccumulateError: `steps` is less than 1 or no whole number.
    """

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise AccumulateError(f"muri.accumulate({steps!r}): give a whole number of 1 or more, or nothing")
        local.become_explicit()
        if steps is None:
            declare()
        self.steps = chosen_steps() if steps is None else steps
        self.share = 1.0
        self.loss: Any = None
        self._hooks = ExitStack()
        if self.steps > 1 and _has_other_ranks():
            automatic.install_splitting_hooks()  # ranks exchange gradients with the last part only

    def __call__(self, batch: Any) -> Iterator[Any]:
        """The micro-batches of a batch, in order.

        Args:
            batch: What a loader gave: tensors, or mappings, lists, tuples and named tuples of them, which share
                their first dimension.

        Raises:
            UnsplittableError: The batch holds no tensor, or their lengths differ; never raised with one step.
        """
        self.loss, self.share = None, 1.0
        if self.steps == 1:
            yield batch
            return
        samples, start = sample_count(batch), 0
        sizes = sizes_of(samples, self.steps)
        for size in sizes:
            self.share = size / samples if samples else 1.0
            with local.partial(start + size < samples):
                yield cut(batch, start, start + size, samples)
            start += size

    def backward(self, loss: Any) -> None:
        """`loss.backward()`, weighted so that the micro-batches' gradients add up to the whole batch's.

        Args:
            loss: Mean over the samples of the micro-batch. Of a loss that is a sum call `backward()` itself.
        """
        weighted = loss if self.share == 1.0 else loss * self.share
        weighted.backward()
        self.loss = weighted.detach() if self.loss is None else self.loss + weighted.detach()

    def __enter__(self) -> accumulate:
        """Let hooks split what loaders give in this thread, from here on."""
        if self.steps > 1:
            from muri.launcher.accumulation import hooks  # imports torch, which a script may lack

            self._hooks.enter_context(hooks.in_effect(self.steps))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand out whole batches again."""
        self._hooks.close()


def _has_other_ranks() -> bool:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
