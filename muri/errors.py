"""The root of Muri's errors: an error derived from it is a message for a person, not a bug."""

from __future__ import annotations


class MuriError(Exception):
    """A failure that the user can understand and mend: its text says what failed, why and what to do.

    Commands print it without a traceback and exit with `exit_code`.
    """

    exit_code = 1


class UsageError(MuriError):
    """The user's input is wrong: an unknown name, a malformed value or file."""

    exit_code = 2
