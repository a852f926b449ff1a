"""Read what slurmctld keeps of a job in its state directory and serves by no RPC."""

import logging
import struct
from pathlib import Path

log = logging.getLogger(__name__)

#: slurmctld spreads its job directories over this many folders.
_HASH_FOLDERS = 10


def job_directory(state_save_location: str, job_id: int) -> Path:
    """Return where slurmctld keeps a batch job's script and environment."""
    return Path(state_save_location, f"hash.{job_id % _HASH_FOLDERS}", f"job.{job_id}")


def job_environment(state_save_location: str, job_id: int) -> dict[str, str] | None:
    """Return the environment that a batch job was submitted with, None when it cannot be read.

    It can be read by root or SlurmUser on slurmctld's machine, from the submission until the job has ended.
    """
    path = job_directory(state_save_location, job_id) / "environment"
    try:
        return parse_environment(path.read_bytes())
    except OSError as err:
        log.debug("job %d: its environment cannot be read: %s", job_id, err)
    except ValueError as err:
        log.warning("job %d: %s is not in the form that Muri knows: %s", job_id, path, err)
    return None


def parse_environment(content: bytes) -> dict[str, str]:
    """Parse slurmctld's file: the count as a 32-bit number in the machine's order, then NUL-ended strings.

    Raises:
        ValueError: The content has another form.
    """
    if len(content) < struct.calcsize("=I"):
        raise ValueError("it is shorter than its header")
    (count,) = struct.unpack_from("=I", content)
    body = content[struct.calcsize("=I") :]
    items = body.split(b"\0")
    if items.pop() != b"" or len(items) != count:
        raise ValueError(f"it announces {count} variables and holds {len(items)}")
    pairs = [item.decode("utf-8", "surrogateescape").partition("=") for item in items]
    return {name: value for name, separator, value in pairs if name and separator}
