"""Whether any member of a group is left: the runtime tells of those at work, and Slurm is asked about the others."""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from muri.clock import Clock
from muri.group_spec import GroupSpec
from muri.slurm_plugin.gateway.base import NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node.pauses import growing_pauses
from muri.slurm_plugin.node.slurm_calls import job_record
from muri.slurm_plugin.records import comment_tags as tags

log = logging.getLogger("muri.pilot")

AT_WORK: Final = "at work"
ENDED: Final = "ended"
AWAITED: Final = "awaited"

FIRST_PAUSE_S: Final = {AT_WORK: 600.0, ENDED: 0.5, AWAITED: 4.0}
"""Before the first question. A member at work has an open socket, whose end the runtime sees: Slurm is asked only in
case that something is wrong. Once every member's training has ended, their jobs are about to: the GPUs are given back
soon."""

_MOST_AT_WORK_S: Final = 1800.0


class MemberWatch:
    """Looks after the members of one pilot job.

    Args:
        pilot: The pilot job.
        group: Its group as it was planned.
        clock: Tells the time.
    """

    def __init__(self, pilot: int, group: GroupSpec, clock: Clock) -> None:
        self._pilot = pilot
        self._group = group
        self._clock = clock
        self._late_s = clock() + group.attach_timeout_s
        self._seen: tuple[str, int] | None = None
        self._pauses: Iterator[float] = iter(())
        self._ask_s = math.inf
        self._last_found = 0

    def is_over(self, members: Mapping[str, Any]) -> bool:
        """Return whether nobody is left whom the GPUs should wait for. Slurm is asked rarely, and in few calls.

        Args:
            members: The members' part of the runtime's status.
        """
        phase = _phase(members)
        self._heed(phase, members)
        if self._clock() < self._ask_s:
            return False
        self._pause()
        try:
            return self._nobody_left(members, at_work=phase == AT_WORK)
        except SlurmUnreachableError as error:
            log.warning("cannot ask for the members' states, going on: %s", error)
            return False

    def _heed(self, phase: str, members: Mapping[str, Any]) -> None:
        """Begin with short pauses again when a script has started, or the last one has ended."""
        seen = phase, sum(member.get("sessions", 0) for member in members.values())
        if seen != self._seen:
            most_s = _MOST_AT_WORK_S if phase == AT_WORK else self._group.poll_s
            self._seen = seen
            self._pauses = growing_pauses(FIRST_PAUSE_S[phase], most_s, self._pilot)
            self._pause()

    def _pause(self) -> None:
        self._ask_s = self._clock() + next(self._pauses)

    def _nobody_left(self, members: Mapping[str, Any], *, at_work: bool) -> bool:
        """Ask about one member after the other, until one is found that the GPUs wait for."""
        late = not at_work and self._clock() > self._late_s
        waiting: list[int] = []
        for job_id in self._members(members):
            asks_tag = not at_work and (late or members.get(str(job_id), {}).get("state") == "ended")
            state = self._state(job_id, asks_tag=asks_tag)
            if state is None:
                continue
            if state != "PENDING" or not late:
                self._last_found = job_id
                return False
            waiting.append(job_id)
        if waiting:
            log.warning("members %s could not start beside the pilot job; giving the GPUs back", sorted(waiting))
        else:
            log.info("every member has ended")
        return True

    def _members(self, members: Mapping[str, Any]) -> Iterator[int]:
        """Yield all members, first those that are probably there."""
        at_work = [int(name) for name, member in members.items() if member.get("state") == "running"]
        known = dict.fromkeys([*at_work, *map(int, self._group.ids), *map(int, members)])
        yield from sorted(known, key=lambda job_id: (job_id not in at_work, job_id != self._last_found))
        # Who joined later stands in the pilot's own AdminComment: it is read only before the group would end.
        with contextlib.suppress(NoSuchJobError):
            _, joined = tags.parse_pilot(job_record(self._pilot).admin_comment) or ("", ())
            yield from (job_id for job_id in joined if job_id not in known)

    def _state(self, job_id: int, *, asks_tag: bool) -> str | None:
        """Return a member's state in Slurm; None where it has ended or is a member no more.

        Args:
            job_id: The member.
            asks_tag: Whether its AdminComment has to name this pilot, which it does no longer if the job was stopped
                and returned to the queue. The controller tags members a moment after it submits the pilot, so those
                that have yet to attach are not asked for it.
        """
        try:
            record = job_record(job_id)
        except NoSuchJobError:
            return None
        if not record.is_active:
            return None
        state = tags.parse_state(record.admin_comment) if asks_tag else None
        return None if asks_tag and (state is None or state.pilot != self._pilot) else record.state


def _phase(members: Mapping[str, Any]) -> str:
    states = {member.get("state") for member in members.values()}
    return AT_WORK if "running" in states else ENDED if states == {"ended"} else AWAITED
