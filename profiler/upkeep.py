"""What the store keeps beside the profiles: live observations, stale marks, and who changed what by hand."""

import os
import pwd
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from muri.profiler.records import ProfileKey

DRIFT: Final = "drift"
"""Who sets a mark because live figures have moved away; people have names."""


class Author(NamedTuple):
    """Who changes the store, and when.

    Attributes:
        who: User name, or `DRIFT`.
        at: UTC time, ISO-8601.
        action: The verb, as people call it: "edit", "rm", "import", "stale", "clear".
    """

    who: str
    at: str
    action: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What a running job told of its iterations.

    Attributes:
        observed_at: UTC time, ISO-8601.
        job_id: The job.
        iterations: Iterations that it had done by then.
        stage_s: Seconds per iteration lately in which it used each resource, waits left out, in the
            order of `STAGES`.
    """

    observed_at: str
    job_id: int
    iterations: int
    stage_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StaleMark:
    """A profile that is to be measured again; it serves planning until then.

    Attributes:
        key: Which one.
        since: UTC time, ISO-8601.
        reason: Why, for people.
        who: User name, or `DRIFT`.
    """

    key: ProfileKey
    since: str
    reason: str
    who: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change made by hand, or a mark.

    Attributes:
        at: UTC time, ISO-8601.
        who: User name, or `DRIFT`.
        action: The verb.
        key: What was changed.
        before: Figures as in an export, None when there were none.
        after: Figures as in an export, None when there are none.
    """

    at: str
    who: str
    action: str
    key: ProfileKey
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def user_name() -> str:
    """Who runs this process; of a command under sudo, who called it too."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    caller = os.environ.get("SUDO_USER", "")
    return f"{caller} as {name}" if caller and caller != name else name
