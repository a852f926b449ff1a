"""One cycle of Pollux: how many GPUs for whom, which ones, and who waits."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from muri.policies.cycle import reasons
from muri.policies.cycle.packed import Holding, PackedGpus
from muri.policies.cycle.selection import pools
from muri.policies.cycle.slurms_queue import SlurmsQueue
from muri.policies.options import PolicyOptions
from muri.policies.pollux import reasons as why
from muri.policies.pollux.allocate import allocate
from muri.policies.pollux.applicants import Candidate, applicant_of, candidates_of, is_elastic, speed_of
from muri.policies.reason import Reason
from muri.policies.types import Plan, PlanRequest, Sharer, Solo, Waiting

Sized = tuple[Candidate, int]
"""A job and how many GPUs it should get."""


class PolluxCycle:
    """What is decided so far.

    Args:
        request: Jobs, nodes and what runs; `check_request(request, packs=True, elastic=True)` let it pass.
        options: The policy's options.
    """

    def __init__(self, request: PlanRequest, options: PolicyOptions) -> None:
        self._request = request
        self._packed = PackedGpus(request)
        self._before = dict(self._packed.holdings)
        self._released: list[Solo] = []
        self._waiting: list[Candidate] = []
        self._slurm = SlurmsQueue(
            request, self._packed.free, options.max_wait_s, self._released, set_aside=lambda job: None
        )
        self._candidates = [
            candidate
            for candidate in candidates_of(request, self._packed, options)
            if candidate.held or not self._slurm.takes_larger(candidate.job)
        ]

    def decide(self) -> None:
        """Give out the GPUs of every set of partitions that shares no node with the others."""
        for pool in pools(self._request):
            chosen = [candidate for candidate in self._candidates if candidate.job.partition in pool]
            self._place(self._sized(pool, chosen))

    def result(self, name: str) -> Plan:
        """The plan."""
        holdings = [self._packed.holdings[job_id] for job_id in sorted(self._packed.holdings)]
        return Plan(
            name,
            solo=tuple(self._released),
            sharers=tuple(self._sharer(holding) for holding in holdings),
            waiting=tuple(self._explain_waiting()),
        )

    def _sized(self, pool: frozenset[str], candidates: Sequence[Candidate]) -> list[Sized]:
        """How many GPUs for whom."""
        places = {gpu.place for partition in pool for gpu in self._packed.of_partition(partition)}
        movable = {candidate.job.job_id for candidate in candidates}
        fixed = (holding for job_id, holding in self._before.items() if job_id not in movable)
        gpu_count = len(places - {gpu.place for holding in fixed for gpu in holding.gpus})
        fair = max(1, gpu_count // max(1, len(candidates)))
        applicants = [applicant_of(candidate, self._request, fair) for candidate in candidates]
        return list(zip(candidates, allocate(applicants, gpu_count), strict=True))

    def _place(self, sized: Iterable[Sized]) -> None:
        """What keeps its size stays; of the others, the largest choose first.

        Who finds no place tries fewer GPUs; in the end, whoever is left takes the fewest that he can do with.
        """
        moving = [(candidate, count) for candidate, count in sized if count != candidate.held or not count]
        for candidate, _ in moving:
            if candidate.held:
                self._packed.take(candidate.job.job_id)
        moving.sort(key=lambda item: (-item[1], item[0].urgency))
        fewer = (
            (candidate, [size for size in reversed(candidate.counts) if size <= count]) for candidate, count in moving
        )
        left = [candidate for candidate, sizes in fewer if not self._put(candidate, sizes)]
        left.sort(key=lambda candidate: candidate.urgency)
        self._waiting += [candidate for candidate in left if not self._put(candidate, candidate.counts)]

    def _put(self, candidate: Candidate, sizes: Iterable[int]) -> bool:
        """Put a job on GPUs of the first size that is free, on those that it held if it comes to the same number."""
        job, before = candidate.job, self._before.get(candidate.job.job_id)
        for size in sizes:
            if before is not None and size == candidate.held and self._packed.free.are_free(before.shares):
                self._packed.put(job, before.gpus)
                return True
            if self._packed.put_on_free(job, gpu_count=size, gpu_mem_gib=job.gpu_mem_gib) is not None:
                return True
        return False

    def _sharer(self, holding: Holding) -> Sharer:
        job, gpu_count = holding.job, len(holding.gpus)
        before = self._before.get(job.job_id)
        speed = speed_of(job, gpu_count)
        kept = before is not None and before.gpus == holding.gpus
        notes = [reasons.kept(gpu_count, holding.shares)] if kept else []
        if before is not None and not kept:
            notes.append(reasons.MOVED if len(before.gpus) == gpu_count else why.resized(len(before.gpus), gpu_count))
        notes.append(why.sized(job, gpu_count, speed) if is_elastic(job) else why.RIGID)
        return Sharer(job.job_id, holding.shares, speed, reasons=tuple(notes), kept=kept)

    def _explain_waiting(self) -> Iterator[Waiting]:
        rigid = reasons.WaitingReasons(self._packed.free, whole_nodes=not self._slurm.is_there)
        ahead: Counter[str] = Counter()
        for candidate in sorted(self._waiting, key=lambda candidate: candidate.urgency):
            job = candidate.job
            number = ahead[job.partition]
            notes: list[Reason] = [reasons.preempted(job)] if candidate.held else []
            notes.append(why.no_gpu_left(job.partition, number) if is_elastic(job) else rigid.of(job, number))
            yield Waiting(job.job_id, tuple(notes), preempted=bool(candidate.held))
            ahead[job.partition] += 1
