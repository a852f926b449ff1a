"""Turn Slurm's own words into Muri's errors, the same for both gateways."""

from muri.slurm_plugin.gateway import GatewayError, NoSuchJobError, SlurmUnreachableError

_UNREACHABLE = (
    "unable to contact slurm controller",
    "communication connection failure",
    "communication send failure",
    "communication receive failure",
    "communication shutdown failure",
    "connection refused",
    "connection timed out",
    "connection reset",
    "socket timed out",
    "unable to establish controller machine",
    "unable to establish configuration source",
    "in standby mode",
    "standby",
    "zero bytes were transmitted",
)
_NO_SUCH_JOB = ("invalid job id",)
_ENDED = ("already completing or completed", "job has already finished", "already finished")
_PENDING = ("job is pending execution",)
_STARTED = ("job is no longer pending execution", "job has already started")


def slurm_error(action: str, words: str) -> GatewayError:
    """Return the error of the class that fits Slurm's words.

    Args:
        action: What was tried, such as "hold job 12".
        words: Slurm's message.
    """
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    bare = lines[0] if lines else "Slurm gave no reason"  # later lines of scontrol repeat it in other words
    text = f"cannot {action}: {bare}"
    if _says(bare, _UNREACHABLE):
        return SlurmUnreachableError(f"{text}; is slurmctld running? (`scontrol ping`)")
    if _says(bare, _NO_SUCH_JOB + _ENDED):
        return NoSuchJobError(text)
    return GatewayError(text)


def _says(words: str, phrases: tuple[str, ...]) -> bool:
    lowered = words.lower()
    return any(phrase in lowered for phrase in phrases)


def job_ended(error: GatewayError) -> bool:
    """Whether Slurm refused because the job has ended already."""
    return _says(str(error), _ENDED)


def job_pending(error: GatewayError) -> bool:
    """Whether Slurm refused because the job has not started yet."""
    return _says(str(error), _PENDING)


def job_started(error: GatewayError) -> bool:
    """Whether Slurm refused because the job has started already."""
    return _says(str(error), _STARTED)
