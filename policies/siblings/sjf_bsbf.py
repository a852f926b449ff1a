"""SJF-BSBF: the shortest job first; a job without free GPUs shares them where that ends both sooner on average."""

from collections.abc import Iterator
from functools import cache
from math import inf
from typing import Final

from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import SlurmQueue
from muri.policies.cycle.queue import line_up
from muri.policies.cycle.validation import check_request
from muri.policies.options import PolicyOptions
from muri.policies.schedulers import TO_THE_END, FixedOrder, srtf
from muri.policies.siblings.packed import Holding, PackedGpus, with_promises
from muri.policies.siblings.partners import (
    Choice,
    Offers,
    PairSpeeds,
    Partners,
    choice_that_pays,
    choose_gpus,
    choose_whole_set,
    sizes_of,
    sub_batches,
)
from muri.policies.types import Plan, PlanJob, PlanRequest, Reason, Sharer, Solo, Waiting, all_jobs

_NO_DURATION: Final = Reason("its remaining time is not known, so Muri cannot tell whether sharing pays")
_NOBODY: Final = Reason(
    "no job of the same user and partition holds GPUs alone, with memory left and a known speed beside it"
)


class SjfBsbf(FixedOrder):
    """Shortest job first; it shares a running job's GPUs if both then end sooner on average.

    A job starts on free GPUs where there are enough. Otherwise it joins running ones that hold their GPUs alone, at
    most two jobs on a GPU, where Theorem 1 says that joining now is better than waiting for the other to end; its batch
    is computed in as many steps as the GPUs' memory asks for. Nothing is ever stopped. Jobs share only where both
    durations and the speeds of the pair are known.

    Source: SJF-BSBF ("wise resource sharing": best sub-batch, best benefit first).
    """

    name = "sjf-bsbf"
    order = "remaining time"
    fixed = TO_THE_END
    ranking = srtf
    supports_packing = True
    tests_pairs = True

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packed=True)
        request = with_promises(request, self.rules.min_speed)
        cycle = SharingCycle(self.rules, request, tests_pairs=self.tests_pairs)
        for contender in line_up(request, self.key(request), self.rules).contenders:
            cycle.decide(contender.job)
        return cycle.result(self.name)


class SharingCycle:
    """The decisions so far; `tests_pairs`: whether sharing has to pay, or only to fit."""

    def __init__(self, rules: PolicyOptions, request: PlanRequest, *, tests_pairs: bool) -> None:
        self._request, self._tests_pairs = request, tests_pairs
        self._sharing = min(rules.max_group_size, request.max_group_size) > 1
        self._packed, self._released = PackedGpus(request), list[Solo]()
        self._slurm = SlurmQueue(request, self._packed.free, rules.max_wait_s, self._released, self._packed.set_aside)
        self._pairs = PairSpeeds(request.interference, all_jobs(request))
        self._open: dict[tuple[str, str, str], Partners] = {}
        self._why: dict[int, tuple[Reason, ...]] = {}
        self._waiting: list[tuple[PlanJob, Offers]] = []
        self._new_since_refusal = False
        # Asked for by every waiting job, and the same for all of a partition: the memory of its largest GPU.
        self._most_gib = cache(
            lambda partition: max((node.gpu_mem_gib or inf for node in self._packed.nodes_of(partition)), default=inf)
        )
        for holding in self._packed.holdings.values():
            self._why[holding.job.job_id] = (_kept(holding), reasons.NOT_STOPPED)
            self._offer(holding)

    def decide(self, job: PlanJob) -> None:
        """Free GPUs, else shared ones, else Slurm's own queue after `max_wait_s`, else waiting."""
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
        speed, why = self._pairs.of, self._why
        sharers = tuple(
            Sharer(job_id, held.shares, speed(held), held.accumulate_steps, why[job_id], held.kept)
            for job_id, held in self._packed.holdings.items()
        )
        return Plan(name, solo=tuple(self._released), waiting=tuple(self._explain_waiting()), sharers=sharers)

    def _ask_again(self) -> None:
        """Jobs that were refused before others started may join these: the next cycle would find the same."""
        while self._new_since_refusal:
            self._new_since_refusal = False
            refused, self._waiting = self._waiting, []
            for job, _ in refused:
                self.decide(job)

    def _start(self, job: PlanJob) -> bool:
        """Start on free GPUs, with as large a batch as the partition's GPUs can hold."""
        most_gib = self._most_gib(job.partition)
        fitting = [way for way in sub_batches(job) if way.mem_gib <= most_gib]
        steps, mem_gib = (fitting[0].accumulate_steps, fitting[0].mem_gib) if fitting else (1, 0.0)
        holding = self._packed.put_on_free(job, gpu_mem_gib=mem_gib, accumulate_steps=steps)
        if holding is None:
            return False
        self._why[job.job_id] = (reasons.given(job, holding.shares), *_steps(steps))
        self._offer(holding)
        return True

    def _join(self, job: PlanJob, choice: Choice) -> None:
        holding = self._packed.put(job, choice.gpus, choice.sub_batch.accumulate_steps)
        for partner in choice.partners:
            self._offer(partner.holding)
        self._offer(holding)
        self._why[job.job_id] = _joined(holding, choice, tests_pairs=self._tests_pairs)

    def _offer(self, holding: Holding) -> None:
        """Let others join a job where it is alone; not one that runs on a node that has left their partition."""
        on_nodes = self._packed.by_node(holding.job.partition)
        if self._sharing and holding.job.may_share and all(gpu.node in on_nodes for gpu in holding.gpus):
            self._new_since_refusal |= bool(self._waiting) and not holding.kept and bool(holding.own_gpus)
            self._partners(holding.job).offer(holding)

    def _partners(self, job: PlanJob) -> Partners:
        bucket = (job.user if self._request.same_user else "", job.partition, job.domain)
        if bucket not in self._open:
            self._open[bucket] = Partners(self._pairs)
        return self._open[bucket]

    def _offers(self, job: PlanJob) -> Offers:
        if not self._sharing or not job.may_share:
            return Offers()
        partners = self._partners(job)
        return partners.that_pay(job) if self._tests_pairs else partners.that_fit(job)

    def _choose(self, job: PlanJob, offers: Offers) -> Choice | None:
        by_node = self._packed.by_node(job.partition)
        sizes = sizes_of(job, self._packed.free.largest_node(job.partition), len(by_node))
        if not offers.partners or sizes is None:
            return None
        if self._request.whole_sets_only:
            return choose_whole_set(job, sizes, offers.partners)
        choose = choice_that_pays if self._tests_pairs else choose_gpus
        return choose(job, sizes, offers.partners, by_node)

    def _explain_waiting(self) -> Iterator[Waiting]:
        no_gpus = reasons.WaitingReasons(self._packed.free, whole_nodes=not self._slurm.is_there)
        for job, offers in self._waiting:
            why = [no_gpus.of(job)]
            if self._sharing:
                why.append(_not_shared(job, offers, tests_pairs=self._tests_pairs))
            yield Waiting(job.job_id, tuple(why))
            no_gpus.count(job)


def _kept(holding: Holding) -> Reason:
    """Where a running job stays, and with which partners."""
    stays = reasons.kept(holding.job.gpu_count, holding.shares)
    partners = holding.partners
    if not partners:
        return stays
    beside = reasons.blanks(len(partners))
    return Reason(f"{stays.template}, beside {beside}", (*stays.values, *(partner.job_id for partner in partners)))


def _steps(accumulate_steps: int) -> tuple[Reason, ...]:
    """That the batch is divided."""
    if accumulate_steps == 1:
        return ()
    return (Reason("each batch is computed in {} steps, for the memory of its GPUs", (accumulate_steps,)),)


def _joined(holding: Holding, choice: Choice, *, tests_pairs: bool) -> tuple[Reason, ...]:
    """The partners that a job joins, and the expected result."""
    where = reasons.sharing(holding.job.gpu_count, holding.shares)
    template = where.template.replace("them to run apart; they share", "it to run apart; it shares")
    found = [Reason(template, where.values)]
    for partner in choice.partners:
        other = partner.holding.job.job_id
        if tests_pairs:
            text = "sharing with job {} now ends both after {} on average; one after the other it would be {}"
            found.append(Reason(text, (other, *_durations(partner.now_s, partner.after_s))))
        else:
            found.append(Reason("job {} is the first with enough GPU memory (sjf-ffs makes no speed check)", (other,)))
    return (*found, *_steps(choice.sub_batch.accumulate_steps))


def _not_shared(job: PlanJob, offers: Offers, *, tests_pairs: bool) -> Reason:
    """Why a job without free GPUs joins no other."""
    if not job.may_share:
        return reasons.must_run_alone(job)
    if job.profile is None:
        return reasons.NEEDS_PROFILE_TO_SHARE
    if tests_pairs and job.remaining_s is None:
        return _NO_DURATION
    if offers.partners:
        held = sum(len(partner.gpus) for partner in offers.partners)
        count = len(offers.partners)
        verb = "holds" if count == 1 else "hold"
        return Reason(
            f"{{}} that it could share with {verb} {{}}, but not as it needs them",
            (reasons.plural(count, "job"), reasons.plural(held, "GPU")),
        )
    if offers.refused is None:
        return _NOBODY
    refused = offers.refused
    return Reason(
        "sharing with job {} now would end both after {} on average; waiting for it to end comes to {}",
        (refused.holding.job.job_id, *_durations(refused.now_s, refused.after_s)),
    )


def _durations(*seconds: float) -> tuple[str, ...]:
    return tuple(reasons.duration(value) for value in seconds)
