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


class PutBack:
    """Calls for all members at the same time, so that one that Slurm answers late delays no other.

    Args:
        pilot: The pilot job.
        reason: Why a member goes back, for its user.
        open_stderr: Opens a member's standard error, as it must be before its processes end; None where it cannot.
        clock: For pauses between tries.
    """

    def __init__(
        self, pilot: int, reason: Callable[[str], str], open_stderr: Callable[[str], int | None], clock: Clock
    ) -> None:
        self._pilot = pilot
        self._reason = reason
        self._open_stderr = open_stderr
        self._clock = clock

    def all(self, members: Collection[str], within_s: float, *, await_start: bool = False) -> None:
        """Put members back, and try again while slurmctld is away.

        Args:
            members: Their job ids; one that Slurm ends already, or that has left the group, is passed over.
            within_s: Calls that take longer go on in the background.
            await_start: Whether one that has yet to start is awaited and put back then, else left to the controller.
        """
        end_s, left = self._clock() + within_s, set(members)
        pauses = growing_pauses(_FIRST_PAUSE_S, _MOST_PAUSE_S, self._pilot)
        while left:
            states: dict[str, str] = {}
            calls = [threading.Thread(target=self._one, args=(member, states), daemon=True) for member in left]
            for call in calls:
                call.start()
            for call in calls:
                call.join(max(0.0, end_s - self._clock()))
            left -= {member for member, state in list(states.items()) if not (await_start and state == "PENDING")}
            if self._clock() >= end_s:
                return
            if left:
                self._clock.sleep(next(pauses))

    def _one(self, member: str, states: dict[str, str]) -> None:
        """Put one back, and note its state before; nothing where slurmctld does not answer."""
        stderr = self._open_stderr(member)
        try:
            state = requeue_member(int(member), self._pilot)
            if state not in {"", "PENDING"}:
                log.info("member %s goes back to the queue", member)
                self._tell(stderr, member)
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

    def _tell(self, stderr: int | None, member: str) -> None:
        text = f"muri: {self._reason(member)}; {GOES_BACK}\n"
        if stderr is not None:
            with contextlib.suppress(OSError):
                os.write(stderr, text.encode())
