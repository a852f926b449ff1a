"""Follows a training loop while its loader hands out micro-batches, and decides which calls pass through.

A batch is split when the script asks a loader for it. Optimizer steps, and all that belongs to them, wait until the
loader has handed out its last part. A sign that the loop cannot be split ends the splitting: the parts so far are
undone, and the batch is handed out once more, whole. `local` tells each thread its loop; nothing here imports PyTorch
before the script does.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from muri.launcher.accumulation.losses import Shares, UnknownLossError
from muri.launcher.accumulation.splitting import SplitBatch, UnsplittableError, cut, sample_count, sizes_of, varied
from muri.launcher.job.environment import hooked_steps
from muri.launcher.threads import current_script

_MOST_NODES: Final = 100_000

_LEAST_SAMPLES = 2
"""Least samples of a part: layers that normalize over samples refuse a single one."""

_ADVICE = "use muri.accumulate() in the script (docs/scripts.md)"


class Gradients:
    """Follows the parameters of one loop, and whether the gradients that its parts accumulated are still there.

    Attributes:
        batch_norm: Whether the graph normalizes over the samples of a micro-batch.
    """

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[Any]] = []
        self._mark: tuple[weakref.ref[Any], int, int] | None = None
        self.batch_norm = False

    def look_at(self, loss: Any) -> None:
        """Learn the parameters from the loss's graph; costs a walk through it the first time only."""
        if self._parameters:
            return
        for node in _nodes(loss.grad_fn):
            if hasattr(node, "variable"):
                self._parameters.append(weakref.ref(node.variable))
            elif "BatchNorm" in node.name():
                self.batch_norm |= bool(getattr(node, "_saved_training", True))

    def mark(self) -> None:
        """Remember what was accumulated so far."""
        for parameter in self._alive():
            if parameter.grad is not None:
                self._mark = (weakref.ref(parameter), id(parameter.grad), parameter.grad._version)
                return

    @property
    def untouched(self) -> bool:
        """Whether what was accumulated has been neither cleared nor changed since the last `mark`."""
        if self._mark is None:
            return True
        reference, identity, version = self._mark
        parameter = reference()
        if parameter is None or parameter.grad is None:
            return False
        return id(parameter.grad) == identity and parameter.grad._version == version

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for parameter in self._alive():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clear(self) -> None:
        """Undo what was accumulated; a script that looks at its gradients still finds some."""
        self._mark = None
        for parameter in self._alive():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def forget_mark(self) -> None:
        """A new batch begins."""
        self._mark = None

    def _alive(self) -> Iterator[Any]:
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None:
                yield parameter


def _nodes(root: Any) -> Iterator[Any]:
    seen, stack = {root}, [root]
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


class SplitLoop:
    """The state of one thread's training loop while its batches are split.

    Args:
        steps: Micro-batches per batch.
        notify: Tells the user.
    """

    def __init__(self, steps: int, notify: Callable[[str], None] | None = None) -> None:
        self._steps = steps
        self._notify = notify or (lambda text: print(f"muri: {text}", file=sys.stderr, flush=True))
        self._batch: SplitBatch | None = None
        self._again: dict[int, Any] = {}
        self._whole_for: set[int] = set()
        self._refused = False
        self._inside = False
        self._verified = False
        self._gradients = Gradients()
        self._shares = Shares(1)
        self._told_of_batch_norm = False

    @property
    def within_batch(self) -> bool:
        """Whether what belongs to a whole batch (steps, schedules) has to wait."""
        batch = self._current()
        return batch is not None and (batch.undone or not batch.last)

    @property
    def keeps_gradients(self) -> bool:
        """Whether `zero_grad` would clear what parts have accumulated and no step has used."""
        batch = self._current()
        return batch is not None and not (batch.stepped or batch.undone) and (batch.position > 0 or batch.backward)

    def next_batch(self, iterator: Any, source: Any, fetch: Callable[[], Any], *, training: bool) -> Any:
        """What the loop gets next from a loader.

        Args:
            iterator: The loader's iterator.
            source: Its dataset.
            fetch: Gets the loader's next batch.
            training: Whether gradients are recorded.
        """
        batch = self._current()
        if batch is not None and batch.iterator() is iterator:
            more = self._continue(batch, source)
            if more is not None:
                return more
        elif batch is not None and training and not batch.stepped and self._is_second(batch):
            self._again[id(iterator)] = fetch()
            return self._again[id(iterator)]
        if id(iterator) in self._again:
            return self._again.pop(id(iterator))
        whole = fetch()
        if self._refused or not training or id(source) in self._whole_for:
            return whole
        return self._begin(iterator, whole)

    def backward(self, plain: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a backward pass of the script, weighted by the part's share of the batch."""
        batch = self._current()
        if batch is None or self._inside or batch.stepped:
            plain(*args, **kwargs)
            return
        self._inside = True
        try:
            if batch.undone or not self._weighted(batch, plain, args, kwargs):
                plain(*args, **kwargs)  # the script may look at gradients
                self._gradients.clear()
        finally:
            self._inside = False

    def may_step(self, *, closure: bool = False) -> bool:
        """Whether the optimizer may step now, when the script asks it to."""
        batch = self._current()
        if batch is None:
            return True
        if closure and not batch.undone:
            self.refuse("the optimizer's step takes a closure")
        elif not (batch.backward or batch.undone or batch.stepped):
            self.refuse("the optimizer steps on gradients that do not come from backward()")
        batch.step = True
        if self.within_batch:
            return False
        batch.stepped = True
        return True

    def refuse(self, reason: str) -> None:
        """Stop splitting this loop: say why, undo the current batch's parts and hand out whole batches."""
        if not self._refused:
            self._notify(
                f"batches are not split: {reason}; training goes on with whole batches. To split them, {_ADVICE}"
            )
        self._refused = True
        if self._batch is not None:
            self._batch.undone = True
            self._gradients.clear()

    def lose(self, reason: str) -> None:
        """Go on with whole batches at once, because another thread uses the current batch's loader."""
        self.refuse(reason)
        self._batch = None

    def end(self) -> None:
        """The loop is over, or the script splits its batches itself from now on."""
        batch, self._batch = self._batch, None
        if batch is not None and (batch.undone or (not batch.last and batch.backward)):
            self._left_within_batch()

    def _current(self) -> SplitBatch | None:
        """The batch under way, unless its loop was left."""
        if self._batch is not None and self._batch.iterator() is None:
            self.end()
        return self._batch

    def _begin(self, iterator: Any, whole: Any) -> Any:
        self._batch = None
        try:
            samples = sample_count(whole)
            sizes = sizes_of(samples, min(self._steps, samples // _LEAST_SAMPLES))
            if len(sizes) > 1 and not self._verified:
                sizes = varied(sizes)
            batch = SplitBatch(weakref.ref(iterator), whole, sizes)
            part = batch.part()
        except Exception as error:  # whatever a loader gives, the script goes on with it
            self.refuse(str(error) if isinstance(error, UnsplittableError) else f"a batch cannot be cut: {error!r}")
            return whole
        if len(sizes) == 1:
            return whole
        self._batch, self._shares = batch, Shares(samples)
        self._gradients.forget_mark()
        return part

    def _continue(self, batch: SplitBatch, source: Any) -> Any:
        """The next part of the batch, or the whole batch again; None when the batch is done."""
        if not (batch.undone or batch.last):
            if not batch.backward and batch.position == 0:
                return self._rest(batch, source)
            self._check_part(batch)
        if batch.undone:
            self._batch = None
            return batch.whole
        if batch.last:
            self._batch = None
            return None
        batch.position += 1
        batch.backward = batch.step = False
        return batch.part()

    def _rest(self, batch: SplitBatch, source: Any) -> Any:
        """Nothing was trained on the first part: the loop evaluates, or fetches ahead of training."""
        self._whole_for.add(id(source))
        self._batch = None
        return cut(batch.whole, batch.sizes[0], sum(batch.sizes), sum(batch.sizes))

    def _check_part(self, batch: SplitBatch) -> None:
        if not batch.backward:
            self.refuse("the loop passed over a part of a batch")
        elif not batch.step:
            self.refuse("the script accumulates gradients over several batches itself")

    def _is_second(self, batch: SplitBatch) -> bool:
        """Whether a second loader, asked during this batch, belongs to the same iteration."""
        if batch.undone or batch.backward:
            self.end()
            return False
        self.refuse("an iteration takes batches from two loaders")
        return True

    def _left_within_batch(self) -> None:
        self._gradients.clear()
        self._notify(
            "the loop was left in the middle of a batch, and that batch was not trained on. The script counts each of "
            f"its {self._steps} parts as an iteration. To keep count of whole batches, {_ADVICE}"
        )

    def _weighted(
        self, batch: SplitBatch, plain: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Run a part's backward pass with its share as the gradient; False when that is not possible."""
        loss = _single_loss(args, kwargs)
        if loss is not None:
            self._look_at(loss)
        problem = self._problem(batch, loss)
        if problem or loss is None:
            self.refuse(problem)
            return False
        try:
            share, correction = self._shares.next_share(loss, batch.sizes[batch.position], last=batch.last)
        except UnknownLossError as error:
            self.refuse(f"the loss is no mean or sum over its samples that could be recognized ({error})")
            return False
        except Exception as error:  # a graph of another version of PyTorch, say
            self.refuse(f"the loss's graph cannot be read: {error!r}")
            return False
        if correction != 1.0:
            self._gradients.scale(correction)
        rest = {name: value for name, value in kwargs.items() if name not in {"tensors", "grad_tensors"}}
        plain(loss, _full_like(loss, share), *args[2:], **rest)
        batch.backward = True
        self._gradients.mark()
        self._verified |= batch.last and len(set(batch.sizes)) > 1
        return True

    def _problem(self, batch: SplitBatch, loss: Any) -> str:
        if loss is None:
            return "backward() was called on several losses, or with arguments that cannot be weighted"
        if batch.step or batch.backward:
            return "an iteration has several backward passes"
        if not self._gradients.untouched:
            return "the script changes or clears gradients between backward() and the optimizer's step"
        return ""

    def _look_at(self, loss: Any) -> None:
        self._gradients.look_at(loss)
        if self._gradients.batch_norm and not self._told_of_batch_norm:
            self._told_of_batch_norm = True
            self._notify(
                "batch normalization takes its statistics from micro-batches: training differs from whole batches"
            )


def _single_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss of `torch.autograd.backward(tensors, grad_tensors, …)` if it is one value without a gradient given."""
    loss = args[0] if args else kwargs.get("tensors")
    if isinstance(loss, (list, tuple)):
        loss = loss[0] if len(loss) == 1 else None
    gradient = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
    create_graph = args[3] if len(args) > 3 else kwargs.get("create_graph")
    if create_graph or any(
        value is not None for value in (gradient, kwargs.get("inputs"), kwargs.get("grad_variables"))
    ):
        return None
    return loss if loss is not None and loss.numel() == 1 else None


def _full_like(loss: Any, value: float) -> Any:
    import torch  # a loss exists, so the script has imported it

    return torch.full_like(loss, value)


class LocalState(threading.local):
    """Whether the calling thread's batches are split, and where it is in one.

    A session of a shared runtime trains in its own thread, so each script has its own state.
    """

    def __init__(self) -> None:
        self._loop: SplitLoop | None = None
        self._explicit = False
        self._looked = False
        self._partial = False

    @property
    def loop(self) -> SplitLoop | None:
        """What splits this thread's loaders; None: nothing does, as in all threads that a script starts itself."""
        if not self._looked:
            self._looked = True
            steps = hooked_steps(os.environ) if _is_first_thread() and not self._explicit else 1
            if steps > 1:
                self._loop = SplitLoop(steps)
        return self._loop

    @property
    def within_batch(self) -> bool:
        """Whether a loader has more parts of the current batch to give: what belongs to whole batches waits."""
        return self._loop is not None and self._loop.within_batch

    @property
    def exchange_waits(self) -> bool:
        """Whether more parts of the current batch are to come: ranks exchange gradients with the last one."""
        return self._partial or self.within_batch

    def refuse(self, reason: str) -> None:
        """Let loaders give whole batches; if they were being split, tell the user the reason."""
        if self.loop is not None:
            self.loop.refuse(reason)

    def become_explicit(self) -> None:
        """Let loaders give whole batches from now on, because the script splits them itself."""
        if self._loop is not None:
            self._loop.end()
        self._explicit, self._looked, self._loop = True, True, None

    @contextmanager
    def partial(self, within_batch: bool) -> Iterator[None]:
        """The script works on a micro-batch that it asked for itself.

        Args:
            within_batch: Whether it is not the last one of its batch.
        """
        self._partial = within_batch
        try:
            yield
        finally:
            self._partial = False

    @contextmanager
    def looping(self, loop: SplitLoop) -> Iterator[None]:
        """Within the context, let `loop` split what loaders give."""
        before = self._loop, self._looked
        self._loop, self._looked = loop, True
        try:
            yield
        finally:
            loop.end()
            self._loop, self._looked = before


def _is_first_thread() -> bool:
    """Whether the calling thread is the one that the script begins in."""
    script, thread = current_script(), threading.current_thread()
    return thread is threading.main_thread() if script is None else thread not in script.threads


local = LocalState()
