"""Where the training loop stands in its loader, and how a resumed script gets back there.

The first `muri.batches` loop after `muri.checkpoint` is the training loop; each of its runs is an epoch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from muri.launcher.checkpoints import registry as checkpoint_registry
from muri.launcher.checkpoints import rng_state

Batch = TypeVar("Batch")
Site = tuple[str, int]
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
        """Whether another loop than the training loop is under way, from which no script could go on."""
        return bool(self._others)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, the generators' states now included."""
        rng = rng_state.capture(self._generators)
        return {"epoch": self.epoch, "batch": self.batch, "epoch_start": self._start, "rng": rng}

    def resume_at(self, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's facts at the next run of the training loop."""
        self.epoch, self.batch = int(facts["epoch"]), int(facts["batch"])
        self._resume = facts
        rng_state.restore(facts["rng"])

    def begin(self, loader: Iterable[Batch], site: Site, skipped: Callable[[], None]) -> Iterator[Batch]:
        """Iterate over a loader; in the training loop that goes on, from its next batch.

        Args:
            loader: What `muri.batches` was given.
            site: Where.
            skipped: Called after each batch that is passed over.
        """
        if self._site is None:
            self._site = site
        if site != self._site:
            self._others.append(site)
            return self._until_its_end(iter(loader), site)
        self._others.clear()
        self._generators = rng_state.generators_of(loader)
        facts, self._resume = self._resume, None
        if facts is not None and facts["epoch_start"] is not None:
            return self._go_on(loader, facts, skipped)
        if self._begun:
            self.epoch += 1
        self._begun, self.batch = True, 0
        self._start = rng_state.capture(self._generators)
        return iter(loader)

    def batch_done(self) -> None:
        """The training loop asks for its next batch."""
        self.batch += 1

    def left(self) -> None:
        """A loop was left with `break`."""
        if self._others:
            self._others.pop()

    def _go_on(self, loader: Iterable[Batch], facts: Mapping[str, Any], skipped: Callable[[], None]) -> Iterator[Batch]:
        self._begun, self._start = True, facts["epoch_start"]
        rng_state.restore(facts["epoch_start"], self._generators)
        source = iter(loader)
        for _ in range(self.batch):
            next(source, None)
            skipped()
        rng_state.restore(facts["rng"], self._generators)
        return source

    def _until_its_end(self, source: Iterator[Batch], site: Site) -> Iterator[Batch]:
        yield from source
        if self._others and self._others[-1] == site:
            self._others.pop()


def begin_loop(loader: Iterable[Batch], site: Site, skipped: Callable[[], None]) -> Iterator[Batch]:
    """What `muri.batches` iterates over: the loader, or the rest of it in a script that resumes."""
    checkpointer = checkpoint_registry.current()
    return iter(loader) if checkpointer is None else checkpointer.position.begin(loader, site, skipped)
