"""What every job has received so far: arrays that change from event to event."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from muri.policies.speed.model import Floats, Indices
from muri.simulator.reference.jobs import Flags, JobTable


@dataclass(slots=True)
class Ledger:
    """Progress of all jobs; rows are those of the job table.

    Attributes:
        table: The jobs.
        now_s: Time of the last event.
        queue: Rows of the jobs that are in the system, in the order that the last plan left behind; ties of the next
            plan are broken by it.
        running: Who runs.
        left: Iterations left.
        period_s: Seconds per iteration at present, for those who run.
        overhead_s: What the next event costs, for those who run.
        received_s: Seconds of having run, whatever was achieved in them.
        waited_s: Seconds of having waited.
        start_s: First start; NaN before.
        end_s: End; NaN before.
        starts: How many times the job was started.
        regroups: How many times it went on in another company.
        shared_s: Of the seconds received, those in a group.
        group: Rows of the company, itself included, of each job that shares GPUs.
        shares: Who is in a group.
        node: First node of those who run.
        gpus_held: GPUs that are given out, shared ones once; kept by those who place.
    """

    table: JobTable
    now_s: float
    queue: Indices
    running: Flags
    left: Floats
    period_s: Floats
    overhead_s: Floats
    received_s: Floats
    waited_s: Floats
    start_s: Floats
    end_s: Floats
    starts: Indices
    regroups: Indices
    shared_s: Floats
    shares: Flags
    node: Indices
    gpus_held: int = 0
    group: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _ran_before: Flags = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    @classmethod
    def of(cls, table: JobTable) -> "Ledger":
        """Nobody has arrived."""
        count = len(table)
        zeros = [np.zeros(count) for _ in range(3)]
        return cls(
            table=table,
            now_s=0.0,
            queue=np.empty(0, dtype=np.intp),
            running=np.zeros(count, dtype=np.bool_),
            left=table.iterations.copy(),
            period_s=table.iteration_s.copy(),
            overhead_s=table.overhead_s.copy(),
            received_s=zeros[0],
            waited_s=zeros[1],
            start_s=np.full(count, np.nan),
            end_s=np.full(count, np.nan),
            starts=np.zeros(count, dtype=np.intp),
            regroups=np.zeros(count, dtype=np.intp),
            shared_s=zeros[2],
            shares=np.zeros(count, dtype=np.bool_),
            node=np.zeros(count, dtype=np.intp),
        )

    @property
    def remaining_s(self) -> Floats:
        """Seconds of service that each job in the queue still needs, alone; in the order of the queue."""
        return np.asarray(self.left[self.queue] * self.table.iteration_s[self.queue])

    def on(self) -> Indices:
        """Who runs, in the order of the queue."""
        return self.queue[self.running[self.queue]]

    def leave(self, jobs: Sequence[int], now_s: float) -> None:
        """Some jobs end."""
        self._account(np.asarray(jobs, dtype=np.intp), now_s)
        self.end_s[jobs] = now_s
        self.running[jobs] = False
        self.shares[jobs] = False
        self.queue = self.queue[~np.isin(self.queue, jobs)]

    def arrive(self, jobs: Sequence[int]) -> None:
        """Some jobs enter the queue, at its end."""
        self.queue = np.concatenate([self.queue, np.asarray(jobs, dtype=np.intp)])

    def advance(self, now_s: float) -> None:
        """Let everybody get on until now; each event takes its overhead from all who run, moved or not."""
        on = self.on()
        gained_s = np.maximum(now_s - self.now_s - self.overhead_s[on], 0.0)
        self.left[on] -= gained_s / self.period_s[on]
        self._account(on, now_s)
        off = self.queue[~self.running[self.queue]]
        self.waited_s[off] += now_s - np.maximum(self.now_s, self.table.submit_s[off])
        self.now_s = now_s

    def _account(self, on: Indices, now_s: float) -> None:
        # The simulator adds the time and takes the last event's away again; in another order the last bit differs.
        self.received_s[on] = self.received_s[on] + now_s - self.now_s
        self.shared_s[on[self.shares[on]]] += now_s - self.now_s

    def run_only(self, jobs: Sequence[int], nodes: Sequence[int] | None = None) -> None:
        """From now on these run, and nobody else.

        Args:
            jobs: Rows.
            nodes: First node of each; None where placement doesn't count.
        """
        if nodes is not None:
            self.node[jobs] = nodes
        self._ran_before = self.running
        self.running = np.zeros(len(self.running), dtype=np.bool_)
        self.running[jobs] = True
        started = np.flatnonzero(self.running & ~self._ran_before)
        self.starts[started] += 1
        first = started[np.isnan(self.start_s[started])]
        self.start_s[first] = self.now_s

    def share(self, group: dict[int, tuple[int, ...]]) -> None:
        """From now on these share GPUs, and nobody else; called after `run_only`."""
        stayed = (self._ran_before & self.running).tolist()
        before = self.group
        others = [job for job, members in group.items() if stayed[job] and before.get(job) != members]
        others += [job for job in before if stayed[job] and job not in group]
        self.regroups[others] += 1
        self.group = group
        self.shares = np.zeros(len(self.running), dtype=np.bool_)
        self.shares[list(group)] = True
