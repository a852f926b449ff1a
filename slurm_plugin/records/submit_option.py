"""What `sbatch --muri` asked for, read from the tag that job_submit writes into AdminComment.

muri.lua reads what users type, and has the same keys and limits.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from muri.slurm_plugin.records.comment_tags import REQUEST_PREFIX, token


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
