"""Waits for the runtime of a group that the scheduler has promised."""

import socket
import time
from collections.abc import Mapping
from typing import Final

from muri.errors import MuriError
from muri.launcher import rendezvous
from muri.launcher.client import RuntimeLostError, find_runtime, open_runtime
from muri.launcher.durations import attach_timeout_s
from muri.launcher.membership import Membership

_POLL_S: Final = 0.25


def wait_for_runtime(environment: Mapping[str, str], job_id: str, membership: Membership) -> socket.socket | None:
    """Wait for the runtime if the scheduler says that the job is in a group.

    Args:
        environment: Where the run directory and the timeout are named.
        job_id: The job.
        membership: Whom to ask.

    Returns:
        A connection, or None when the job is in no group and may run alone.

    Raises:
        RuntimeLostError: The job is in a group, or nobody could say, and no runtime came.
        UsageError: $MURI_ATTACH_TIMEOUT_S is not a number of seconds.
    """
    timeout_s = attach_timeout_s(environment)
    deadline_s = time.monotonic() + timeout_s
    run_dir = rendezvous.default_run_dir(environment)
    expected: bool | None = None
    host: str | None = None
    while True:
        connection = find_runtime(environment, job_id)
        if connection is not None:
            return connection
        if expected is None:
            expected = _expects_group(membership, job_id)
        if expected is False:
            return None
        if expected:
            host = host or _host_of(membership, job_id)
            connection = open_runtime(rendezvous.host_socket(run_dir, host)) if host else None
            if connection is not None:
                return connection
        if time.monotonic() >= deadline_s:
            raise RuntimeLostError(f"the runtime of the group of job {job_id} did not come within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _host_of(membership: Membership, job_id: str) -> str | None:
    try:
        return membership.host_of(job_id)
    except MuriError:
        return None  # asked again at the next look


def _expects_group(membership: Membership, job_id: str) -> bool | None:
    try:
        return membership.expects_group(job_id)
    except MuriError:
        return None  # asked again at the next look; running alone could mean running twice
