"""Whether what a plan starts stays within the site's limits. Pure.

On Slurm a group is its pilot job, which holds the GPUs, and one job more for each member.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from muri.slurm_plugin.planning.actions import Join, MemberPlan, StartGroup
from muri.slurm_plugin.planning.arrays import task_count
from muri.slurm_plugin.planning.limit_rules import RUNNING, SUBMITTED, JobRule, Key, Payer, Rule, RuleBook
from muri.slurm_plugin.planning.placement import Places, ends_at_s
from muri.slurm_plugin.planning.slurm_requests import MEMBER_MEM_MIB, member_mem_mib
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.host_lists import HostListError, names_in
from muri.slurm_plugin.records.limits import will_start_by_itself
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

PILOT_EXTRA_S: Final = 600
"""A pilot outlives its members by this much, so that the last of them can end cleanly."""

_STARTED: Final = frozenset({JobState.RUNNING, JobState.SUSPENDED})
_PROMISED: Final = frozenset({Role.PILOT, Role.MEMBER, Role.DRY_RUN, Role.RELEASED})

_UNITS: Final = {"cpu": "CPUs", "mem": "MiB of memory", "node": "nodes", "gres/gpu": "GPUs"}


_Likeness = tuple[object, ...]

_likeness: Final[Callable[[Job], _Likeness]] = attrgetter(
    "user", "account", "qos", "partition", "gpu_count", "gpu_request", "node_count", "cpu_count", "cpus_per_task",
    "mem_per_node_mib", "time_limit_s", "required_nodes",
)  # fmt: skip
"""All that limits look at in a job that waits."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A job as Slurm's limits see it.

    Attributes:
        payer: Whom it counts for.
        tres: What it has of each resource; its nodes are counted in `nodes`.
        nodes: Its nodes, as far as they are known.
        is_new: Whether it is submitted now.
    """

    payer: Payer
    tres: Mapping[str, int]
    nodes: frozenset[str] = frozenset()
    is_new: bool = False


@dataclass(slots=True)
class _Tally:
    """What jobs have together."""

    amounts: Counter[tuple[Key, str]] = field(default_factory=Counter)
    nodes: dict[Key, set[str]] = field(default_factory=dict)

    def add(self, keys: Iterable[Key], start: _Start, times: int = 1) -> None:
        """Count a job that starts; -1 times takes back what was counted, save the names of nodes."""
        for key in keys:
            self.amounts[key, RUNNING] += times
            self.amounts[key, SUBMITTED] += times * start.is_new
            for name, amount in start.tres.items():
                self.amounts[key, name] += times * amount
            if start.nodes:
                self.nodes.setdefault(key, set()).update(start.nodes)


class SiteRoom:
    """The room that the site's limits, and reservations of others, leave in one cycle.

    Where limits that hold for a job are not known, it is not grouped: Muri changes time limits as an administrator,
    whom Slurm does not stop. Alone such a job is left to Slurm.

    What Slurm enforces by itself when a job starts and Muri does not foresee: limits on minutes of all jobs together
    (GrpTRESMins, GrpTRESRunMins, GrpWall), and on billing, licences, energy and burst buffers.

    Args:
        view: The queue, and what the site allows.
        pilot_qos: QOS of pilot jobs; "": that of their members.

    Attributes:
        places: Where jobs may run.
    """

    def __init__(self, view: View, pilot_qos: str = "") -> None:
        self.places = Places(view.snapshot)
        self._pilot_qos = pilot_qos
        self._view = view
        self._book = RuleBook(view.snapshot.limits)
        self._types = _gpu_types(view) if self._book.names("gres/gpu:") else {}
        self._counts_nodes = self._book.names("node")
        self._used, self._promised = _Tally(), _Tally()
        # Answers for jobs that are alike, until something is taken.
        self._no_room: dict[_Likeness, str] = {}
        self._largest: dict[tuple[_Likeness, int], tuple[int, str]] = {}
        self._largest_joining: dict[tuple[_Likeness, int], tuple[int, str]] = {}
        if view.snapshot.limits.enforced:
            self._count_jobs()

    def _count_jobs(self) -> None:
        for job in self._view.jobs.values():
            keys = self._book.keys(payer_of(job))
            if job.state is JobState.PENDING or job.state in _STARTED:
                count = task_count(job)
                for key in keys:
                    self._used.amounts[key, SUBMITTED] += count
            if job.state in _STARTED:
                self._used.add(keys, self._as_it_is(job, job.nodes))
            elif _is_promised(job):
                self._promised.add(keys, self._as_it_is(job, job.required_nodes))

    def longest_s(self, job: Job) -> int | None:
        """Return the longest time limit that partition, QOS and association allow, in seconds; None for any."""
        rules = self._book.single(payer_of(job))
        tres = _asked_by(job) if rules.most_minutes else {}
        limits = [rule.amount for rule in rules.wall]
        limits += [60 * rule.amount // tres[rule.resource] for rule in rules.most_minutes if tres.get(rule.resource)]
        return min(limits, default=None)

    def member_limit_s(self, job: Job, size: int, after_s: int = 0) -> int:
        """Return a member's time limit, in seconds, 0 for none; never less than its own.

        The user's limit was meant for the job alone; sharing must not make it run out of time, as far as that is
        allowed.

        Args:
            job: As its user submitted it.
            size: Members of the group.
            after_s: How long after the pilot it starts.
        """
        longest_s, own_s = self.longest_s(job), job.time_limit_s
        if longest_s is None:
            return own_s * size
        most_s = longest_s - PILOT_EXTRA_S - after_s
        return max(own_s, min(own_s * size, most_s) if own_s else most_s)

    def why_no_time(self, job: Job, size: int, after_s: int = 0, limit_s: int | None = None) -> str:
        """Return why a job cannot get the time that it needs in a group, "" when it can.

        Args:
            job: As its user submitted it.
            size: Members of the group.
            after_s: How long after the pilot it starts.
            limit_s: The time limit that its user asked for, where it has another one now.
        """
        longest_s, own_s = self.longest_s(job), job.time_limit_s if limit_s is None else limit_s
        needed_s = own_s * size + PILOT_EXTRA_S + after_s
        if longest_s is None or (own_s and needed_s <= longest_s):
            return ""
        asked = _hours(needed_s) if own_s else "any time"
        return (
            f"a group of {size} would need a time limit of {asked} for its pilot job, {_hours(longest_s)} are allowed"
        )

    def largest_group(self, job: ManagedJob, most: int) -> tuple[int, str]:
        """Return how large a group a job may be in, and why no larger.

        Args:
            job: A job that waits.
            most: The largest group that there is.

        Returns:
            A size, 1 when it must run alone, and the reason; "" when `most` is allowed.
        """
        alike = _likeness(job), most
        if alike not in self._largest:
            self._largest[alike] = self._largest_group(job, most)
        found = self._largest[alike]
        return self._before_reservations(job, *found) if self.places.are_set_aside else found

    def _before_reservations(self, job: Job, most: int, why: str) -> tuple[int, str]:
        """The largest group whose pilot ends before reservations begin on any nodes that the job may get."""
        for size in range(2, most + 1):
            late = self.places.of(job, pilot_limit_s(job, size)).left_to_slurm
            if late:
                return size - 1, f"the pilot job of a group of {size} could not start: {late}"
        return most, why

    def _largest_group(self, job: ManagedJob, most: int) -> tuple[int, str]:
        why = self._why_no_group(job)
        if why:
            return 1, why
        for size in range(2, most + 1):
            pilot, limit_s = self._pilot_like(job, size), pilot_limit_s(job, size)
            why = (
                self.why_no_time(job, size)
                or self._why_not_allowed(pilot, max(1, job.node_count), limit_s)
                or self._why_not_together([pilot, *([self._member_like(job)] * size)])
            )
            if why:
                return size - 1, why
        return most, ""

    def largest_when_joining(self, job: ManagedJob, most: int) -> tuple[int, str]:
        """Return how large a group may become by a job's joining it while it runs, and why no larger.

        Args:
            job: A job that waits.
            most: The largest group that there is.

        Returns:
            A size, 1 when it can join none, and the reason; "" when `most` is allowed.
        """
        alike = _likeness(job), most
        if alike not in self._largest_joining:
            self._largest_joining[alike] = self._largest_when_joining(job, most)
        return self._largest_joining[alike]

    def _largest_when_joining(self, job: ManagedJob, most: int) -> tuple[int, str]:
        why = self._why_no_member(job) or self._why_not_together([self._member_like(job)])
        if why:
            return 1, why
        sizes = range(2, most + 1)
        return next(((size - 1, why) for size in sizes if (why := self.why_no_time(job, size))), (most, ""))

    def why_no_room(self, job: ManagedJob) -> str:
        """Return why a job cannot start alone now because of what others use, "" when it can."""
        alike = _likeness(job)
        if alike not in self._no_room:
            self._no_room[alike] = self._why_no_room(job)
        return self._no_room[alike]

    def _why_no_room(self, job: ManagedJob) -> str:
        partition = self._book.partition(payer_of(job))
        if partition is not None and partition.state in ("DOWN", "INACTIVE"):
            return f"partition {partition.name} is {partition.state}"
        return self._why_over([self._alone(job)], self._used)

    def take_alone(self, job: ManagedJob) -> str:
        """Count a job that starts alone; return why it cannot, "" when it does."""
        return self.why_no_room(job) or self._take([self._alone(job)])

    def take_dry_run(self, job: ManagedJob, partition: str, time_limit_s: int) -> str:
        """Count a job that measures a waiting job's script; return why it cannot start, "" when it does.

        Args:
            job: The waiting job.
            partition: Where it is measured.
            time_limit_s: Time limit of the measurement.
        """
        start = replace(self._alone(job), payer=payer_of(job)._replace(partition=partition), is_new=True)
        why = self._why_not_allowed(start, max(1, job.node_count), time_limit_s) or self._why_not_together([start])
        return why or self._take([start])

    def capped(self, group: StartGroup, of_shared: int = 1) -> StartGroup:
        """Return a group whose pilot has no more CPUs and memory than is allowed now.

        What a plan gives it beyond its members' requests is cut. It keeps the CPUs of the largest request, and the
        memory of all: with less, members would be worse off than alone, and `take_group` says why it cannot start.
        Where Slurm allows only so much memory for each CPU, it has as many CPUs as the members' memory takes.

        Args:
            group: The group.
            of_shared: Of limits on what several jobs have together, this part at most may be in use then: 2 is half.
        """
        ranks = group.gpus_per_node * group.node_count
        asked_cpus = max(-(-member.original.cpu_count // ranks) for member in group.members)
        asked_mib = sum(member.original.mem_per_node_mib for member in group.members)
        starts = self._starts(group)
        cpus = self._most("cpu", group, starts, of_shared) // ranks
        mem_mib = self._most("mem", group, starts, of_shared) // group.node_count
        cpu_count = min(group.cpu_count, max(asked_cpus, cpus))
        partition = self._book.partition(starts[0].payer)
        if partition is not None and partition.max_mem_per_cpu_mib:
            per_rank_mib = partition.max_mem_per_cpu_mib * group.gpus_per_node
            cpu_count = max(cpu_count, -(-asked_mib // per_rank_mib))
            mem_mib = min(mem_mib, cpu_count * per_rank_mib)
        return replace(
            group, cpu_count=cpu_count, mem_per_node_mib=min(group.mem_per_node_mib, max(asked_mib, mem_mib))
        )

    def _most(self, resource: str, group: StartGroup, starts: Sequence[_Start], of_shared: int) -> int:
        """How much of a resource a group's pilot may have now; `starts` are the pilot and the members."""
        pilot, *members = starts
        rules = self._book.single(pilot.payer)
        most = [rule.amount for rule in rules.most if rule.resource == resource]
        most += [rule.amount * group.node_count for rule in rules.most_per_node if rule.resource == resource]
        if group.time_limit_s:
            minutes = [rule.amount for rule in rules.most_minutes if rule.resource == resource]
            most += [60 * amount // group.time_limit_s for amount in minutes]
        others = sum(member.tres[resource] for member in members)
        shared = [rule for rule in self._book.shared(pilot.payer) if rule.resource == resource]
        most += [rule.most // of_shared - others - _amount_of(rule, self._used, self._promised) for rule in shared]
        return max(0, min(most, default=pilot.tres[resource]))

    def take_group(self, group: StartGroup) -> str:
        """Count a group that starts; return why it cannot, "" when it does."""
        size = len(group.members)
        for member in group.members:
            job = self._view.jobs[member.job_id]
            why = self._why_no_group(job) or self.why_no_time(job, size)
            if why:
                return f"job {job.job_id}: {why}"
        return self._why_reserved(group) or self._why_not_startable(group) or self._take(self._starts(group))

    def take_pilot(self, group: StartGroup) -> tuple[StartGroup, str]:
        """Give a job that is counted as one that starts alone a pilot job of its own, so that others may join it.

        Slurm counts two jobs then, and more CPUs and memory. Where it limits how many there are, that must keep
        nobody's job from running: what is counted must leave half of the limit free. Waiting jobs are counted, too.

        Args:
            group: The job and its pilot.

        Returns:
            The group with no more CPUs and memory than is allowed, and why the job cannot have a pilot, "" when it has.
        """
        alone = self._alone(self._view.jobs[group.members[0].job_id])
        self._count(alone, -1)
        group = self.capped(group, of_shared=2)
        why = self._why_crowded(self._pilot(group).payer) or self.take_group(group)
        if why:
            self._count(alone, 1)
        return group, why

    def widen(self, group: StartGroup, wider: StartGroup) -> StartGroup:
        """Give a group that is counted what it may have of more memory, by the same rule, for those that join it."""
        for start in self._starts(group):
            self._count(start, -1)
        wider = self.capped(wider, of_shared=2)
        why = self._why_not_startable(wider)
        found = group if why else wider
        for start in self._starts(found):
            self._count(start, 1)
        return found

    def _starts(self, group: StartGroup) -> list[_Start]:
        """What Slurm counts of a group: its pilot and its members."""
        return [self._pilot(group), *(self._member(each, group.node, group.node_count) for each in group.members)]

    def _why_not_startable(self, group: StartGroup) -> str:
        """Why limits do not let a group start."""
        starts = self._starts(group)
        why = self._why_not_allowed(starts[0], group.node_count, group.time_limit_s)
        return why or self._why_not_together(starts)

    def _why_crowded(self, payer: Payer) -> str:
        for rule in self._book.shared(payer):
            if rule.resource in (RUNNING, SUBMITTED):
                counted = self._used.amounts[rule.jobs, SUBMITTED] + 1
                if 2 * counted > rule.most:
                    return (
                        f"{rule.setter} allows {_amount(rule.most, rule.resource)}{rule.each} ({rule.setting}), and a "
                        "pilot job of its own would count like a job"
                    )
        return ""

    def _count(self, start: _Start, times: int) -> None:
        """Count a job that starts, or count it no more."""
        for answers in (self._no_room, self._largest, self._largest_joining):
            answers.clear()
        self._used.add(self._book.keys(start.payer), start, times)

    def _why_reserved(self, group: StartGroup) -> str:
        """Why Slurm would not start a group's pilot: alone, its members may end early enough for these nodes."""
        end_s = ends_at_s(self._view.snapshot.taken_s, group.time_limit_s)
        why = self.places.why_not_until(end_s, group.node, group.reservation)
        return f"its pilot job could not start on {group.node}: {why}" if why else ""

    def take_join(self, join: Join) -> str:
        """Count a job that joins a running group; return why it cannot, "" when it does."""
        job, pilot = self._view.jobs[join.member.job_id], self._view.jobs[join.pilot]
        start = self._member(join.member, join.node, max(1, pilot.node_count))
        why = self._why_no_member(job) or self.why_too_late(join) or self._why_not_together([start])
        return why or self._take([start])

    def why_too_late(self, join: Join) -> str:
        """Return why a join would leave somebody too little time, or give more than there is; "" when it would not."""
        job, pilot = self._view.jobs[join.member.job_id], self._view.jobs[join.pilot]
        longest_s = self.longest_s(job)
        if longest_s is not None and join.pilot_limit_s > longest_s:
            return (
                f"the group's pilot job would need a time limit of {_hours(join.pilot_limit_s)}, "
                f"{_hours(longest_s)} are allowed"
            )
        return self._why_too_little_time(job, join, pilot) or self._why_past_reservation(join, pilot)

    def _why_too_little_time(self, job: ManagedJob, join: Join, pilot: Job) -> str:
        """Why a join would leave somebody less time than sharing takes."""
        size, now_s = join.size, self._view.snapshot.taken_s
        why = self.why_no_time(job, size, int(max(0.0, now_s - pilot.start_s)))
        for job_id, _ in join.others:
            other = self._view.jobs[job_id]
            if why or other.membership is None:
                continue
            own_s = other.membership.original.time_limit_s
            why = self.why_no_time(other, size, int(max(0.0, other.start_s - pilot.start_s)), own_s)
        return why

    def _why_past_reservation(self, join: Join, pilot: Job) -> str:
        """Why new ends would be too late: Slurm lets an administrator, and so Muri, move them into a reservation."""
        ends = [ends_at_s(self._view.snapshot.taken_s, join.member.time_limit_s)]
        others = [(self._view.jobs[job_id], limit_s) for job_id, limit_s in join.others]
        extended = [(pilot, join.pilot_limit_s), *others]
        ends += [job.start_s + limit_s for job, limit_s in extended if limit_s > job.time_limit_s]
        why = self.places.why_not_until(max(ends), join.node, pilot.reservation)
        return f"its group could not take so long: {why}" if why else ""

    def _why_no_group(self, job: ManagedJob) -> str:
        """Why a job cannot be in any group."""
        partition = self._book.partition(payer_of(job))
        if partition is not None and partition.state in ("DRAIN", "INACTIVE"):
            return f"partition {partition.name} takes no new jobs, such as a pilot job (its state is {partition.state})"
        payer = payer_of(job)
        pilots = payer._replace(qos=self._pilot_qos or payer.qos)
        return self._why_no_member(job) or self._book.why_unknown(pilots)

    def _why_no_member(self, job: ManagedJob) -> str:
        """Why a job cannot be one without GPUs beside others."""
        payer = payer_of(job)
        partition = self._book.partition(payer)
        if partition is not None and partition.exclusive:
            return f"jobs of partition {partition.name} do not share nodes (OverSubscribe=EXCLUSIVE)"
        tres = self._member_like(job).tres
        for rule in self._book.single(payer).least:
            if tres.get(rule.resource, 0) < rule.amount:
                return (
                    f"{rule.setter} demands {_amount(rule.amount, rule.resource)} of each job ({rule.setting}), a "
                    f"group's member has {tres.get(rule.resource, 0)}"
                )
        return self._book.why_unknown(payer)

    def _why_not_allowed(self, start: _Start, node_count: int, time_limit_s: int) -> str:
        """Why one job may not be as it is."""
        rules = self._book.single(start.payer)
        minutes = time_limit_s / 60
        checks: list[tuple[JobRule, float]] = [
            *((rule, time_limit_s) for rule in rules.wall),
            *((rule, start.tres.get(rule.resource, 0)) for rule in rules.most),
            *((rule, start.tres.get(rule.resource, 0) / node_count) for rule in rules.most_per_node),
            *((rule, start.tres.get(rule.resource, 0) * minutes) for rule in rules.most_minutes),
        ]
        for rule, wanted in checks:
            if wanted > rule.amount:
                return (
                    f"{rule.setter} allows {_amount(rule.amount, rule.resource)} for each job ({rule.setting}), Muri's "
                    f"would have {wanted:g}"
                )
        return ""

    def _why_not_together(self, starts: Sequence[_Start]) -> str:
        """Why a group's jobs cannot start now: jobs that Slurm will start by itself come first."""
        return self._why_over(starts, self._used, self._promised)

    def _why_over(self, starts: Sequence[_Start], *present: _Tally) -> str:
        """Why jobs cannot start beside those that are counted already."""
        rules = [rule for payer in dict.fromkeys(start.payer for start in starts) for rule in self._book.shared(payer)]
        if not rules:
            return ""
        added = _Tally()
        for start in starts:
            added.add(self._book.keys(start.payer), start)
        for rule in rules:
            more = _amount_of(rule, added)
            total = _amount_of(rule, added, *present)
            if more and total > rule.most:
                return _over(rule, total)
        return ""

    def _take(self, starts: Sequence[_Start]) -> str:
        for start in starts:
            self._count(start, 1)
        return ""

    def _alone(self, job: Job) -> _Start:
        return _Start(payer_of(job), _asked_by(job), self._names(job.required_nodes))

    def _as_it_is(self, job: Job, nodes: str) -> _Start:
        """A job that runs, or that is known to start on these nodes."""
        names = self._names(nodes)
        return _Start(payer_of(job), self._typed(_asked_by(job), names), names)

    def _names(self, nodes: str) -> frozenset[str]:
        """Names of nodes, where any limit asks for them and they can be read."""
        if not nodes or not (self._counts_nodes or self._types):
            return frozenset()
        try:
            return names_in(nodes)
        except HostListError:
            return frozenset()

    def _typed(self, tres: dict[str, int], nodes: frozenset[str]) -> dict[str, int]:
        """Count GPUs of no particular type as their node's type."""
        types = {self._types[name] for name in nodes if name in self._types}
        if len(types) == 1 and not any(name.startswith("gres/gpu:") for name in tres):
            tres[f"gres/gpu:{types.pop()}"] = tres.get("gres/gpu", 0)
        return tres

    def _pilot(self, group: StartGroup) -> _Start:
        gpus, nodes = group.gpus_per_node, group.node_count
        tres = {
            "cpu": group.cpu_count * gpus * nodes,
            "mem": group.mem_per_node_mib * nodes,
            **_gpus(gpus * nodes, group.gpu_request, nodes),
        }
        names = self._names(group.node)
        payer = Payer(group.user, group.account, self._pilot_qos or group.qos, group.partition)
        return _Start(payer, self._typed(tres, names), names, is_new=True)

    def _member(self, member: MemberPlan, node: str, node_count: int) -> _Start:
        mem_mib = (member_mem_mib(member.original) or 0) * node_count
        tres = {"cpu": member.cpu_count, "mem": mem_mib}
        return _Start(payer_of(self._view.jobs[member.job_id]), tres, self._names(node))

    def _member_like(self, job: Job) -> _Start:
        """A job as a member, before there is a plan."""
        mem_mib = min(job.mem_per_node_mib, MEMBER_MEM_MIB) * max(1, job.node_count)
        return _Start(payer_of(job), {"cpu": job.task_count, "mem": mem_mib, "node": max(1, job.node_count)})

    def _pilot_like(self, job: Job, size: int) -> _Start:
        """The pilot of a group of jobs like this one, before there is a plan: the least that it may have.

        Other groups with the job may be larger than that in one thing, smaller in another; `take_group` looks again.
        """
        ranks = max(1, job.gpu_count)
        asked = _asked_by(job)
        tres = {**asked, "cpu": -(-job.given_cpus // ranks) * ranks, "mem": asked["mem"] * size}
        payer = payer_of(job)
        return _Start(payer._replace(qos=self._pilot_qos or payer.qos), tres, is_new=True)


def pilot_limit_s(job: Job, size: int) -> int:
    """Return the time limit of the pilot of a group of jobs like this one, in seconds, 0 for none."""
    return job.time_limit_s * size + PILOT_EXTRA_S if job.time_limit_s else 0


def payer_of(job: Job) -> Payer:
    """Return whom Slurm counts a job for."""
    return Payer(job.user, job.account, job.qos, job.partition)


def _is_promised(job: ManagedJob) -> bool:
    """Whether a waiting job was started by Muri and will start by itself."""
    waits_for_pilot = job.role is Role.MEMBER and job.reason == "Dependency"
    return (
        job.role in _PROMISED
        and job.state is JobState.PENDING
        and not job.held
        and (will_start_by_itself(job.reason) or waits_for_pilot)
    )


def _asked_by(job: Job) -> dict[str, int]:
    nodes = max(1, job.node_count)
    return {
        "cpu": job.given_cpus,
        "mem": job.mem_per_node_mib * nodes,
        **_gpus(job.gpu_count, job.gpu_request, nodes),
    }


def _gpus(count: int, request: str, node_count: int) -> dict[str, int]:
    """GPUs, and those of each type that is asked for, such as "gres/gpu:a100:2"."""
    found = {"gres/gpu": count}
    for item in request.split(","):
        name, _, number = item.rpartition(":")
        if name.startswith("gres/gpu:") and number.isdigit():
            found[name] = found.get(name, 0) + int(number) * node_count
    return found


def _gpu_types(view: View) -> dict[str, str]:
    return {node.name: node.gpu_type for node in view.snapshot.nodes if node.gpu_count and node.gpu_type != "gpu"}


def _amount_of(rule: Rule, *tallies: _Tally) -> int:
    if rule.resource == "node":
        return len(set().union(*(tally.nodes.get(rule.jobs, ()) for tally in tallies)))
    return sum(tally.amounts[rule.jobs, rule.resource] for tally in tallies)


def _over(rule: Rule, total: int) -> str:
    return (
        f"{rule.setter} allows {_amount(rule.most, rule.resource)}{rule.each} ({rule.setting}), {rule.whose} would "
        f"have {total}"
    )


def _amount(amount: int, resource: str) -> str:
    return f"{amount} {_UNITS.get(resource, resource)}" if resource else f"{amount} s"


def _hours(seconds: int) -> str:
    return f"{seconds / 3600:.4g} h"
