"""Which checkpointer belongs to the script that is calling, and where its training loop stands in its loader.

The first `muri.batches` loop after `muri.checkpoint` is the training loop; each of its runs is an epoch. The states of
all random generators that a training script draws from belong to the position, as plain JSON values.
"""

from __future__ import annotations

import base64
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol, Tuple, TypeVar

from muri.launcher.threads import Script, current_script

Batch = TypeVar("Batch")

Site = Tuple[str, int]
"""File and line of a `muri.batches(…)`: tells the training loop from others."""


class LoaderPosition:
    """Epoch and batch of the training loop.

    Attributes:
        epoch: Runs of the training loop that have ended.
        batch: Batches done in the current one.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self._site: Site | None = None
        self._begun = False
        self._start: dict[str, Any] | None = None
        self._generators: list[Any] = []
        self._others: list[Site] = []
        self._resume: Mapping[str, Any] | None = None

    @property
    def in_other_loop(self) -> bool:
        """Whether a loop other than the training loop is running; a script cannot resume from inside that."""
        return bool(self._others)

    def facts(self) -> dict[str, Any]:
        """The facts that a checkpoint keeps of it, with the generators' current states."""
        rng = capture_generators(self._generators)
        return {"epoch": self.epoch, "batch": self.batch, "epoch_start": self._start, "rng": rng}

    def resume_at(self, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's facts at the next run of the training loop."""
        self.epoch, self.batch = int(facts["epoch"]), int(facts["batch"])
        self._resume = facts
        restore_generators(facts["rng"])

    def begin(self, loader: Iterable[Batch], site: Site, skipped: Callable[[], None]) -> Iterator[Batch]:
        """Iterate over a loader; in a training loop that resumes, from its next batch.

        Args:
            loader: What `muri.batches` was given.
            site: Where the script calls `muri.batches`.
            skipped: Called after each batch that is skipped.
        """
        if self._site is None:
            self._site = site
        if site != self._site:
            self._others.append(site)
            return self._until_its_end(iter(loader), site)
        self._others.clear()
        self._generators = generators_of(loader)
        facts, self._resume = self._resume, None
        if facts is not None and facts["epoch_start"] is not None:
            return self._go_on(loader, facts, skipped)
        if self._begun:
            self.epoch += 1
        self._begun, self.batch = True, 0
        self._start = capture_generators(self._generators)
        return iter(loader)

    def batch_done(self) -> None:
        """Note that the training loop asks for its next batch."""
        self.batch += 1

    def left(self) -> None:
        """Note that a loop was left with `break`."""
        if self._others:
            self._others.pop()

    def _go_on(self, loader: Iterable[Batch], facts: Mapping[str, Any], skipped: Callable[[], None]) -> Iterator[Batch]:
        self._begun, self._start = True, facts["epoch_start"]
        restore_generators(facts["epoch_start"], self._generators)
        source = iter(loader)
        for _ in range(self.batch):
            next(source, None)
            skipped()
        restore_generators(facts["rng"], self._generators)
        return source

    def _until_its_end(self, source: Iterator[Batch], site: Site) -> Iterator[Batch]:
        yield from source
        if self._others and self._others[-1] == site:
            self._others.pop()


def capture_generators(generators: Iterable[Any] = ()) -> dict[str, Any]:
    """The states now: Python's, NumPy's and PyTorch's global generators and the given `torch.Generator` objects.

    Only libraries that the script has imported are looked at.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss]}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch is not None:
        state["torch"] = _text(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [_text(each) for each in torch.cuda.get_rng_state_all()]
    state["generators"] = [_text(generator.get_state()) for generator in generators]
    return state


def restore_generators(state: Mapping[str, Any], generators: Iterable[Any] = ()) -> None:
    """Put the states back that `capture_generators` returned.

    Args:
        state: What `capture_generators` returned.
        generators: The same generators, in the same order.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import numpy as np  # only if the script had imported it

        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "torch" in state:
        import torch  # only if the script had imported it

        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all([_tensor(each) for each in state["cuda"]])
    for generator, text in zip(generators, state["generators"]):
        generator.set_state(_tensor(text))


def generators_of(loader: object) -> list[Any]:
    """The `torch.Generator` objects that a `DataLoader` shuffles with, each once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [getattr(holder, "generator", None) for holder in (loader, sampler, inner)]
    unique = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(unique.values())


def _text(tensor: Any) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class Checkpointer(Protocol):
    """What the launcher asks of a script's checkpointer (`checkpoint.BoundaryCheckpointer`).

    Attributes:
        position: Where the training loop stands in its loader.
        stopped_at: Iteration of the checkpoint after which the script was ended, None while it was not.
    """

    position: LoaderPosition
    stopped_at: int | None

    @property
    def stop_asked(self) -> bool:
        """Whether the script is to stop."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process speaks for all ranks of the job."""

    def ask_stop(self) -> None:
        """Save and end the script at its next iteration boundary. Safe in a signal handler."""

    def own_boundary(self) -> bool:
        """Save at the end of an iteration of a loop that marks no stages; return whether the script should stop now."""

    def close(self) -> None:
        """Keep nothing after the script has ended."""


class _Place:
    """Holds a script's checkpointer."""

    def __init__(self) -> None:
        self.checkpointer: Checkpointer | None = None


_process: Final = _Place()


def current() -> Checkpointer | None:
    """The calling script's checkpointer, None before it called `muri.checkpoint`."""
    return _place().checkpointer


def of(script: Script) -> Checkpointer | None:
    """The checkpointer of one of this process's scripts, None before it called `muri.checkpoint`."""
    return _place_of(script).checkpointer


def register(checkpointer: Checkpointer) -> None:
    """Make this checkpointer the calling script's."""
    _place().checkpointer = checkpointer


def begin_loop(loader: Iterable[Batch], site: Site, skipped: Callable[[], None]) -> Iterator[Batch]:
    """What `muri.batches` iterates over: the loader, or the rest of it after a resume."""
    checkpointer = current()
    return iter(loader) if checkpointer is None else checkpointer.position.begin(loader, site, skipped)


def _place() -> _Place:
    script = current_script()
    return _process if script is None else _place_of(script)


def _place_of(script: Script) -> _Place:
    place: _Place = script.belongings.setdefault(_Place, _Place())
    return place


def _forget() -> None:
    """Drop the checkpointer in a forked child, such as a DataLoader's worker, which must save nothing."""
    _process.checkpointer = None


os.register_at_fork(after_in_child=_forget)
