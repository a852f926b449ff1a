"""What the SPANK plugin told of a submission, read from the word that job_submit keeps in AdminComment.

`slurm_plugin/spank/facts.h` describes the word. It comes from the user's own process: it may say anything about that
user's job, and nothing here trusts it further than that. Arguments stay words, whatever bytes they hold.
"""

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from muri.slurm_plugin.records.comment_tags import FACTS_PREFIX, token

_FORM: Final = re.compile(r"1\.([0-9a-f]{16})?\.([0-9a-f]{16})\.([A-Za-z0-9_-]*)\.([A-Za-z0-9_-]*|~)")

_LONGEST: Final = 4096

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
    found = _FORM.fullmatch(text) if text is not None and len(text) <= _LONGEST else None
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
