"""Puts the members of a pilot job that ends back into the queue, because their processes must leave its GPUs."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from typing import Final

from muri.clock import Clock
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node.membership import GOES_BACK, requeue_member
from muri.slurm_plugin.node.slurm_calls import growing_pauses

log = logging.getLogger("muri.pilot")

_FIRST_PAUSE_S: Final = 1.0
_MOST_PAUSE_S: Final = 8.0


def put_back(
    pilot: int,
    members: Collection[str],
    reason: Callable[[str], str],
    open_stderr: Callable[[str], int | None],
    within_s: float,
    clock: Clock,
    *,
    await_start: bool = False,
) -> None:
    """Put members of a pilot job back, all at the same time: one that Slurm answers late delays no other.

    While slurmctld is away this tries again; calls that take longer than `within_s` go on in the background. A member
    that Slurm ends already, or that has left the group, is passed over. With `await_start` one that has yet to start is
    awaited and put back then; else it is left to the controller.
    `reason` returns why a member goes back, for its user, and `open_stderr` opens its standard error, as it must be
    before its processes end; None where it cannot.
    """
    end_s, left = clock() + within_s, set(members)
    pauses = growing_pauses(_FIRST_PAUSE_S, _MOST_PAUSE_S, pilot)
    while left:
        states: dict[str, str] = {}
        calls = [
            threading.Thread(target=_put_one_back, args=(pilot, member, reason, open_stderr, states), daemon=True)
            for member in left
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join(max(0.0, end_s - clock()))
        left -= {member for member, state in list(states.items()) if not (await_start and state == "PENDING")}
        if clock() >= end_s:
            return
        if left:
            clock.sleep(next(pauses))


def _put_one_back(
    pilot: int,
    member: str,
    reason: Callable[[str], str],
    open_stderr: Callable[[str], int | None],
    states: dict[str, str],
) -> None:
    """Put one back, and note its state before; nothing where slurmctld does not answer."""
    stderr = open_stderr(member)
    try:
        state = requeue_member(int(member), pilot)
        if state not in {"", "PENDING"}:
            log.info("member %s goes back to the queue", member)
            if stderr is not None:
                with contextlib.suppress(OSError):
                    os.write(stderr, f"muri: {reason(member)}; {GOES_BACK}\n".encode())
    except SlurmUnreachableError as error:
        log.warning("member %s cannot go back to the queue now: %s", member, error)
        return
    except NoSuchJobError:
        state = ""
    except GatewayError as error:
        log.error("member %s could not be put back into the queue: %s", member, error)  # noqa: TRY400
        state = ""
    finally:
        if stderr is not None:
            os.close(stderr)
    states[member] = state
