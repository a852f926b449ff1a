"""The room that a site's limits leave. Pure.

Slurm judges whatever a job's user submits, and the pilot jobs and dry runs that Muri submits in that user's name. What
it does not judge stands here, because Muri acts as an administrator, whose changes Slurm exempts from limits: time
limits that it raises, and the CPUs and memory that members keep. A group is also more jobs than its user submitted: the
pilot must not take from a user what limits on the number of jobs allow. And a job that Slurm would not start gets no
GPUs in a plan.

Slurm looks at the QOS of the partition, then the job's own (the other way round with the flag OverPartQOS), then the
user's association and the accounts above it. Where two of them limit the same thing, the first wins, however large;
only the accounts of a chain all count. The partition's own limits hold besides.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Final, NamedTuple

from muri.slurm_plugin.planning.actions import Join, MemberPlan, StartGroup
from muri.slurm_plugin.planning.placement import Places, ends_at_s
from muri.slurm_plugin.planning.slurm_requests import member_mem_mib, pilot_mem_mib
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.limits import Association, Limits, Qos, SiteLimits
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

PILOT_EXTRA_S: Final = 600
"""A pilot outlives its members by this much, so that the last of them can end cleanly."""

RUNNING: Final = "running jobs"
SUBMITTED: Final = "waiting and running jobs"

_STARTED: Final = frozenset({JobState.RUNNING, JobState.SUSPENDED})
_PROMISED: Final = frozenset({Role.PILOT, Role.MEMBER, Role.DRY_RUN, Role.RELEASED})
_UNITS: Final = {"cpu": "CPUs", "mem": "MiB of memory", "gres/gpu": "GPUs"}

# Limits on jobs together: whose jobs, what is counted, the field of Limits, Slurm's name of it in a QOS.
_COUNTS: Final = (
    ("user", RUNNING, "max_jobs_per_user", "MaxJobsPerUser"),
    ("user", SUBMITTED, "max_submit_per_user", "MaxSubmitJobsPerUser"),
    ("account", RUNNING, "max_jobs_per_account", "MaxJobsPerAccount"),
    ("account", SUBMITTED, "max_submit_per_account", "MaxSubmitJobsPerAccount"),
    ("all", RUNNING, "grp_jobs", "GrpJobs"),
    ("all", SUBMITTED, "grp_submit", "GrpSubmit"),
)
_TRES: Final = (
    ("user", "max_tres_per_user", "MaxTRESPerUser"),
    ("account", "max_tres_per_account", "MaxTRESPerAccount"),
    ("all", "grp_tres", "GrpTRES"),
)

Key = tuple[str, ...]
"""Jobs that are counted together: those of a QOS, of a user in a QOS, of an association, of an account, …"""

_likeness: Final[Callable[[Job], tuple[object, ...]]] = attrgetter(
    "user", "account", "qos", "partition", "gpu_count", "gpu_request", "node_count", "cpu_count", "cpus_per_task",
    "mem_per_node_mib", "time_limit_s",
)  # fmt: skip
"""All that limits look at in a job that waits."""


class Payer(NamedTuple):
    """The user, account, QOS and partition that Slurm counts a job for."""

    user: str
    account: str
    qos: str
    partition: str


class _Limit(NamedTuple):
    """A limit on a resource: how much, who sets it, Slurm's name of it; of jobs together: which, and whose they are."""

    resource: str
    most: int
    setter: str
    setting: str
    jobs: Key = ()
    each: str = ""
    whose: str = ""

    @property
    def text(self) -> str:
        """How much of what, for people."""
        return f"{self.most} {_UNITS.get(self.resource, self.resource)}" if self.resource else f"{self.most} s"


class _Level(NamedTuple):
    """A QOS or an association: its name for people, its limits, and which jobs count together for it."""

    name: str
    limits: Limits
    key: Key
    factor: float = 1.0


class _Start(NamedTuple):
    """A job as Slurm's limits see it: its payer, its share of its nodes, and whether it is submitted now."""

    payer: Payer
    tres: Mapping[str, int]
    is_new: bool = False
    nodes: int = 1


class _Rules:
    """The limits that hold for one payer."""

    def __init__(self, limits: SiteLimits, payer: Payer, associations: Mapping[Key, Association]) -> None:
        self._payer = payer
        known_qos = {each.name: each for each in limits.qos} if limits.enforced else {}
        self.partition = next((each for each in limits.partitions if each.name == payer.partition), None)
        names = (self.partition.qos if self.partition is not None else "", payer.qos)
        qos = [known_qos[name] for name in dict.fromkeys(names) if name in known_qos]
        if len(qos) == 2 and qos[1].over_partition_qos:
            qos.reverse()
        job_qos = known_qos.get(payer.qos, Qos(""))
        own, accounts = _chain(payer, associations) if limits.enforced else (None, [])
        self._qos = [_Level(f"QOS {each.name}", each.limits, ("qos", each.name)) for each in qos]
        self._chain = [
            _Level(
                f"{each.user} in {each.account}" if each.user else f"account {each.account}",
                each.limits,
                ("association", each.account, each.user, each.partition),
                job_qos.limit_factor,
            )
            for each in (*filter(None, (own,)), *accounts)
        ]
        self._own = self._chain[: own is not None]
        self.keys = (  # all that its jobs are counted in, whether or not it is limited for this payer
            *(
                (*level.key, *of)
                for level in self._qos
                for of in ((), ("user", payer.user), ("account", payer.account))
            ),
            *(level.key for level in self._chain),
        )
        self.together = tuple(self._together())  # limits on what its jobs have together with others
        single, of_partition = [*self._qos, *self._own], f"partition {payer.partition}"
        self.wall = [
            _Limit("", level.limits.max_wall_s, level.name, "MaxWall")
            for level in single
            if level.limits.max_wall_s is not None
        ][:1]
        if self.partition is not None and self.partition.max_time_s is not None and not job_qos.over_partition_time:
            self.wall.insert(0, _Limit("", self.partition.max_time_s, of_partition, "MaxTime"))
        self.most = _first(single, "max_tres_per_job", "MaxTRES")  # of one job, as the next four
        most_mib = None if self.partition is None else self.partition.max_mem_per_node_mib
        self.per_node = () if most_mib is None else (_Limit("mem", most_mib, of_partition, "MaxMemPerNode"),)
        self.minutes = _first(single, "max_tres_minutes_per_job", "MaxTRESMins")
        self.least = _first(single, "min_tres_per_job", "MinTRES")
        self.why_unknown = self._why_unknown(limits, names, known_qos)

    def _why_unknown(self, limits: SiteLimits, qos: Iterable[str], known_qos: Container[str]) -> str:
        payer = self._payer
        if limits.why_unknown:
            return f"the site's limits are unknown: {limits.why_unknown}"
        if self.partition is None:
            return f"the limits of partition {payer.partition} are unknown" if limits.partitions else ""
        if not limits.enforced:
            return ""
        for name in qos:
            if name and name not in known_qos:
                return f"the limits of QOS {name} are unknown"
        return "" if self._own else f"the limits of {payer.user} in account {payer.account or 'none'} are unknown"

    def _together(self) -> Iterator[_Limit]:
        user, account = self._payer.user, self._payer.account
        owners = (("user", user, user), ("account", account, f"account {account}"))
        set_by_qos: set[tuple[str, str]] = set()
        for level in self._qos:
            of_level = {of: ((*level.key, of, name), f" for each {of}", whose) for of, name, whose in owners}
            found = list(_limits_on_jobs(level))
            for of, limit in found:
                jobs, each, whose = of_level.get(of, limit[-3:])
                if (of, limit.resource) not in set_by_qos:
                    yield limit._replace(jobs=jobs, each=each, whose=whose)
            set_by_qos |= {(of, limit.resource) for of, limit in found}
        for level in self._chain:
            for of, limit in _limits_on_jobs(level):
                replaced = {(of, limit.resource), ("account", limit.resource)} & set_by_qos
                if of == "user" and limit.resource in (RUNNING, SUBMITTED) and level in self._own and not replaced:
                    yield limit._replace(
                        setter=f"account {account}",
                        setting=limit.setting.replace("PerUser", ""),
                        each=" for each user",
                        whose=user,
                    )
                elif of == "all" and (of, limit.resource) not in set_by_qos:
                    yield limit


def _chain(payer: Payer, associations: Mapping[Key, Association]) -> tuple[Association | None, list[Association]]:
    """Return a payer's association and the accounts above it, the next one first."""
    own = associations.get((payer.account, payer.user, payer.partition))
    own = own or associations.get((payer.account, payer.user, ""))
    found: list[Association] = []
    above = associations.get((payer.account, "", ""))
    while above is not None and above not in found:
        found.append(above)
        above = associations.get((above.parent, "", ""))
    return own, found


def _limits_on_jobs(level: _Level) -> Iterator[tuple[str, _Limit]]:
    """Yield a level's limits on what jobs have together, each after whose jobs: of a "user", an "account" or "all"."""
    for of, resource, name, setting in _COUNTS:
        most: int | None = getattr(level.limits, name)
        if most is not None:
            yield of, _Limit(resource, most, level.name, setting, level.key, whose="its jobs")
    for of, name, setting in _TRES:
        for each in getattr(level.limits, name):
            most = int(each.amount * level.factor)
            yield of, _Limit(each.name, most, level.name, setting, level.key, whose="its jobs")


def _first(levels: Iterable[_Level], name: str, setting: str) -> tuple[_Limit, ...]:
    """Return the first limit on each resource."""
    found: dict[str, _Limit] = {}
    for level in levels:
        for each in getattr(level.limits, name):
            limit = _Limit(each.name, int(each.amount * level.factor), level.name, setting)
            found.setdefault(each.name, limit)
    return tuple(found.values())


class SiteRoom:
    """The room that the site's limits, and reservations of others, leave in one cycle.

    Where limits that hold for a job are not known, it is not grouped. Alone such a job is left to Slurm.

    What Slurm enforces by itself and Muri does not foresee: limits on each node, on types of GPUs of jobs that name
    none, on minutes of all jobs together, and on nodes, billing, licenses, energy and burst buffers.
    """

    def __init__(self, view: View, pilot_qos: str = "") -> None:
        self.places = Places(view.snapshot)
        self._pilot_qos = pilot_qos
        self._view = view
        self._limits = view.snapshot.limits
        self._associations: dict[Key, Association] = {
            (each.account, each.user, each.partition): each for each in self._limits.associations
        }
        self._rules: dict[Payer, _Rules] = {}
        self._used: Counter[tuple[Key, str]] = Counter()
        self._promised: Counter[tuple[Key, str]] = Counter()
        self._answers: dict[tuple[object, ...], tuple[int, str]] = {}
        """Of jobs that are alike, until something is taken."""
        for job in view.jobs.values() if self._limits.enforced else ():
            if job.state is JobState.PENDING or job.state in _STARTED:
                for key in self._of(payer_of(job)).keys:
                    self._used[key, SUBMITTED] += job.job_count
            if job.state in _STARTED:
                self._count(_alone(job))
            elif _is_promised(job):
                self._count(_alone(job), 1, self._promised)

    def _of(self, payer: Payer) -> _Rules:
        if payer not in self._rules:
            self._rules[payer] = _Rules(self._limits, payer, self._associations)
        return self._rules[payer]

    def _count(self, start: _Start, times: int = 1, tally: Counter[tuple[Key, str]] | None = None) -> None:
        """Count a job that starts; -1 times takes back what was counted."""
        self._answers.clear()
        tally = self._used if tally is None else tally
        for key in self._of(start.payer).keys:
            tally[key, RUNNING] += times
            tally[key, SUBMITTED] += times * start.is_new
            for name, amount in start.tres.items():
                tally[key, name] += times * amount

    def longest_s(self, job: Job) -> int | None:
        """Return the longest time limit that partition, QOS and association allow, in seconds; None for any."""
        rules = self._of(payer_of(job))
        tres = _asked_by(job) if rules.minutes else {}
        limits = [limit.most for limit in rules.wall]
        limits += [60 * limit.most // tres[limit.resource] for limit in rules.minutes if tres.get(limit.resource)]
        return min(limits, default=None)

    def member_limit_s(self, job: Job, size: int, after_s: int = 0) -> int:
        """Return a member's time limit, in seconds, 0 for none; never less than its own.

        The user's limit was meant for the job alone; sharing must not make it run out of time, as far as that is
        allowed.
        """
        longest_s, own_s = self.longest_s(job), job.time_limit_s
        if longest_s is None:
            return own_s * size
        most_s = longest_s - PILOT_EXTRA_S - after_s
        return max(own_s, min(own_s * size, most_s) if own_s else most_s)

    def why_no_time(self, job: Job, size: int, after_s: int = 0, limit_s: int | None = None) -> str:
        """Return why a job cannot get the time that it needs in a group, "" when it can."""
        longest_s, own_s = self.longest_s(job), job.time_limit_s if limit_s is None else limit_s
        needed_s = own_s * size + PILOT_EXTRA_S + after_s
        if longest_s is None or (own_s and needed_s <= longest_s):
            return ""
        asked = _hours(needed_s) if own_s else "any time"
        return (
            f"a group of {size} would need a time limit of {asked} for its pilot job, {_hours(longest_s)} are allowed"
        )

    def largest_group(self, job: ManagedJob, most: int) -> tuple[int, str]:
        """Return how large a group a waiting job may be in, 1 when it must run alone, and why no larger."""
        alike = "group", most, _likeness(job)
        if alike not in self._answers:
            no_group = self._why_no_group(job)
            self._answers[alike] = (1, no_group) if no_group else _largest(most, lambda size: self._why_not(job, size))
        largest, why = self._answers[alike]
        return self._before_reservations(job, largest, why) if self.places.are_set_aside else (largest, why)

    def _why_not(self, job: ManagedJob, size: int) -> str:
        """Why a job cannot be in a group of this many jobs like itself."""
        if why := self.why_no_time(job, size):
            return why
        payer, nodes = payer_of(job), max(1, job.node_count)
        mem_mib = nodes * pilot_mem_mib([job], job.gpus_per_node, self._limits.partition(job.partition))
        tres = {**_asked_by(job), "cpu": max(1, job.gpu_count), "mem": mem_mib}
        pilot = _Start(payer._replace(qos=self._pilot_qos or payer.qos), tres, True, nodes)
        allowed = self._why_not_allowed(pilot, pilot_limit_s(job, size))
        return allowed or self._why_not_together([pilot, *([_member_like(job)] * size)])

    def _before_reservations(self, job: Job, most: int, why: str) -> tuple[int, str]:
        """The largest group whose pilot ends before reservations begin on any nodes that the job may get."""
        for size in range(2, most + 1):
            late = self.places.of(job, pilot_limit_s(job, size)).left_to_slurm
            if late:
                return size - 1, f"the pilot job of a group of {size} could not start: {late}"
        return most, why

    def largest_when_joining(self, job: ManagedJob, most: int) -> tuple[int, str]:
        """Return how large a running group may become by a job's joining it, 1 when it can't, and why no larger."""
        alike = "join", most, _likeness(job)
        if alike not in self._answers:
            no_join = self._why_no_member(job) or self._why_not_together([_member_like(job)])
            self._answers[alike] = (1, no_join) if no_join else _largest(most, lambda size: self.why_no_time(job, size))
        return self._answers[alike]

    def why_no_room(self, job: ManagedJob) -> str:
        """Return why a job cannot start alone now because of what others use, "" when it can."""
        alike = "alone", _likeness(job)
        if alike not in self._answers:
            partition = self._of(payer_of(job)).partition
            down = partition is not None and partition.state in ("DOWN", "INACTIVE")
            why = f"partition {job.partition} is {partition.state}" if partition is not None and down else ""
            self._answers[alike] = 1, why or self._why_over([_alone(job)], self._used)
        return self._answers[alike][1]

    def take_alone(self, job: ManagedJob) -> str:
        """Count a job that starts alone; return why it cannot, "" when it does."""
        return self.why_no_room(job) or self._take([_alone(job)])

    def take_dry_run(self, job: ManagedJob, partition: str, time_limit_s: int) -> str:
        """Count a job that measures a waiting job's script; return why it cannot start, "" when it does."""
        start = _Start(payer_of(job)._replace(partition=partition), _asked_by(job), True, max(1, job.node_count))
        why = self._why_not_allowed(start, time_limit_s) or self._why_not_together([start])
        return why or self._take([start])

    def capped(self, group: StartGroup) -> StartGroup:
        """Return a group whose pilot has no more CPUs and memory than is allowed now, and no less than is demanded.

        What is beyond the requests of members that run as threads, in the pilot, is cut. It keeps the CPUs of the
        largest of these, and the memory of all: with less, they would be worse off than alone, and `take_group` says
        why it cannot start. Where Slurm allows only so much memory for each CPU, it has as many CPUs as its memory
        takes. It never has less than is demanded of each job.
        """
        asked = [member.original for member in group.members if member.isolation == "thread"]
        starts = self._starts(group)
        ranks = group.gpus_per_node * group.node_count
        asked_cpus = max((-(-each.cpu_count // ranks) for each in asked), default=group.cpu_count)
        asked_mib = sum(each.mem_per_node_mib for each in asked) if asked else group.mem_per_node_mib
        cpu_count = min(group.cpu_count, max(asked_cpus, self._most("cpu", group, starts) // ranks))
        mem_mib = max(asked_mib, self._most("mem", group, starts) // group.node_count)
        per_rank_mib = self._limits.partition(group.partition).max_mem_per_cpu_mib or 0
        per_rank_mib *= group.gpus_per_node
        if per_rank_mib:
            cpu_count = max(cpu_count, -(-asked_mib // per_rank_mib))
            mem_mib = max(asked_mib, min(mem_mib, cpu_count * per_rank_mib))
        least = {limit.resource: limit.most for limit in self._of(starts[0].payer).least}
        cpu_count = max(cpu_count, -(-least.get("cpu", 0) // ranks))
        mem_mib = max(min(group.mem_per_node_mib, mem_mib), -(-least.get("mem", 0) // group.node_count))
        return replace(group, cpu_count=cpu_count, mem_per_node_mib=mem_mib)

    def _most(self, resource: str, group: StartGroup, starts: Sequence[_Start]) -> int:
        """How much of a resource a group's pilot may have now; `starts` are the pilot and the members."""
        pilot, *members = starts
        rules = self._of(pilot.payer)
        most = [limit.most for limit in rules.most if limit.resource == resource]
        most += [limit.most * group.node_count for limit in rules.per_node if limit.resource == resource]
        if group.time_limit_s:
            most += [60 * limit.most // group.time_limit_s for limit in rules.minutes if limit.resource == resource]
        others = sum(member.tres[resource] for member in members)
        for limit in rules.together:
            if limit.resource == resource:
                counted = limit.jobs, resource
                most.append(limit.most - others - self._used[counted] - self._promised[counted])
        return max(0, min(most, default=pilot.tres[resource]))

    def take_group(self, group: StartGroup) -> str:
        """Count a group that starts; return why it cannot, "" when it does."""
        size = len(group.members)
        for member in group.members:
            job = self._view.jobs[member.job_id]
            if why := self._why_no_group(job) or self.why_no_time(job, size):
                return f"job {job.job_id}: {why}"
        # Alone, its members may end early enough for these nodes.
        end_s = ends_at_s(self._view.snapshot.taken_s, group.time_limit_s)
        if why := self.places.why_not_until(end_s, group.node, group.reservation):
            return f"its pilot job could not start on {group.node}: {why}"
        return self._why_not_startable(group) or self._take(self._starts(group))

    def take_pilot(self, group: StartGroup) -> tuple[StartGroup, str]:
        """Give a job that is counted as alone a pilot of its own that others may join; say why it cannot have one.

        Slurm counts two jobs then, and more CPUs and memory. Where it limits how many there are, that must
        keep no job from running: the count must leave half of the limit free. Waiting jobs are counted, too.
        """
        alone = _alone(self._view.jobs[group.members[0].job_id])
        self._count(alone, -1)
        group = self.capped(group)
        why = self._why_crowded(self._starts(group)[0].payer) or self.take_group(group)
        if why:
            self._count(alone)
        return group, why

    def _why_crowded(self, payer: Payer) -> str:
        for limit in self._of(payer).together:
            if limit.resource in (RUNNING, SUBMITTED) and 2 * (self._used[limit.jobs, SUBMITTED] + 1) > limit.most:
                return (
                    f"{limit.setter} allows {limit.text}{limit.each} ({limit.setting}), and a pilot job of its own "
                    "would count like a job"
                )
        return ""

    def take_join(self, join: Join) -> str:
        """Count a job that joins a running group; return why it cannot, "" when it does."""
        job, pilot = self._view.jobs[join.member.job_id], self._view.jobs[join.pilot]
        start = self._member(join.member, max(1, pilot.node_count))
        why = self._why_no_member(job) or self.why_too_late(join) or self._why_not_together([start])
        return why or self._take([start])

    def why_too_late(self, join: Join) -> str:
        """Return why a join would leave a member too little time, or give more than there is; "" when it would not."""
        job, pilot = self._view.jobs[join.member.job_id], self._view.jobs[join.pilot]
        longest_s, now_s = self.longest_s(job), self._view.snapshot.taken_s
        if longest_s is not None and join.pilot_limit_s > longest_s:
            return (
                f"the group's pilot job would need a time limit of {_hours(join.pilot_limit_s)}, "
                f"{_hours(longest_s)} are allowed"
            )
        if why := self.why_no_time(job, join.size, int(max(0.0, now_s - pilot.start_s))):
            return why
        others = [(self._view.jobs[job_id], limit_s) for job_id, limit_s in join.others]
        for other, _ in others:
            if other.membership is None:
                continue
            own_s = other.membership.original.time_limit_s
            if why := self.why_no_time(other, join.size, int(max(0.0, other.start_s - pilot.start_s)), own_s):
                return why
        # Slurm lets an administrator, and so Muri, move ends into a reservation.
        ends = [ends_at_s(now_s, join.member.time_limit_s)]
        extended = [(pilot, join.pilot_limit_s), *others]
        ends += [job.start_s + limit_s for job, limit_s in extended if limit_s > job.time_limit_s]
        why = self.places.why_not_until(max(ends), join.node, pilot.reservation)
        return f"its group could not take so long: {why}" if why else ""

    def _why_no_group(self, job: ManagedJob) -> str:
        """Why a job cannot be in any group."""
        payer = payer_of(job)
        partition = self._of(payer).partition
        if partition is not None and partition.state in ("DRAIN", "INACTIVE"):
            return f"partition {partition.name} takes no new jobs, such as a pilot job (its state is {partition.state})"
        of_pilots = payer._replace(qos=self._pilot_qos or payer.qos)
        return self._why_no_member(job) or self._of(of_pilots).why_unknown

    def _why_no_member(self, job: ManagedJob) -> str:
        """Why a job cannot be one without GPUs beside others."""
        rules = self._of(payer_of(job))
        if rules.partition is not None and rules.partition.exclusive:
            return f"jobs of partition {rules.partition.name} do not share nodes (OverSubscribe=EXCLUSIVE)"
        tres = _member_like(job).tres
        for limit in rules.least:
            if tres.get(limit.resource, 0) < limit.most:
                return (
                    f"{limit.setter} demands {limit.text} of each job ({limit.setting}), a group's member has "
                    f"{tres.get(limit.resource, 0)}"
                )
        return rules.why_unknown

    def _why_not_allowed(self, start: _Start, time_limit_s: int) -> str:
        """Why one job may not be as it is."""
        rules, minutes = self._of(start.payer), time_limit_s / 60
        checks: list[tuple[_Limit, float]] = [(limit, time_limit_s) for limit in rules.wall]
        checks += [(limit, start.tres.get(limit.resource, 0)) for limit in rules.most]
        checks += [(limit, start.tres.get(limit.resource, 0) / start.nodes) for limit in rules.per_node]
        checks += [(limit, start.tres.get(limit.resource, 0) * minutes) for limit in rules.minutes]
        for limit, wanted in checks:
            if wanted > limit.most:
                return (
                    f"{limit.setter} allows {limit.text} for each job ({limit.setting}), Muri's would have {wanted:g}"
                )
        return ""

    def _why_not_startable(self, group: StartGroup) -> str:
        """Why limits do not let a group start."""
        starts = self._starts(group)
        return self._why_not_allowed(starts[0], group.time_limit_s) or self._why_not_together(starts)

    def _why_not_together(self, starts: Sequence[_Start]) -> str:
        """Why a group's jobs cannot start now: jobs that Slurm will start by itself come first."""
        return self._why_over(starts, self._used, self._promised)

    def _why_over(self, starts: Sequence[_Start], *present: Counter[tuple[Key, str]]) -> str:
        """Why jobs cannot start beside those that are counted already."""
        limits = [
            limit for payer in dict.fromkeys(start.payer for start in starts) for limit in self._of(payer).together
        ]
        if not limits:
            return ""
        added: Counter[tuple[Key, str]] = Counter()
        for start in starts:
            self._count(start, 1, added)
        for limit in limits:
            counted = limit.jobs, limit.resource
            total = added[counted] + sum(tally[counted] for tally in present)
            if added[counted] and total > limit.most:
                allowed = f"{limit.setter} allows {limit.text}{limit.each} ({limit.setting})"
                return f"{allowed}, {limit.whose} would have {total}"
        return ""

    def _take(self, starts: Iterable[_Start]) -> str:
        for start in starts:
            self._count(start)
        return ""

    def _starts(self, group: StartGroup) -> list[_Start]:
        """What Slurm counts of a group: its pilot and its members."""
        gpus, nodes = group.gpus_per_node, group.node_count
        tres = {
            "cpu": group.cpu_count * gpus * nodes,
            "mem": group.mem_per_node_mib * nodes,
            **_gpus(gpus * nodes, group.gpu_request, nodes),
        }
        payer = Payer(group.user, group.account, self._pilot_qos or group.qos, group.partition)
        return [_Start(payer, tres, True, nodes), *(self._member(each, nodes) for each in group.members)]

    def _member(self, member: MemberPlan, node_count: int) -> _Start:
        tres = {"cpu": member.cpu_count, "mem": member_mem_mib(member) * node_count}
        return _Start(payer_of(self._view.jobs[member.job_id]), tres)


def pilot_limit_s(job: Job, size: int) -> int:
    """Return the time limit of the pilot of a group of jobs like this one, in seconds, 0 for none."""
    return job.time_limit_s * size + PILOT_EXTRA_S if job.time_limit_s else 0


def payer_of(job: Job) -> Payer:
    """Return the user, account, QOS and partition that Slurm counts a job for."""
    return Payer(job.user, job.account, job.qos, job.partition)


def _largest(most: int, why_not: Callable[[int], str]) -> tuple[int, str]:
    """Return the largest size for which nothing speaks against one or a smaller one, and why no larger."""
    return next(((size - 1, why) for size in range(2, most + 1) if (why := why_not(size))), (most, ""))


def _is_promised(job: ManagedJob) -> bool:
    """Whether a waiting job was started by Muri and will start by itself."""
    waits_for_pilot = job.role is Role.MEMBER and job.reason == "Dependency"
    return (
        job.role in _PROMISED
        and job.state is JobState.PENDING
        and not job.held
        and (job.waits_for_resources or waits_for_pilot)
    )


def _alone(job: Job) -> _Start:
    return _Start(payer_of(job), _asked_by(job))


def _member_like(job: Job) -> _Start:
    """A job as a member, before there is a plan: without its GPUs."""
    return _Start(payer_of(job), {"cpu": job.given_cpus, "mem": job.mem_per_node_mib * max(1, job.node_count)})


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


def _hours(seconds: int) -> str:
    return f"{seconds / 3600:.4g} h"
