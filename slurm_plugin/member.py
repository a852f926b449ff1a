"""What `muri run` asks of Slurm when it runs inside a member's job (muri.launcher's Membership)."""

import sys
import time

from muri.slurm_plugin import tags
from muri.slurm_plugin.gateway import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node_commands import job_field, requeue_hold

_RETRY_S = 10.0


class SlurmMembership:
    """Tells whether a job was given to a group, and puts it back into the queue."""

    def expects_group(self, job_id: str) -> bool:
        """Return whether the job's AdminComment names a host job.

        A member must not run without its group's GPUs, so this keeps asking while slurmctld is away.
        """
        while True:
            try:
                return tags.token(job_field(int(job_id), "admin_comment"), tags.STATE_PREFIX) is not None
            except NoSuchJobError:
                return False
            except SlurmUnreachableError as error:
                print(f"muri: waiting for slurmctld: {error}", file=sys.stderr, flush=True)
                time.sleep(_RETRY_S)
            except (GatewayError, ValueError) as error:
                print(f"muri: cannot tell whether this job is in a group: {error}", file=sys.stderr, flush=True)
                return True

    def requeue(self, job_id: str, reason: str) -> None:
        """Put the job back into the queue, held, so that the controller gives it its own GPUs.

        Raises:
            GatewayError: Slurm refused.
        """
        print(f"muri: {reason}; the job goes back to the queue and runs alone next time", file=sys.stderr, flush=True)
        requeue_hold(int(job_id))
