"""What a submission says: the keys of `--muri` and the facts, in words that job_submit keeps in AdminComment.

muri.lua reads what users type after `--muri`, and has the same keys and limits. `slurm_plugin/spank/facts.h` describes
the facts. They come from the user's own process: they may say anything about that user's job, and nothing here trusts
them further than that. Arguments stay words, whatever bytes they hold.
"""

import base64
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from muri.slurm_plugin.records.comment_tags import FACTS_PREFIX, REQUEST_PREFIX, token


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """What `--muri` asked for; a key that the tag lacks has its default."""

    model: str = ""
    """Name under which the training profile is kept."""
    batch_size: int = 0
    """Samples per iteration on one GPU."""
    duration_s: int | None = None
    """Expected run time alone, in seconds."""
    checkpoint: bool = False
    """The job writes checkpoints and may be stopped and resumed."""
    alone: bool = False
    """Profile the job but never group it with others."""
    accumulate: int = 1
    """The script can split each batch into up to N parts (muri.accumulate)."""
    min_speed: float = 0.0
    """Least speed beside others, as a share of its speed alone."""
    opportunistic: bool = False
    """The job only asks for what others leave over."""


def _name(longest: int) -> Callable[[str], str | None]:
    form = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+/-]{{0,{longest - 1}}}")
    return lambda text: text if form.fullmatch(text) else None


def _number(least: int, most: int) -> Callable[[str], int | None]:
    form = re.compile(rf"[1-9][0-9]{{0,{len(str(most)) - 1}}}")

    def read(text: str) -> int | None:
        return number if form.fullmatch(text) and least <= (number := int(text)) <= most else None

    return read


def _share(text: str) -> float | None:
    return float(text) if re.fullmatch(r"0(\.[0-9]{0,2}[1-9])?", text) else None


def _flag(text: str) -> bool | None:
    return True if text == "1" else None


_READERS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "model": ("model", _name(64)),
    "batch-size": ("batch_size", _number(1, 1000000000)),
    "duration": ("duration_s", _number(1, 315360000)),
    "checkpoint": ("checkpoint", _flag),
    "alone": ("alone", _flag),
    "accumulate": ("accumulate", _number(1, 1024)),
    "min-speed": ("min_speed", _share),
    "opportunistic": ("opportunistic", _flag),
}


def parse_request(admin_comment: str) -> SubmitRequest | None:
    """Read the submit tag; None when the job was not submitted with `--muri`.

    job_submit writes only valid tags. A part that cannot be read or is out of range, because an
    administrator edited the comment, counts as not given.
    """
    text = token(admin_comment, REQUEST_PREFIX)
    if text is None:
        return None
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key in _READERS:
            field, read = _READERS[key]
            given[field] = read(value)
    return SubmitRequest(**{field: value for field, value in given.items() if value is not None})


_FACTS: Final = re.compile(r"1\.([0-9a-f]{16})?\.([0-9a-f]{16})\.([A-Za-z0-9_-]*)\.([A-Za-z0-9_-]*|~)")

_LONGEST_FACTS: Final = 4096

_PATH: Final = re.compile(r"/[^\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True)
class SubmitFacts:
    """What is known of a submission.

    Attributes:
        line: Digest of the command line's words.
        arguments: The batch script's, None when they were too long to travel.
        environment: Digest of the Python and of the variables that decide what a script imports, "" when unknown.
        python: The first Python in PATH, "" when unknown.
    """

    line: str
    arguments: tuple[str, ...] | None
    environment: str = ""
    python: str = ""


def read_facts(admin_comment: str) -> SubmitFacts | None:
    """Read the facts in an AdminComment; None when there are none or they are damaged."""
    text = token(admin_comment, FACTS_PREFIX)
    found = _FACTS.fullmatch(text) if text is not None and len(text) <= _LONGEST_FACTS else None
    if found is None:
        return None
    environment, line, python, arguments = found.groups()
    try:
        words = None if arguments == "~" else decode_words(arguments)
        return SubmitFacts(line, words, environment or "", _path(python))
    except ValueError:
        return None


def encode_words(words: Iterable[str]) -> str:
    """Write words in an alphabet that needs no quotes."""
    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def decode_words(text: str) -> tuple[str, ...]:
    """Read what `encode_words` wrote; bytes that are not UTF-8 stand as surrogate escapes.

    Raises:
        ValueError: It is damaged.
    """
    *words, rest = _decoded(text).split(b"\0")
    if rest:
        raise ValueError("the last argument has no end")
    return tuple(word.decode(errors="surrogateescape") for word in words)


def _path(text: str) -> str:
    path = _decoded(text).decode(errors="surrogateescape")
    return path if _PATH.fullmatch(path) else ""


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
