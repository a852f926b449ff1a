"""A batch that is handed out part by part."""

import weakref
from dataclasses import dataclass
from typing import Any

from muri.launcher.accumulation.splitting import cut


@dataclass
class SplitBatch:
    """A batch that is being handed out in parts.

    Attributes:
        iterator: Who it came from.
        whole: The batch.
        sizes: Samples of each part.
        position: The part that the loop works on.
        backward: Whether the part's gradient was computed.
        step: Whether the script wanted the optimizer's step after it.
        stepped: Whether the optimizer stepped on the whole batch.
        undone: The parts so far do not count; the whole batch comes next.
    """

    iterator: "weakref.ref[Any]"
    whole: Any
    sizes: list[int]
    position: int = 0
    backward: bool = False
    step: bool = False
    stepped: bool = False
    undone: bool = False

    @property
    def last(self) -> bool:
        """Whether the loop works on its last part."""
        return self.position == len(self.sizes) - 1

    def part(self) -> Any:
        """The part at the present position."""
        start = sum(self.sizes[: self.position])
        return cut(self.whole, start, start + self.sizes[self.position], sum(self.sizes))
