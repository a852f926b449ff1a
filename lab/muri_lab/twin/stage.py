"""Where a story takes place: a twin, who watches it, and the controller's process and files."""

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.journal import JournalError
from muri.slurm_plugin.records.roles import Role, read_job
from muri_lab.twin.invariants import Watch
from muri_lab.twin.story import Story
from muri_lab.twin.twin import Twin

CALM_AFTER_S: Final = 600.0  # From then on nothing goes wrong any more


class Stage:
    """A twin on which a story is told."""

    def __init__(self, story: Story, place: Path, tell: Callable[[str], None] | None = None) -> None:
        self.story = story  # The story
        self.twin = Twin(story.site, Config(**story.config).tuned(**story.tuning), place)  # The twin
        self.watch = Watch(self.twin, self.twin.config.grouping.max_wait_s)  # Watches over the invariants
        self.away_until_s = self.full_until_s = 0.0
        self.removed = False  # Whether Muri was removed for good
        self.changed_s = self.looked_s = 0.0
        self._place = place
        self._heard = tell
        self._process: ExitStack | None = None
        self._controller: Controller | None = None
        self._seconds = 0
        self._moved_aside = 0

    def tell(self, text: str) -> None:
        """Tell people."""
        if self._heard is not None:
            self._heard(f"{self.twin.time.now_s - self.twin.begun_s:8.1f} s  {text}")

    @property
    def has_listeners(self) -> bool:
        """Whether anybody is told."""
        return self._heard is not None

    # The controller's process

    def controller(self) -> Controller:
        """The controller, in a new process where the last one has ended."""
        if self._controller is None:
            self._process = ExitStack()
            self._controller = self._process.enter_context(self.twin.controller())
        if self.twin.time.now_s < self.full_until_s:
            # A newly opened file has no room either.
            self._controller._journal._connection.execute("PRAGMA query_only=1")
        return self._controller

    def begun(self) -> list[str]:
        """Return the journal's open intents; none once Muri is removed, or while a damaged journal is not repaired."""
        if self.removed:
            return []
        try:
            intents = self.controller()._journal.intents("begun")
        except MuriError as error:
            return [str(error)]
        return [f"{intent.kind} {intent.token} of {intent.payload}" for intent in intents]

    def end_process(self) -> None:
        """End the controller's process, however it stands."""
        process, self._process, self._controller = self._process, None, None
        if process is not None:
            with contextlib.suppress(Exception):
                process.close()

    def mend_journal(self) -> None:
        """Do as an administrator who reads the error: make room, or move the damaged file aside."""
        self.end_process()
        if self.twin.time.now_s < self.full_until_s:
            return
        try:
            with self.twin.controller():
                return
        except JournalError:
            self._moved_aside += 1
            for each in self.twin.config.state_dir.glob("journal.db*"):
                each.rename(each.with_name(f"aside{self._moved_aside}-{each.name}"))

    def second_controller(self) -> None:
        """Another host's controller, with files of its own, runs a cycle."""
        self._seconds += 1
        self.watch.journal_lost = True  # no journal knows of all that was begun
        config, other = self.twin.config, self._place / f"second{self._seconds}"
        self.twin.config = config.model_copy(update={"state_dir": other / "state", "status_dir": other / "status"})
        try:
            self.twin.know(self.story.profiles)
            with self.twin.controller() as controller:
                controller.cycle()
            self.watch.succeeded_s = self.twin.time.now_s
        except MuriError as error:
            self.tell(f"the second controller: {error}")
        finally:
            self.twin.config = config

    # What people do

    def note_change(self) -> None:
        """Note a change that an older snapshot could not show."""
        self.changed_s = self.twin.time.now_s

    def cancel_as_user(self, job_id: int) -> None:
        """Cancel a job, or a whole job array."""
        for each in self.twin.slurm.meant_by(job_id):
            self.watch.of(each).cancelled = True
        self.twin.slurm.cancel(job_id, "user")

    # Targets of faults

    def users_jobs(self, *states: JobState) -> list[Job]:
        """Users' jobs in some states."""
        ids = dict.fromkeys(course.job_id for course in self.twin.courses)  # an array's record stands for several
        found = [self.twin.slurm.jobs.get(job_id) for job_id in ids]
        return [job for job in found if job is not None and job.state in states]

    def own_jobs(self, role: Role) -> list[Job]:
        """Muri's own jobs of a kind that wait or run."""
        jobs = self.twin.slurm.jobs.values()
        return [job for job in jobs if job.state.is_active and read_job(job).role is role]
