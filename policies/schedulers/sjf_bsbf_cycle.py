"""One cycle of SJF-BSBF: who gets free GPUs, who joins whom, who waits."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from math import inf

from muri.policies.cycle import reasons
from muri.policies.cycle.packed import Gpus, Holding, PackedGpus
from muri.policies.cycle.slurms_queue import SlurmsQueue
from muri.policies.options import PolicyOptions
from muri.policies.priority import all_jobs
from muri.policies.reason import Reason
from muri.policies.schedulers import sjf_bsbf_reasons as explain
from muri.policies.types import Plan, PlanJob, PlanRequest, Sharer, Solo, Waiting
from muri.policies.wise_sharing.choice import Choice, choice_that_pays, choose_gpus, choose_whole_set, sizes_of
from muri.policies.wise_sharing.pair_speeds import PairSpeeds
from muri.policies.wise_sharing.partners import Offers, Partners
from muri.policies.wise_sharing.sub_batch import sub_batches


class SharingCycle:
    """What is decided so far.

    Args:
        rules: The policy's options.
        request: Jobs, GPUs, time and what sharing may do.
        tests_pairs: Whether sharing has to pay, or only to fit.
    """

    def __init__(self, rules: PolicyOptions, request: PlanRequest, *, tests_pairs: bool) -> None:
        self._request, self._tests_pairs = request, tests_pairs
        self._sharing = min(rules.max_group_size, request.max_group_size) > 1
        self._packed, self._released = PackedGpus(request), list[Solo]()
        self._slurm = SlurmsQueue(request, self._packed.free, rules.max_wait_s, self._released, self._packed.set_aside)
        self._pairs = PairSpeeds(request.interference, all_jobs(request))
        self._open: dict[tuple[str, str], Partners] = {}
        self._why: dict[int, tuple[Reason, ...]] = {}
        self._waiting: list[tuple[PlanJob, Offers]] = []
        self._new_since_refusal = False
        self._by_node, self._most_gib = cache(self._find_nodes), cache(self._find_most_gib)
        for holding in self._packed.holdings.values():
            self._why[holding.job.job_id] = (explain.kept(holding), reasons.NOT_STOPPED)
            self._offer(holding)

    def decide(self, job: PlanJob) -> None:
        """Free GPUs, else somebody's to share, else Slurm's own queue after `max_wait_s`, else waiting."""
        if self._slurm.takes_larger(job) or self._start(job):
            return
        offers = self._offers(job)
        choice = self._choose(job, offers)
        if choice is not None:
            self._join(job, choice)
        elif not self._slurm.takes_overdue(job):
            self._waiting.append((job, offers))

    def result(self, name: str) -> Plan:
        """The plan."""
        self._ask_again()
        sharers = tuple(self._sharer(holding) for holding in self._packed.holdings.values())
        return Plan(name, solo=tuple(self._released), waiting=tuple(self._explain_waiting()), sharers=sharers)

    def _ask_again(self) -> None:
        """Jobs that were refused before others started may join these: the next cycle would find the same."""
        while self._new_since_refusal:
            self._new_since_refusal = False
            refused, self._waiting = self._waiting, []
            for job, _ in refused:
                self.decide(job)

    def _sharer(self, holding: Holding) -> Sharer:
        job_id, speed = holding.job.job_id, self._pairs.of(holding)
        return Sharer(job_id, holding.shares, speed, holding.accumulate_steps, self._why[job_id], holding.kept)

    def _start(self, job: PlanJob) -> bool:
        """On free GPUs, with as large a batch as the partition's GPUs can hold."""
        most_gib = self._most_gib(job.partition)
        fitting = [way for way in sub_batches(job) if way.mem_gib <= most_gib]
        steps, mem_gib = (fitting[0].accumulate_steps, fitting[0].mem_gib) if fitting else (1, 0.0)
        holding = self._packed.put_on_free(job, gpu_mem_gib=mem_gib, accumulate_steps=steps)
        if holding is None:
            return False
        self._why[job.job_id] = (reasons.given(job, holding.shares), *explain.steps(steps))
        self._offer(holding)
        return True

    def _join(self, job: PlanJob, choice: Choice) -> None:
        holding = self._packed.put(job, choice.gpus, choice.sub_batch.accumulate_steps)
        for partner in choice.partners:
            self._offer(partner.holding)
        self._offer(holding)
        self._why[job.job_id] = explain.joined(holding, choice, tests_pairs=self._tests_pairs)

    def _offer(self, holding: Holding) -> None:
        """Let others join a job where it is alone; not one that runs on a node that has left their partition."""
        on_nodes = self._by_node(holding.job.partition)
        if self._sharing and holding.job.groupable and all(gpu.node in on_nodes for gpu in holding.gpus):
            self._new_since_refusal |= bool(self._waiting) and not holding.kept and bool(holding.own_gpus)
            self._partners(holding.job).offer(holding)

    def _partners(self, job: PlanJob) -> Partners:
        bucket = (job.user if self._request.same_user else "", job.partition)
        if bucket not in self._open:
            self._open[bucket] = Partners(self._pairs)
        return self._open[bucket]

    def _offers(self, job: PlanJob) -> Offers:
        if not self._sharing or not job.groupable:
            return Offers()
        partners = self._partners(job)
        return partners.that_pay(job) if self._tests_pairs else partners.that_fit(job)

    def _choose(self, job: PlanJob, offers: Offers) -> Choice | None:
        if not offers.partners:
            return None
        sizes = sizes_of(job, self._packed.free.largest_node(job.partition))
        if self._request.whole_sets_only:
            return choose_whole_set(job, sizes, offers.partners)
        choose = choice_that_pays if self._tests_pairs else choose_gpus
        return choose(job, sizes, offers.partners, self._by_node(job.partition))

    def _find_nodes(self, partition: str) -> dict[str, Gpus]:
        gpus = self._packed.of_partition(partition)
        return {node: tuple(group) for node, group in groupby(gpus, lambda gpu: gpu.node)}

    def _find_most_gib(self, partition: str) -> float:
        """Memory of the partition's largest GPU."""
        nodes = (node for node in self._request.nodes if partition in node.partitions)
        return max((node.gpu_mem_gib or inf for node in nodes), default=inf)

    def _explain_waiting(self) -> Iterator[Waiting]:
        no_gpus = reasons.WaitingReasons(self._packed.free, whole_nodes=not self._slurm.is_there)
        ahead: Counter[str] = Counter()
        for job, offers in self._waiting:
            why = [no_gpus.of(job, ahead[job.partition])]
            if self._sharing:
                why.append(explain.not_shared(job, offers, tests_pairs=self._tests_pairs))
            yield Waiting(job.job_id, tuple(why))
            ahead[job.partition] += 1
