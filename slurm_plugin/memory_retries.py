"""How jobs that run out of GPU memory beside others, and the controller, tell each other of it. Pure.

The controller marks members whose policy gives them another try; a member's own comment counts the tries.
"""

import re

from muri.policies.horus.cost import MAX_RAISES, RAISING_POLICIES
from muri.slurm_plugin import tags
from muri.slurm_plugin.model import JobChange


def with_retries(admin_comment: str, policy: str) -> str:
    """A member's AdminComment that says whether it is given another try with more memory."""
    return tags.with_token(admin_comment, tags.RETRY_MEMORY_PREFIX, "1" if policy in RAISING_POLICIES else None)


def without_retries(admin_comment: str) -> JobChange:
    """The change after which a member that runs out of GPU memory fails as it would alone."""
    return JobChange(admin_comment=tags.with_token(admin_comment, tags.RETRY_MEMORY_PREFIX, None))


def retries_memory(admin_comment: str) -> bool:
    """Whether a member is given another try with more memory."""
    return tags.token(admin_comment, tags.RETRY_MEMORY_PREFIX) is not None


def told(run: int, times: int) -> str:
    """The token's text: the run of the job that ended so (0 = never requeued), and how often it has happened."""
    return f"{run}.{times}"


def times_told(comment: str) -> tuple[int, int]:
    """The run that last ended so, and how often it happened; (-1, 0) where it never did."""
    found = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", tags.token(comment, tags.OUT_OF_MEMORY_PREFIX) or "")
    return (int(found[1]), int(found[2])) if found else (-1, 0)


def may_try_again(comment: str) -> bool:
    """Whether a job that ran out of memory once more is given another try."""
    return times_told(comment)[1] < MAX_RAISES
