"""How jobs that run out of GPU memory beside others, and the controller, tell each other of it. Pure.

The controller marks members whose policy gives them another try; a member's own comment counts the tries.
"""

from muri.policies.horus.memory import MAX_RAISES, RAISING_POLICIES
from muri.slurm_plugin import tags


def with_retries(admin_comment: str, policy: str) -> str:
    """A member's AdminComment that says whether it is given another try with more memory."""
    return tags.with_token(admin_comment, tags.RETRY_MEMORY_PREFIX, "1" if policy in RAISING_POLICIES else None)


def retries_memory(admin_comment: str) -> bool:
    """Whether a member is given another try with more memory."""
    return tags.token(admin_comment, tags.RETRY_MEMORY_PREFIX) is not None


def told(run: int, times: int) -> str:
    """The token's text: the run of the job that ended so (0 = never requeued), and how often it has happened."""
    return f"{run}.{times}"


def times_told(comment: str) -> tuple[int, int]:
    """The run that last ended so, and how often it happened; (-1, 0) where it never did."""
    run, _, times = (tags.token(comment, tags.OUT_OF_MEMORY_PREFIX) or "").partition(".")
    return (int(run), int(times)) if run.isdigit() and times.isdigit() else (-1, 0)


def may_try_again(comment: str) -> bool:
    """Whether a job that ran out of memory once more is given another try."""
    return times_told(comment)[1] < MAX_RAISES
