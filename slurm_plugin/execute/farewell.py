"""Takes Muri's words out of jobs' AdminComments, after a drain: nothing of Muri then stays in Slurm's records."""

import logging
from collections.abc import Callable

from muri.slurm_plugin.gateway.base import Gateway, GatewayError, NoSuchJobError
from muri.slurm_plugin.records.cluster import JobChange, JobState, Snapshot

log = logging.getLogger(__name__)

_ALIVE = {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED}


def clear_tags(gateway: Gateway, read: Callable[[], Snapshot]) -> tuple[int, ...]:
    """Take Muri's words from every waiting and running job; returns their ids.

    Slurm keeps ended jobs as they are.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    cleared = []
    for job in read().jobs:
        rest = " ".join(word for word in job.admin_comment.split() if not word.startswith(("muri:", "muri-")))
        if job.state not in _ALIVE or rest == job.admin_comment:
            continue
        try:
            gateway.modify(job.job_id, JobChange(admin_comment=rest))
            cleared.append(job.job_id)
        except NoSuchJobError:
            continue
        except GatewayError as error:
            log.warning("job %d keeps Muri's words: %s", job.job_id, error)
    return tuple(cleared)
