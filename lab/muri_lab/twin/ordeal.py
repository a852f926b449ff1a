"""A story told on a twin: its faults are injected, its invariants watched, until everything has ended."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.journal import JournalError
from muri.slurm_plugin.records.roles import Role, read_job
from muri_lab.twin.calls import AT_CALLS, Calls, Killed
from muri_lab.twin.faults import ACTS, BETWEEN_CYCLES
from muri_lab.twin.invariants import BrokenInvariantError
from muri_lab.twin.stage import CALM_AFTER_S, Stage
from muri_lab.twin.story import JOB_FAULTS, Fault, Story
from muri_lab.twin.twin import folder, heard, quiet

_TRY_AGAIN_S: Final = 11.0  # A fault of jobs that finds no job is tried again after this
_MOST_S: Final = 6 * 3600.0  # By then everything must have ended
_PATIENCE_S: Final = 600.0
"""Within this time after the last job's end, Muri's own jobs and all that it has begun must end, too."""

_HELP_S: Final = 300.0  # How often people look after their jobs once nothing goes wrong any more


@dataclass(slots=True)
class Outcome:
    """The outcome of a story."""

    broken: str = ""  # Which invariant did not hold, "" where all did
    injected: Counter[str] = field(default_factory=Counter)  # by kind of fault, those without a target left out
    cycles: int = 0  # Cycles of the controller


class Ordeal:
    """One story on one twin."""

    def __init__(self, story: Story, place: Path, tell: Callable[[str], None] | None = None) -> None:
        self.outcome = Outcome()
        self.stage = Stage(story, place, tell)
        self._calls = Calls(self.stage, self._hit)
        self._between: list[Fault] | None = None

    # The course of events

    def run(self) -> Outcome:
        """Tell the story to its end."""
        stage, twin = self.stage, self.stage.twin
        twin.know(stage.story.profiles)
        stage.watch.begin()
        twin.gateway.around = self._calls.around
        twin.submit(stage.story.submissions)
        for fault in stage.story.faults:
            twin.time.at(twin.begun_s + fault.at_s, partial(self._befall, fault))
        twin.time.at(twin.begun_s + CALM_AFTER_S, self._calm)
        if stage.has_listeners:
            twin.slurm.notes.append(
                lambda what, job: stage.tell(f"job {job.job_id} ({job.name}) {what}: {job.state} on {job.nodes or '-'}")
            )
        try:
            with heard(stage.tell) if stage.has_listeners else quiet():
                self._go_on()
        except BrokenInvariantError as error:
            self.outcome.broken = str(error)
        finally:
            stage.end_process()
        return self.outcome

    def _go_on(self) -> None:
        stage, twin = self.stage, self.stage.twin
        end_s, last_s = twin.begun_s + _MOST_S, max((fault.at_s for fault in stage.story.faults), default=0.0)
        while (twin.left or twin.time.now_s < twin.begun_s + last_s) and twin.time.now_s < end_s:
            self._turn()
        if twin.left:
            stage.watch.left()
        patience_s = max(twin.time.now_s, stage.away_until_s) + _PATIENCE_S
        while twin.time.now_s < patience_s and (
            stage.own_jobs(Role.PILOT) or stage.own_jobs(Role.DRY_RUN) or stage.begun()
        ):
            self._turn()
        stage.watch.at_end(stage.begun())

    def _turn(self) -> None:
        """A cycle, where there is a controller, and the time until the next one."""
        stage, time = self.stage, self.stage.twin.time
        due_s = time.now_s + stage.twin.config.interval_s
        if not stage.removed and time.now_s >= stage.away_until_s:
            self._between = []
            self._cycle()
            between, self._between = self._between, None
            for fault in between:
                self._befall(fault)
        time.advance(max(due_s, time.now_s))
        stage.watch.after_turn()

    def _cycle(self) -> None:
        stage = self.stage
        self.outcome.cycles += 1
        self._calls.begin_cycle()
        try:
            self._run_cycle()
        except Killed:
            stage.tell("the controller dies")
            stage.end_process()
        except JournalError as error:
            stage.tell(f"the journal: {error}")
            stage.mend_journal()
        except MuriError as error:
            stage.tell(f"cycle skipped: {error}")
        except Exception as error:
            text = f"a cycle failed by a fault of Muri's own: {type(error).__name__}: {error}"
            raise BrokenInvariantError(text) from error
        else:
            return
        stage.watch.begin_anew()

    def _run_cycle(self) -> None:
        stage, twin = self.stage, self.stage.twin
        controller, began_s = stage.controller(), twin.time.now_s
        controller.cycle()
        stage.looked_s, stage.watch.succeeded_s = began_s, twin.time.now_s
        if twin.config.tuning.gate_watch_s:
            twin.time.sleep(min(5.0, twin.config.tuning.gate_watch_s))
            controller.close_gates()
        if not self._calls.armed:
            stage.watch.after_cycle()

    # Faults

    def _hit(self, fault: Fault, what: str) -> None:
        self.outcome.injected[fault.kind] += 1
        self.stage.tell(f"FAULT {fault.kind}: {what}")

    def _befall(self, fault: Fault) -> None:
        """Let a fault happen, or arm it where it concerns the controller's next calls."""
        stage = self.stage
        if stage.removed:
            return
        if fault.kind in AT_CALLS:
            self._calls.arm(fault)
            return
        if self._between is not None and fault.kind in BETWEEN_CYCLES:
            self._between.append(fault)
            return
        try:
            what = ACTS[fault.kind](stage, fault)
        except GatewayError as error:
            stage.tell(f"{fault.kind}: Slurm refuses: {error}")
            return
        if what:
            self._hit(fault, what)
        elif fault.kind in JOB_FAULTS and stage.twin.time.now_s < stage.twin.begun_s + CALM_AFTER_S - _TRY_AGAIN_S:
            stage.twin.time.after(_TRY_AGAIN_S, lambda: self._befall(fault))

    def _calm(self) -> None:
        """From now on nothing goes wrong; people take back their holds."""
        twin, slurm = self.stage.twin, self.stage.twin.slurm
        self._calls.disarm()
        twin.gateway.clock_offset_s = 0.0
        if slurm.away:
            slurm.come_back()
        for name in slurm.nodes:
            slurm.set_node(name, usable=True, state="IDLE")
        slurm.reservations = ()
        self._help()
        self.stage.watch.begin_anew()

    def _help(self) -> None:
        """Do what people do from now on: take back their holds, and repair jobs whose AdminComment was damaged.

        A hold without any tag looks like their own. A member's request is lost if neither its tag nor a journal has it.
        """
        slurm = self.stage.twin.slurm
        for job in self.stage.users_jobs(JobState.PENDING):
            if slurm.ledger[job.job_id].holder in {"user", "admin"}:
                slurm.release(job.job_id, "admin")
        for job in self.stage.users_jobs(JobState.PENDING):
            if (job_id := job.job_id) not in self.stage.watch.tampered:
                continue
            if job.held and read_job(job).role in {Role.USER_HELD, Role.OTHER} and job.gpu_count:
                slurm.release(job_id, "admin")
            if self._is_forgotten() and not job.gpu_count and tags.parse_state(job.admin_comment) is None:
                self.stage.cancel_as_user(job_id)
        self.stage.twin.time.after(_HELP_S, self._help)

    def _is_forgotten(self) -> bool:
        """Return whether no journal has a member's request."""
        stage = self.stage
        return stage.removed or stage.watch.journal_lost or stage.twin.time.now_s < stage.away_until_s


def endure(story: Story, tell: Callable[[str], None] | None = None) -> Outcome:
    """Tell a story on a twin of its own."""
    with folder() as place:
        return Ordeal(story, place, tell).run()
