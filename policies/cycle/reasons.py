"""Why a job was grouped, started, kept, stopped or kept waiting: templates and their values (see `Reason`)."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from muri.policies.cycle.free_gpus import FreeGpus, Shares
from muri.policies.types import Certificate, PlanJob, Reason

NEEDS_PROFILE = Reason("waits for a profile of its model")
QUEUES_IN_SLURM = Reason("Slurm's own queue takes it on with its original request")
ROOM_FOR_ALL = Reason("there is room for every job, so none has to share")
NOTHING_KNOWN = Reason("its profile shows no stage times, so nothing is known about sharing")
NEEDS_PROFILE_TO_SHARE = Reason("its model has no profile, so nothing is known about sharing")
NOT_STOPPED = Reason("what runs is not stopped for others here")
MOVED = Reason("moved: the GPUs that it ran on go to more urgent jobs")
REGROUPED = Reason("regrouped although it runs: its partners stop, or more urgent jobs take its place")
SPLIT_UP = Reason("the group that it ran in is split up: it goes on alone")
UNKNOWN_SPEED = Reason("their profiles are not all known; each is taken to get an equal share of the time")
_MUST_RUN_ALONE = Reason("it must run alone")
_NO_ROOM_FOR_A_GROUP = Reason("the site's limits leave no room for a group")
_PROVEN_OPTIMAL = Reason("no grouping of these jobs is better: proven")


@lru_cache(maxsize=1024)
def plural(count: int, noun: str) -> str:
    """A number and its noun: "1 GPU", "2 GPUs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@lru_cache(maxsize=64)
def blanks(count: int) -> str:
    """Blanks for a list: "{}, {} and {}"."""
    return " and ".join(filter(None, (", ".join(["{}"] * (count - 1)), "{}")))


def grouped(job_ids: Sequence[int], efficiency: float, total_speed: float) -> Reason:
    """Result of sharing."""
    return Reason(
        f"{blanks(len(job_ids))} are grouped: interleaving efficiency γ = {{:.2f}}, expected {{:.2f}} iterations' "
        "worth of work in the time of one",
        (*job_ids, efficiency, total_speed),
    )


def bottlenecks(job_ids: Sequence[int], resources: Sequence[str]) -> Reason:
    """The resource that each member of a group mostly uses, "" for one that was never measured."""
    told = ("{} mostly uses the {}" if each else "what {} mostly uses is not measured yet" for each in resources)
    values = (value for pair in zip(job_ids, resources, strict=True) for value in pair if value != "")
    return Reason("; ".join(told), tuple(values))


def sharing(gpu_count: int, gpus: Shares) -> Reason:
    """Why and where members share."""
    template, values = _place(gpu_count, gpus)
    return Reason(f"too few GPUs are free for them to run apart; they share {template}", values)


def joined(job_ids: Sequence[int], others: Sequence[int], gpu_count: int, gpus: Shares) -> Reason:
    """Which jobs join which running ones."""
    template, values = _place(gpu_count, gpus)
    verb = "joins" if len(job_ids) == 1 else "join"
    text = f"{blanks(len(job_ids))} {verb} {blanks(len(others))}, which run{'s' * (len(others) == 1)} on {template}"
    return Reason(f"{text} and go{'es' * (len(others) == 1)} on undisturbed", (*job_ids, *others, *values))


def kept(gpu_count: int, gpus: Shares) -> Reason:
    """Where a running job or group stays."""
    template, values = _place(gpu_count, gpus)
    return Reason(f"runs already and stays on {template}", values)


def given(job: PlanJob, gpus: Shares) -> Reason:
    """Where a job starts alone; single nodes are not named, because Slurm may choose another."""
    if len(gpus) > 1:
        template, values = _place(job.gpu_count, gpus)
        return Reason(f"{template} can be given to it", values)
    return Reason("{} of partition {} can be given to it", (plural(job.gpu_count, "GPU"), job.partition))


def no_partner(job: PlanJob) -> Reason:
    """Why a job that may share runs alone: there is no other job."""
    domain = (job.domain,) if job.domain else ()
    return Reason(
        f"no other job that may share with it waits (user {{}}, {'{}, ' * len(domain)}partition {{}}, {{}})",
        (job.user, *domain, job.partition, plural(job.gpu_count, "GPU")),
    )


def no_better_use(partners: int) -> Reason:
    """Why a job that may share runs alone: no other job improves on it."""
    return Reason("of the {} that may share with it, none is a better use of these GPUs", (plural(partners, "job"),))


def kept_free(node: str) -> Reason:
    """A node is kept free until this job fits."""
    return Reason("node {} takes no other jobs until it has room for this one", (node,))


def no_group_worth_it(considered: int) -> Reason:
    """Why a job that was considered for sharing got no place."""
    return Reason(
        "it was considered for sharing with {}, and no group with it is worth its place", (plural(considered, "job"),)
    )


def proven(certificate: Certificate) -> Reason:
    """How far a grouping can be from the optimum."""
    if certificate.gap <= 1e-9:
        return _PROVEN_OPTIMAL
    return Reason("the plan is proven within {:.2f} % of the optimum for these jobs", (100 * certificate.gap,))


def moving_pays(gain: float, cost: float) -> Reason:
    """Why running jobs are regrouped; gain and cost in units of the objective × seconds."""
    return Reason(
        "regrouped although it runs: until the next plan that gains {:.1f} (objective × seconds), "
        "more than the {:.1f} that restarts cost",
        (gain, max(0.0, cost)),
    )


def restart_would_not_pay(gain: float, cost: float) -> Reason:
    """Why running jobs are not regrouped; figures as for `moving_pays`."""
    return Reason(
        "not regrouped: until the next plan that would gain {:.1f} (objective × seconds), "
        "and restarts would cost {:.1f}",
        (max(0.0, gain), max(0.0, cost)),
    )


def made_room(gpu_count: int, node: str) -> Reason:
    """Why a running unit has to leave its GPUs."""
    return Reason("a more urgent job needs {} on {}, where it ran", (plural(gpu_count, "GPU"), node))


def preempted(job: PlanJob) -> Reason:
    """Why a running job stops."""
    return Reason("stopped: more urgent jobs get its {}", (plural(job.gpu_count, "GPU"),))


def larger_than_a_node(job: PlanJob, largest: int) -> Reason:
    """Why a job of several nodes is left to Slurm."""
    return Reason(
        "larger than a node: it asks for {}, and the largest node of partition {} has {}",
        (plural(job.gpu_count, "GPU"), job.partition, largest),
    )


def must_run_alone(job: PlanJob) -> Reason:
    """Why a job may not share."""
    if job.alone_reason:
        return Reason("{}", (job.alone_reason,))
    return _NO_ROOM_FOR_A_GROUP if job.groupable else _MUST_RUN_ALONE


def aged(waited: float, max_wait_s: float) -> Reason:
    """Why a job is no longer held."""
    return Reason("it has waited {}, longer than max_wait_s allows ({})", (duration(waited), duration(max_wait_s)))


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"


class WaitingReasons:
    """Why jobs stay held, asked for from the most urgent job on; `free` has the GPUs left over."""

    def __init__(self, free: FreeGpus, *, whole_nodes: bool) -> None:
        self._free = free
        self._whole_nodes = whole_nodes
        self._ends: dict[tuple[str, int, int], tuple[str, tuple[object, ...]]] = {}
        self._counted: Counter[str] = Counter()

    def ahead(self, job: PlanJob) -> int:
        """Number of waiting jobs of the job's partition that were counted before it."""
        return self._counted[job.partition]

    def count(self, job: PlanJob) -> None:
        """Count a waiting job as ahead of those that follow."""
        self._counted[job.partition] += 1

    def of(self, job: PlanJob) -> Reason:
        """Why a job waits, with the number of those ahead of it."""
        ahead = self.ahead(job)
        place = (job.partition, job.gpu_count, job.node_count)
        if place not in self._ends:
            self._ends[place] = self._end(*place)
        template, values = self._ends[place]
        if ahead < 2:
            return Reason(("1 job is ahead of it" if ahead else "it is next in line") + template, values)
        return Reason("{} jobs are ahead of it" + template, (ahead, *values))

    def _end(self, partition: str, gpu_count: int, node_count: int) -> tuple[str, tuple[object, ...]]:
        nodes, gpus, needed = (
            self._free.node_count(partition),
            self._free.gpu_count(partition),
            plural(gpu_count, "GPU"),
        )
        if not nodes:
            return " and no node of partition {} can be used now", (partition,)
        # No job of this size can start on these nodes, even if all are idle.
        larger = "; it is larger than the partition is now: it needs {}, and {} of partition {} can be used"
        if node_count > nodes or (gpus is not None and gpu_count > gpus):
            return larger, (*((plural(node_count, "node"), nodes) if node_count > nodes else (needed, gpus)), partition)
        most = self._free.most_on_one_node(partition)
        if most == 0:
            return " and no GPU is free in partition {}", (partition,)
        if node_count > 1:
            share = plural(gpu_count // node_count, "GPU")
            return "; it needs {} on each of {} nodes of partition {}", (share, node_count, partition)
        largest = self._free.largest_node(partition)
        if self._whole_nodes and largest is not None and gpu_count > largest:
            idle = plural(self._free.idle_gpus(partition), "GPU")
            return "; it needs {} on idle nodes, and the idle nodes of partition {} have {}", (needed, partition, idle)
        template = "; it needs {} on one node, and the most that is free on one node of partition {} is {}"
        return template, (needed, partition, most)


def _place(gpu_count: int, gpus: Shares) -> tuple[str, tuple[object, ...]]:
    """GPUs and the names of their nodes."""
    return f"{{}} of {blanks(len(gpus))}", (plural(gpu_count, "GPU"), *(share.node for share in gpus))
