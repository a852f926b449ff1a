"""Checks that a job passes before either gateway submits it, so that both refuse the same."""

from muri.slurm_plugin.gateway import GatewayError
from muri.slurm_plugin.model import NewJob

_LEAST_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def check_new_job(job: NewJob) -> None:
    """Refuse what Slurm or a gateway would misread.

    Raises:
        GatewayError: The job cannot be submitted; the text says which part is wrong.
    """
    if not job.script.startswith("#!"):
        raise GatewayError(f"job {job.name!r}: its script must begin with #! and an interpreter")
    for what, text in (("script", job.script), ("admin comment", job.admin_comment), ("output", job.output)):
        if "\0" in text:
            raise GatewayError(f"job {job.name!r}: its {what} holds a NUL character")
    if "\r\n" in job.script:
        raise GatewayError(f"job {job.name!r}: its script has DOS line ends (\\r\\n); convert them to \\n")
    for name, value in job.environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise GatewayError(f"job {job.name!r}: its environment variable {name!r} is malformed")
    if job.cpu_count < 1 or job.node_count < 1:
        raise GatewayError(f"job {job.name!r}: it needs at least one CPU and one node")


def explicit_environment(job: NewJob) -> dict[str, str]:
    """Return the job's environment; an empty one would make Slurm fill in the caller's."""
    return dict(job.environment or _LEAST_ENVIRONMENT)
