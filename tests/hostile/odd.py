"""Texts and numbers as a hostile user would write them. The same random numbers give the same ones."""

import json
import random
from collections.abc import Callable
from typing import Any, Final

MOST_COUNT: Final = 2 * 10**9
LATIN_1: Final = "caf\udce9"  # The name café in Latin-1, read as UTF-8: its last byte cannot be decoded

_TEXTS: Final = (
    "", " ", "\n", "\r\n#SLURM --bbf=/etc/shadow\n", "\n#SBATCH --uid=0\n", "a\nb\nc", "\x1b[2J\x1b]0;owned\x07",
    "\x00", "[bold red]markup[/]", "[/", ":smile:", "{}", "{0}", "%s%n%d", "${HOME}`id`$(id)",
    "'; DROP TABLE profiles; --",
    "\"'\\", LATIN_1, "\udcff\udcfe", "\u202eevil", "\ufeff", "日本語", "e\u0301" * 50, "²", "٣",
    "--wrap=id", "-N 2000000000", "../../../../etc/shadow", "muri:1+2", "muri-dryrun", "NaN", "null", "None", "(null)",
    "2026-01-01T00:00:00 INFO muri.controller: group 1 on n1",
)  # fmt: skip

_LETTERS: Final = "abc xyz\t\n\x1b\x7f\x85\u2028'\"\\[]{}()<>|&;$`%,:=+-*/ \udc80\udcffé漢🂡"

_NUMBERS: Final = (
    0, 1, 2, 3, 7, 64, 1000, 2**15, 2**16 - 1, 10**5, 2**31 - 1, 2**31, 2**32 - 2, MOST_COUNT, 2**53, 2**63, 10**18,
)  # fmt: skip

_FIGURES: Final = (
    0, -1, 1, True, None, "1", "x", 0.0, -0.0, 1e-320, 1e-9, 1e-300, 0.1, 3.5, 1e9, 1e15, 1e16, 1e300, 1e308,
    float("nan"), float("inf"), float("-inf"), 2**53, 2**63, 10**30, 10**400, [], {}, [1], "9" * 5000,
    "\ud800",
)  # fmt: skip

HOST_LISTS: Final = (
    "", "n1", "b1", "n[1-4]", "b[1-2],n3", "n[1-", "n]1[", "n[a-b]", "n[3-1]", "n[1-2][3-4]", "n1,,n2", ",", "@all",
    "*", "n[01-04]", "no-such-node", "n1!n2", "n[1-3]^n2", "n1&n2", "n[1-65536]", "n[1-2000000000]", LATIN_1, "n1\nn2",
    "@/etc/shadow", "n[1-9/0]", "n[1-9/2]", "[1-3]", "n1 n2",
)  # fmt: skip

GPU_REQUESTS: Final = (
    "", "gres/gpu:1", "gres/gpu:2", "gres/gpu:0", "gres/gpu:2000000000", "gres/gpu", "gres/gpu:", "gres/gpu:a100:1",
    "gres/gpu:a100", "gres/gpu:1K", "gres/gpu:-1", "gres/gpu:1,gres/gpu:a100:1", "gres/shard:4", "gres/gpu:²",
    "gres/gpu:a:b:c:1", ":", ",,,", "gres/gpu:1(S:0-1)", LATIN_1, "gpu", "gres/gpu=1", "gres/gpu:1.5",
)  # fmt: skip

FEATURES: Final = (
    "", "fast", "no-such", "fast&slow", "fast|slow", "[fast*2&slow*2]", "fast*2000000000", "(fast|slow)&x", "&", "|",
    "fast,", "!fast", LATIN_1, "a" * 5000, "&".join(["fast"] * 2000),
)  # fmt: skip

DEPENDENCIES: Final = (
    "", "afterok:1", "after:99999999999", "afterany:1:2:3(unfulfilled)", "singleton(unfulfilled)", "after:", "expand:1",
    "afterok:1?afterok:2", "after:x", LATIN_1, ",".join(["afterok:1"] * 500),
)  # fmt: skip

LICENSES: Final = (
    "", "matlab:1", "muri_gate:1", "muri_gate:1000000", "muri_gate", "matlab|other", "matlab@server:2;muri_gate:1",
    "muri_gate_:1", ",", ";", ":", LATIN_1,
)  # fmt: skip

_PREFIXES: Final = (
    "muri:", "muri-state:", "muri-pilot:", "muri-dryrun:", "muri-script:", "muri-given:", "muri-hold:", "muri-gate:",
    "muri-profile:", "muri-speed:", "muri-checkpoint:", "muri-stopped:", "muri-retry-memory:", "muri-out-of-memory:",
    "muri-mode:", "muri-fault:", "muri-calls:", "muri-measured:", "muri",
)  # fmt: skip


class Odd:
    """Draws odd values."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        """True in this share of the draws."""
        return self.random.random() < share

    def one(self, values: tuple[Any, ...]) -> Any:
        """One of the values."""
        return self.random.choice(values)

    def count(self) -> int:
        """A number as Slurm counts CPUs, nodes or tasks, up to two thousand million."""
        return min(MOST_COUNT, int(self.one(_NUMBERS)))

    def number(self) -> int:
        """A whole number, up to 10¹⁸."""
        return int(self.one(_NUMBERS))

    def figure(self) -> Any:
        """Return a value in place of a figure in a report."""
        return self.one(_FIGURES)

    def text(self, usual: str = "") -> str:
        """A text with whatever bytes; sometimes around the usual one, sometimes of 10,000 characters."""
        kinds: tuple[Callable[[], str], ...] = (
            lambda: str(self.one(_TEXTS)),
            lambda: usual + str(self.one(_TEXTS)),
            lambda: str(self.one(_TEXTS)) + usual,
            lambda: "".join(self.random.choices(_LETTERS, k=self.random.randrange(60))),
            lambda: str(self.one(("x", "[", "\x1b", "é", "\udce9", "a b ")))[:3] * 5000,
        )
        return str(self.one(kinds)())

    def json(self, depth: int = 3) -> Any:
        """A document of JSON of any shape."""
        if depth == 0 or self.chance(0.4):
            return self.text()[:80] if self.chance(0.3) else self.figure()
        if self.chance(0.5):
            return [self.json(depth - 1) for _ in range(self.random.randrange(4))]
        return {self.text()[:20]: self.json(depth - 1) for _ in range(self.random.randrange(4))}

    def comment(self, *tokens: str) -> str:
        """A comment with some of these tokens, and others of any kind, some of them damaged."""
        words = [token for token in tokens if self.chance(0.8)]
        words += [self.one(_PREFIXES) + self._token_text() for _ in range(self.random.randrange(4))]
        self.random.shuffle(words)
        words = [word[: self.random.randrange(len(word) + 1)] if self.chance(0.1) else word for word in words]
        return str(self.one((" ", "\t", "\n", "  "))).join(words) + (self.text() if self.chance(0.3) else "")

    def _token_text(self) -> str:
        kinds: tuple[Callable[[], str], ...] = (
            self.text,
            lambda: written(self.json()),
            lambda: "[" * 20_000,
            lambda: '{"a":' * 9_000,
            lambda: str(self.number()),
            lambda: f"{self.number()}.{self.number()}",
            lambda: f"{self.text()[:9]}:{','.join(str(self.number()) for _ in range(5))}",
            lambda: ",".join([str(self.number())] * 3000),
        )
        return str(self.one(kinds)())


def written(document: Any) -> str:
    """JSON in one word, with whatever figures Python's reader takes."""
    try:
        text = json.dumps(document)
    except ValueError:  # a number of too many digits
        text = '{"big":1' + "0" * 5000 + "}"
    return text.replace(" ", "")
