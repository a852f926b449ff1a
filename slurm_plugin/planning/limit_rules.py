"""Which of a site's limits hold for a job, in Slurm's order of precedence. Pure.

Slurm looks at the QOS of the partition, then the job's own (the other way round with the flag OverPartQOS), then the
user's association and the accounts above it. Where two of them limit the same thing, the first wins, however large;
only the accounts of a chain all count. The partition's own limits hold besides.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

from muri.slurm_plugin.records.limits import Association, Limits, PartitionLimits, Qos, SiteLimits, Tres

RUNNING: Final = "running jobs"
SUBMITTED: Final = "waiting and running jobs"

Key = tuple[str, ...]
"""Jobs that are counted together: those of a QOS, of a user in a QOS, of an association, of an account, …"""


class Payer(NamedTuple):
    """Whom Slurm counts a job for."""

    user: str
    account: str
    qos: str
    partition: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A limit on what some jobs have together.

    Attributes:
        jobs: Which jobs.
        resource: RUNNING, SUBMITTED or a resource's name.
        most: The limit.
        setter: Who sets it, for people: "QOS small".
        setting: Slurm's name of it: "MaxTRESPerUser".
        each: For whom it holds, for people: " for each user".
        whose: Who reaches it, for people: "alice".
    """

    jobs: Key
    resource: str
    most: int
    setter: str
    setting: str
    each: str
    whose: str


@dataclass(frozen=True, slots=True)
class JobRule:
    """A limit on what one job has.

    Attributes:
        resource: The resource's name, "" for time.
        amount: How much: the most, or the least.
        setter: Who sets it, for people.
        setting: Slurm's name of it.
    """

    resource: str
    amount: int
    setter: str
    setting: str


@dataclass(frozen=True, slots=True)
class JobRules:
    """Limits on one job.

    Attributes:
        wall: Longest time limit in seconds, of QOS or association and of the partition.
        most: Most that it may have.
        most_per_node: Most that it may have on each node.
        most_minutes: Most resources × minutes.
        least: Least that it must have.
    """

    wall: tuple[JobRule, ...]
    most: tuple[JobRule, ...]
    most_per_node: tuple[JobRule, ...]
    most_minutes: tuple[JobRule, ...]
    least: tuple[JobRule, ...]


class RuleBook:
    """Finds the limits of each payer, once.

    Args:
        limits: What the site allows.
    """

    def __init__(self, limits: SiteLimits) -> None:
        self._limits = limits
        self._partitions = {each.name: each for each in limits.partitions}
        self._qos = {each.name: each for each in limits.qos}
        self._associations = {(each.account, each.user, each.partition): each for each in limits.associations}
        self._shared: dict[Payer, tuple[Rule, ...]] = {}
        self._single: dict[Payer, JobRules] = {}
        self._keys: dict[Payer, tuple[Key, ...]] = {}

    def partition(self, payer: Payer) -> PartitionLimits | None:
        """Return a payer's partition, None when it is not known."""
        return self._partitions.get(payer.partition)

    def why_unknown(self, payer: Payer) -> str:
        """Return why some limits that hold for a payer are not known, "" when all are."""
        if self._limits.why_unknown:
            return f"the site's limits are unknown: {self._limits.why_unknown}"
        partition = self.partition(payer)
        if partition is None:
            return f"the limits of partition {payer.partition} are unknown" if self._partitions else ""
        if not self._limits.enforced:
            return ""
        for name in (partition.qos, payer.qos):
            if name and name not in self._qos:
                return f"the limits of QOS {name} are unknown"
        if self._own_association(payer) is None:
            return f"the limits of {payer.user} in account {payer.account or 'none'} are unknown"
        return ""

    def keys(self, payer: Payer) -> tuple[Key, ...]:
        """Return all that a payer's jobs are counted in, whether or not it is limited for this payer."""
        if payer not in self._keys:
            keys: list[Key] = []
            for qos in self._levels(payer):
                keys += [_qos_key(qos), _qos_key(qos, "user", payer.user), _qos_key(qos, "account", payer.account)]
            self._keys[payer] = (*keys, *map(_association_key, self._chain(payer)))
        return self._keys[payer]

    def shared(self, payer: Payer) -> tuple[Rule, ...]:
        """Return the limits on what a payer's jobs have together with others."""
        if payer not in self._shared:
            self._shared[payer] = tuple(self._shared_rules(payer))
        return self._shared[payer]

    def single(self, payer: Payer) -> JobRules:
        """Return the limits on each of a payer's jobs."""
        if payer not in self._single:
            self._single[payer] = self._single_rules(payer)
        return self._single[payer]

    def names(self, resource: str) -> bool:
        """Whether any limit on jobs together is about a resource whose name begins so."""
        if not self._limits.enforced:
            return False
        everything = [each.limits for each in self._limits.qos] + [each.limits for each in self._limits.associations]
        return any(
            tres.name.startswith(resource)
            for limits in everything
            for tres in (*limits.grp_tres, *limits.max_tres_per_user, *limits.max_tres_per_account)
        )

    def _levels(self, payer: Payer) -> tuple[Qos, ...]:
        """The QOS that hold for a payer, the first to count first."""
        if not self._limits.enforced:
            return ()
        partition = self.partition(payer)
        names = [partition.qos if partition is not None else "", payer.qos]
        found = [self._qos[name] for name in dict.fromkeys(names) if name in self._qos]
        own_first = len(found) == 2 and found[1].over_partition_qos
        return tuple(reversed(found) if own_first else found)

    def _own_association(self, payer: Payer) -> Association | None:
        if not self._limits.enforced:
            return None
        own = self._associations.get((payer.account, payer.user, payer.partition))
        return own or self._associations.get((payer.account, payer.user, ""))

    def _chain(self, payer: Payer) -> tuple[Association, ...]:
        """A payer's association and the accounts above it."""
        if not self._limits.enforced:
            return ()
        own = self._own_association(payer)
        chain = [] if own is None else [own]
        above = self._associations.get((payer.account, "", ""))
        while above is not None and above not in chain:
            chain.append(above)
            above = self._associations.get((above.parent, "", ""))
        return tuple(chain)

    def _shared_rules(self, payer: Payer) -> Iterator[Rule]:
        set_by_qos: set[tuple[str, str]] = set()
        for qos in self._levels(payer):
            found = [(count.kind, rule) for count in _counts_of_qos(qos, payer) for rule in count.rules()]
            yield from (rule for kind, rule in found if (kind, rule.resource) not in set_by_qos)
            set_by_qos |= {(kind, rule.resource) for kind, rule in found}
        own = self._own_association(payer)
        if own is not None:
            for rule in _count_of_association(own).rules():
                if not {("user", rule.resource), ("account", rule.resource)} & set_by_qos:
                    yield rule
        for association in self._chain(payer):
            for rule in _count_of_group(association, self._factor(payer)).rules():
                if ("all", rule.resource) not in set_by_qos:
                    yield rule

    def _factor(self, payer: Payer) -> float:
        own = self._qos.get(payer.qos)
        return 1.0 if own is None else own.limit_factor

    def _single_rules(self, payer: Payer) -> JobRules:
        levels = [(f"QOS {qos.name}", qos.limits) for qos in self._levels(payer)]
        own = self._own_association(payer)
        if own is not None:
            levels.append((_name(own), _scaled(own.limits, self._factor(payer))))
        partition = self.partition(payer)
        return JobRules(
            wall=(*self._partition_wall(payer), *_first_wall(levels)),
            most=_first("MaxTRES", ((setter, limits.max_tres_per_job) for setter, limits in levels)),
            most_per_node=(
                *_memory_of(partition),
                *_first("MaxTRESPerNode", ((setter, limits.max_tres_per_node) for setter, limits in levels)),
            ),
            most_minutes=_first(
                "MaxTRESMins", ((setter, limits.max_tres_minutes_per_job) for setter, limits in levels)
            ),
            least=_first("MinTRES", ((setter, limits.min_tres_per_job) for setter, limits in levels)),
        )

    def _partition_wall(self, payer: Payer) -> Iterator[JobRule]:
        partition, qos = self.partition(payer), self._qos.get(payer.qos)
        may_exceed = qos is not None and qos.over_partition_time and self._limits.enforced
        if partition is not None and partition.max_time_s is not None and not may_exceed:
            yield JobRule("", partition.max_time_s, f"partition {partition.name}", "MaxTime")


@dataclass(frozen=True, slots=True)
class _Count:
    """What is limited for some jobs together.

    Attributes:
        kind: "user", "account" or "all": of two QOS, the first that limits something for a kind wins.
        jobs: Which jobs.
        setter: Who sets the limits.
        each: For whom they hold.
        whose: Who reaches them.
        running: Running jobs and Slurm's name of that limit.
        submitted: Waiting and running jobs, likewise.
        tres: Resources, likewise.
    """

    kind: str
    jobs: Key
    setter: str
    each: str
    whose: str
    running: tuple[str, int | None]
    submitted: tuple[str, int | None]
    tres: tuple[str, tuple[Tres, ...]] = ("", ())

    def rules(self) -> Iterator[Rule]:
        """The limits that are set."""
        setting, amounts = self.tres
        found = [(setting, each.name, each.amount) for each in amounts]
        found += [
            (setting, resource, most)
            for resource, (setting, most) in ((RUNNING, self.running), (SUBMITTED, self.submitted))
            if most is not None
        ]
        for setting, resource, most in found:
            yield Rule(self.jobs, resource, most, self.setter, setting, self.each, self.whose)


def _counts_of_qos(qos: Qos, payer: Payer) -> tuple[_Count, ...]:
    limits, setter = qos.limits, f"QOS {qos.name}"
    return (
        _Count(
            "user", _qos_key(qos, "user", payer.user), setter, " for each user", payer.user,
            ("MaxJobsPerUser", limits.max_jobs_per_user),
            ("MaxSubmitJobsPerUser", limits.max_submit_per_user),
            ("MaxTRESPerUser", limits.max_tres_per_user),
        ),
        _Count(
            "account", _qos_key(qos, "account", payer.account), setter, " for each account", f"account {payer.account}",
            ("MaxJobsPerAccount", limits.max_jobs_per_account),
            ("MaxSubmitJobsPerAccount", limits.max_submit_per_account),
            ("MaxTRESPerAccount", limits.max_tres_per_account),
        ),
        _Count(
            "all", _qos_key(qos), setter, "", "its jobs",
            ("GrpJobs", limits.grp_jobs), ("GrpSubmit", limits.grp_submit), ("GrpTRES", limits.grp_tres),
        ),
    )  # fmt: skip


def _count_of_association(own: Association) -> _Count:
    limits = own.limits
    return _Count(
        "user", _association_key(own), f"account {own.account}", " for each user", own.user,
        ("MaxJobs", limits.max_jobs_per_user), ("MaxSubmitJobs", limits.max_submit_per_user),
    )  # fmt: skip


def _count_of_group(association: Association, factor: float) -> _Count:
    limits = association.limits
    return _Count(
        "all", _association_key(association), _name(association), "", "its jobs",
        ("GrpJobs", limits.grp_jobs), ("GrpSubmit", limits.grp_submit),
        ("GrpTRES", _times(limits.grp_tres, factor)),
    )  # fmt: skip


def _qos_key(qos: Qos, *of: str) -> Key:
    return ("qos", qos.name, *of)


def _association_key(association: Association) -> Key:
    return ("association", association.account, association.user, association.partition)


def _name(association: Association) -> str:
    return f"account {association.account}" if not association.user else f"{association.user} in {association.account}"


def _times(amounts: tuple[Tres, ...], factor: float) -> tuple[Tres, ...]:
    return tuple(Tres(each.name, int(each.amount * factor)) for each in amounts)


def _scaled(limits: Limits, factor: float) -> Limits:
    return replace(
        limits,
        max_tres_per_job=_times(limits.max_tres_per_job, factor),
        max_tres_per_node=_times(limits.max_tres_per_node, factor),
    )


def _memory_of(partition: PartitionLimits | None) -> tuple[JobRule, ...]:
    if partition is None or partition.max_mem_per_node_mib is None:
        return ()
    return (JobRule("mem", partition.max_mem_per_node_mib, f"partition {partition.name}", "MaxMemPerNode"),)


def _first_wall(levels: Iterable[tuple[str, Limits]]) -> tuple[JobRule, ...]:
    found = (
        JobRule("", limits.max_wall_s, setter, "MaxWall") for setter, limits in levels if limits.max_wall_s is not None
    )
    return tuple(islice(found, 1))


def _first(setting: str, levels: Iterable[tuple[str, tuple[Tres, ...]]]) -> tuple[JobRule, ...]:
    """The first limit on each resource."""
    found: dict[str, JobRule] = {}
    for setter, amounts in levels:
        for each in amounts:
            found.setdefault(each.name, JobRule(each.name, each.amount, setter, setting))
    return tuple(found.values())
