"""What has become of each job so far, by row."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from muri.policies.speed.model import Floats
from muri.simulator.model import JobRecord, TraceJob
from muri.simulator.synergy_reference.jobs import ROUND_S, JobTable, Rows


@dataclass
class Ledger:
    """Arrays by row of the table; times in seconds.

    Attributes:
        table: The jobs.
        left: Iterations to go.
        speed: As of the last round: with the demand, unless the job was cut to its fair share.
        rounds: Rounds in which it ran.
        starts: Starts, the first included.
        start_s: First start; not a number before it.
        end_s: End; not a number before it.
        seen_s: End of its last round; before the first, its arrival.
        urgent: Whether it goes first for good, having waited too long.
    """

    table: JobTable
    left: Rows = field(init=False)
    speed: Floats = field(init=False)
    rounds: Rows = field(init=False)
    starts: Rows = field(init=False)
    start_s: Floats = field(init=False)
    end_s: Floats = field(init=False)
    seen_s: Floats = field(init=False)
    urgent: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has run yet."""
        count = len(self.table.jobs)
        self.left = self.table.iterations.copy()
        self.speed = self.table.speed.copy()
        self.rounds = np.zeros(count, dtype=np.int64)
        self.starts = np.zeros(count, dtype=np.int64)
        self.start_s = np.full(count, np.nan)
        self.end_s = np.full(count, np.nan)
        self.seen_s = self.table.submit_s.copy()
        self.urgent = np.zeros(count, dtype=np.bool_)

    def run_round(self, now_s: float, queue: Rows, rows: Rows, speeds: Floats) -> Rows:
        """Let jobs run for one round.

        Args:
            now_s: When it starts.
            queue: Who is there.
            rows: Who runs.
            speeds: How fast each is: its speed with the demand, or 1 with the fair share.

        Returns:
            Those that ended.
        """
        first = self.rounds[rows] == 0
        self.starts[rows] += first | (self.seen_s[rows] != now_s)
        self.start_s[rows[first]] = now_s
        self.rounds[rows] += 1
        self.seen_s[rows] = now_s + ROUND_S
        self.speed[queue] = self.table.speed[queue]
        self.speed[rows] = speeds
        left = self.left[rows] - np.where(speeds == 1.0, self.table.fair_steps[rows], self.table.best_steps[rows])
        self.left[rows] = left
        ended = left <= 0
        done = rows[ended]
        self.end_s[done] = now_s + ROUND_S
        return done

    def records(self) -> tuple[JobRecord, ...]:
        """One for each job that has ended, by job id."""
        rows = np.flatnonzero(~np.isnan(self.end_s)).tolist()
        return tuple(sorted(map(self._record, rows), key=lambda record: record.job.job_id))

    def unfinished(self) -> tuple[TraceJob, ...]:
        """The other jobs, in order of submission."""
        return tuple(self.table.jobs[row] for row in np.flatnonzero(np.isnan(self.end_s)).tolist())

    def _record(self, row: int) -> JobRecord:
        return JobRecord(
            job=self.table.jobs[row],
            start_s=float(self.start_s[row]),
            end_s=float(self.end_s[row]),
            run_s=float(self.rounds[row] * ROUND_S),
            restarts=int(self.starts[row]) - 1,
        )
