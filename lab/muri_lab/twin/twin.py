"""The twin itself: `Controller.cycle` unchanged, with journal and store, on a virtual Slurm in virtual time."""

import itertools
import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from muri.profiler.records import StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import Surroundings, open_controller
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.controller.events import Bell
from muri.slurm_plugin.controller.loop import run_forever
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.tables import GresConf
from muri.slurm_plugin.private_files import make_private_directory
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job
from muri_lab.twin.clock import VirtualTime
from muri_lab.twin.gateway import NoAccounts, VirtualGateway
from muri_lab.twin.programs import NodeSide, TrainingScript
from muri_lab.twin.sharing import Sharing
from muri_lab.twin.site import Site
from muri_lab.twin.slurm import VirtualSlurm
from muri_lab.twin.submission import Submission, sbatch

EPOCH_S: Final = 1_700_000_000.0  # When virtual time begins, in seconds since the epoch
_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (a directory for shared memory, not for guessable names)


@dataclass(slots=True)
class Course:
    """What became of one submission."""

    asked: Submission  # The submission
    job_id: int = 0  # Its id, 0 where Slurm refused it
    submitted_s: float = 0.0  # When it was in the queue
    starts_s: list[float] = field(default_factory=list)  # When each of its runs started
    trained_s: tuple[float, float] = (0.0, 0.0)  # When training began and when it came to its end, of the last run
    end_s: float = 0.0  # When it ended for good; 0 while it has not
    state: str = ""  # How it ended; "" while it has not
    exit_code: int = 0  # Its exit code
    run_s: float = 0.0  # Seconds in which it held GPUs, its group's included
    shared_s: float = 0.0  # Of these, the seconds in a group
    pilots: list[int] = field(default_factory=list)  # Placeholder jobs of the groups in which it trained, in order
    running: bool = False  # Whether it runs now


class Stop:
    """The part of threading.Event that the controller's loop needs, in virtual time."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._set = False

    def set(self) -> None:
        """Tell the controller to stop."""
        self._set = True

    def clear(self) -> None:
        """Let a controller run again."""
        self._set = False

    def is_set(self) -> bool:
        """Whether it was told to."""
        return self._set

    def wait(self, timeout: float) -> bool:
        """Let time pass."""
        end_s = self._time.now_s + timeout
        while not self._set and self._time.now_s < end_s:
            next_s = self._time.next_due_s
            self._time.advance(end_s if next_s is None else min(end_s, next_s))
        return self._set


class _Happenings:
    """What slurmctld lets the controller know of arrivals and ends; in the twin without delay."""

    def __init__(self, slurm: VirtualSlurm) -> None:
        self._happened = False
        slurm.notes.append(self._note)

    def _note(self, what: str, _: Job) -> None:
        self._happened |= what in {"submitted", "requeued", "ended"}

    def look(self) -> bool:
        """Whether something has happened since the last look or mark."""
        happened, self._happened = self._happened, False
        return happened

    def mark(self) -> bool:
        """The cycle that begins sees all."""
        self._happened = False
        return False


class Twin:
    """A virtual cluster with a controller's files."""

    def __init__(self, site: Site, config: Config, folder: Path, sharing: Sharing | None = None) -> None:
        self.begun_s = EPOCH_S  # When virtual time began
        self.time = VirtualTime(EPOCH_S)  # The clock
        self.slurm = VirtualSlurm(self.time, site)  # The cluster
        self.nodes = NodeSide(self.slurm, sharing or Sharing())  # What runs there
        self.gateway = VirtualGateway(self.nodes)  # The way to it
        self.config = config.model_copy(update={"state_dir": folder / "state", "status_dir": folder / "status"})
        self.courses: list[Course] = []  # of each submission in order, or of each task of a job array
        self.stop = Stop(self.time)  # Tells the controller to stop
        self.left = 0  # How many submissions have not ended
        self._of_job: dict[int, Course] = {}
        self._tasks: dict[int, list[Course]] = {}
        self._numbers = itertools.count(1)
        self.slurm.notes.append(self._note)
        self.nodes.on_training = self._note_training

    def know(self, profiles: Iterable[StageProfile]) -> None:
        """Put profiles into the store."""
        make_private_directory(self.config.state_dir)
        with ProfileStore(self.config.state_dir / "profiles.db") as store:
            store.put_all(profiles)

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Let users submit these jobs, each at its time."""
        for asked in submissions:
            tasks = [Course(asked) for _ in range(max(1, asked.task_count))]
            self.courses += tasks
            self.left += len(tasks)
            self.time.at(asked.submit_s, partial(self._typed, tasks))

    def _typed(self, tasks: list[Course]) -> None:
        self.time.after(self.slurm.site.delays.submit_s, lambda: self._sbatch(tasks))

    def _sbatch(self, tasks: list[Course]) -> None:
        if self.slurm.away:  # sbatch tries again
            self.time.after(10.0, lambda: self._sbatch(tasks))
            return
        try:
            job_id = sbatch(self.nodes, tasks[0].asked)
        except GatewayError as error:
            self._end(tasks, f"refused: {error}", self.time.now_s)
            return
        for course in tasks:
            course.job_id, course.submitted_s = job_id, self.time.now_s
        self._of_job[job_id] = tasks[-1]  # the last task keeps the record of all
        self._tasks[job_id] = tasks

    def _end(self, tasks: Iterable[Course], state: str, end_s: float, exit_code: int = 0) -> None:
        for course in tasks:
            course.state, course.end_s, course.exit_code = state, end_s, exit_code
            self.left -= 1

    def course_of(self, job_id: int) -> Course | None:
        """What became of a job; None for Muri's own."""
        return self._of_job.get(job_id)

    def _split(self, job: Job) -> None:
        """A job array's task leaves the record of those that wait."""
        array = self.slurm.ledger[job.job_id].array
        course, *self._tasks[array] = self._tasks[array]
        course.job_id = job.job_id
        self._of_job[job.job_id], self._tasks[job.job_id] = course, [course]

    def _note(self, what: str, job: Job) -> None:
        if what == "split" and self.slurm.ledger[job.job_id].array in self._tasks:
            self._split(job)
        course = self._of_job.get(job.job_id)
        if course is None:
            return
        if what == "started":
            course.starts_s.append(job.start_s)
            course.running = True
        elif what in {"requeued", "ended"} and course.running:
            self._add_up(course, job)
        if what == "ended":
            self._end(self._tasks[job.job_id], job.state.value, job.end_s, job.exit_code)

    def _add_up(self, course: Course, job: Job) -> None:
        """Count the run that has ended."""
        seconds = max(0.0, self.time.now_s - course.starts_s[-1])
        course.running = False
        course.run_s += seconds
        if tags.is_member(job.admin_comment):
            course.shared_s += seconds

    def _note_training(self, what: str, script: TrainingScript) -> None:
        course = self._of_job.get(script.job_id)
        if course is None:
            return
        if what == "begun":
            course.trained_s = (self.time.now_s, 0.0)
            if script.runtime is not None:
                course.pilots.append(script.runtime.pilot.job_id)
        else:
            course.trained_s = (course.trained_s[0], self.time.now_s)

    def token(self) -> str:
        """Name an intent: the same name in every run."""
        return f"{next(self._numbers):012x}"

    @contextmanager
    def controller(self) -> Iterator[Controller]:
        """Start the controller's process."""
        around = Surroundings(self.stop, self.time, NoAccounts(), self.token, GresConf(None))
        with open_controller(self.config, self.gateway, surroundings=around) as controller:
            yield controller

    def run(self, first_cycle_s: float = 0.0, *, on_events: bool = False) -> None:
        """Run the controller's own loop until every submitted job has ended."""
        bell = Bell((_Happenings(self.slurm),), self.time) if on_events else None
        self.time.after_event = self._stop_at_end
        self.time.sleep(first_cycle_s)
        with quiet(), self.controller() as controller:
            run_forever(controller, self.config.interval_s, self.config.tuning.gate_watch_s, self.stop, self.time, bell)

    def run_without_controller(self) -> None:
        """Leave all to Slurm until every submitted job has ended."""
        self.time.after_event = self._stop_at_end
        self.stop.wait(math.inf)

    def _stop_at_end(self) -> None:
        if not self.left:
            self.stop.set()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the controller's log to itself: it tells virtual times as if they were now."""
    logger = logging.getLogger("muri")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Handler(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell one record."""
        self._tell(f"muri: {record.getMessage()[:400]}")


@contextmanager
def heard(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell what the controller logs."""
    logger, handler = logging.getLogger("muri"), _Handler(tell)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def folder() -> Iterator[Path]:
    """A directory for a twin's files: in memory where that is possible, since SQLite waits for each write."""
    with tempfile.TemporaryDirectory(prefix="twin-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as name:
        yield Path(name)
