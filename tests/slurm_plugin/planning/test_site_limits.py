"""What room the site's limits leave: for jobs alone, for groups, for joins."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from fake_slurm import NOW_S, make_job, make_node
from hypothesis import given, settings
from hypothesis import strategies as st

from muri.slurm_plugin.planning.actions import Join, MemberPlan, StartGroup
from muri.slurm_plugin.planning.site_limits import PILOT_EXTRA_S, SiteRoom
from muri.slurm_plugin.planning.slurm_requests import asked_by
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Snapshot
from muri.slurm_plugin.records.limits import NO_LIMITS, Association, Limits, PartitionLimits, Qos, SiteLimits, Tres
from muri.slurm_plugin.records.roles import ManagedJob, View, view_of

HOUR_S = 3600
GPU_2 = (Tres("gres/gpu", 2),)


def hep_job(job_id: int, **changes: Any) -> Job:
    """A waiting job of alice's in account hep and QOS normal."""
    return make_job(job_id, **{"account": "hep", "qos": "normal", "reason": "JobHeldUser", **changes})


def running(job_id: int, **changes: Any) -> Job:
    return hep_job(job_id, **{"state": JobState.RUNNING, "held": False, "reason": "", "nodes": "n1", **changes})


TASKS = hep_job(7, array=True, array_job_id=7, array_tasks="0-2")
"""Three tasks that wait."""

MEMBER = tags.format_state(tags.MemberState(8, asked_by(make_job(9))))


def site(qos: Limits = NO_LIMITS, own: Limits = NO_LIMITS, above: Limits = NO_LIMITS, **partition: Any) -> SiteLimits:
    """A site with one partition, one QOS, and alice and bob in one account."""
    return SiteLimits(
        partitions=(PartitionLimits("main", **partition),),
        enforced=True,
        qos=(Qos("normal", qos),),
        associations=(
            Association("root"),
            Association("hep", parent="root", limits=above),
            Association("hep", "alice", limits=own),
            Association("hep", "bob", limits=own),
        ),
    )


def room_of(limits: SiteLimits, *jobs: Job) -> tuple[SiteRoom, View]:
    nodes = tuple(make_node(f"n{index}", cpu_count=64, gpu_count=8) for index in (1, 2, 3))
    view = view_of(Snapshot(NOW_S, "c", "26.05.5", jobs, nodes, limits=limits))
    return SiteRoom(view), view


def member(job: Job, time_limit_s: int = HOUR_S) -> MemberPlan:
    return MemberPlan(job.job_id, asked_by(job), 1.0, 0.9, time_limit_s, cpu_count=job.cpu_count)


def as_threads(group: StartGroup) -> StartGroup:
    """The same group with members that run in the pilot, which has their CPUs and memory."""
    asked = [member.original for member in group.members]
    members = tuple(replace(member, cpu_count=1, isolation="thread") for member in group.members)
    mem_mib = sum(each.mem_per_node_mib for each in asked)
    return replace(group, members=members, cpu_count=max(each.cpu_count for each in asked), mem_per_node_mib=mem_mib)


def group_of(*jobs: Job, **changes: Any) -> StartGroup:
    """The start of a group on n1."""
    first = jobs[0]
    limit_s = max(job.time_limit_s for job in jobs) * len(jobs)
    fields: dict[str, Any] = {
        "members": tuple(member(job, limit_s) for job in jobs), "node": "n1", "uid": first.uid, "gid": first.gid,
        "user": first.user, "partition": first.partition, "account": first.account, "qos": first.qos,
        "gpu_request": first.gpu_request, "cpu_count": 1,
        "mem_per_node_mib": 512 * changes.get("gpus_per_node", 1) * any(job.mem_per_node_mib for job in jobs),
        "time_limit_s": limit_s + PILOT_EXTRA_S,
        "efficiency": 1.0, "period_s": 1.0, "reasons": (),
    }  # fmt: skip
    return StartGroup(**(fields | changes))


def largest(limits: SiteLimits, job: Job, *others: Job) -> tuple[int, str]:
    room, view = room_of(limits, job, *others)
    return room.largest_group(view.jobs[job.job_id], 4)


def no_room(limits: SiteLimits, job: Job, *others: Job) -> str:
    room, view = room_of(limits, job, *others)
    return room.why_no_room(view.jobs[job.job_id])


# Time


@pytest.mark.parametrize(
    ("limits", "longest_s"),
    [
        (site(max_time_s=9000), 9000),
        (site(Limits(max_wall_s=5000), max_time_s=9000), 5000),
        (site(Limits(max_wall_s=5000), Limits(max_wall_s=4000)), 5000),
        (site(own=Limits(max_wall_s=4000)), 4000),
        (site(Limits(max_tres_minutes_per_job=(Tres("cpu", 400),))), 6000),
        (replace(site(Limits(max_wall_s=5000), max_time_s=9000), enforced=False), 9000),
        (replace(site(max_time_s=100), qos=(Qos("normal", Limits(max_wall_s=900), over_partition_time=True),)), 900),
    ],
)
def test_the_longest_time_limit(limits, longest_s):
    room, _ = room_of(limits)
    assert room.longest_s(hep_job(1)) == longest_s


def test_the_qos_of_the_partition_goes_first_unless_the_jobs_own_says_otherwise():
    own = Qos("normal", Limits(max_wall_s=100))
    limits = replace(site(qos=Limits(), max_time_s=9000), partitions=(PartitionLimits("main", qos="p"),))
    limits = replace(limits, qos=(own, Qos("p", Limits(max_wall_s=200))))
    assert room_of(limits)[0].longest_s(hep_job(1)) == 200
    first = replace(own, over_partition_qos=True)
    assert room_of(replace(limits, qos=(first, *limits.qos[1:])))[0].longest_s(hep_job(1)) == 100


def test_a_long_job_runs_alone_and_a_short_one_in_a_group():
    limits = site(max_time_s=48 * HOUR_S)
    size, why = largest(limits, hep_job(1, time_limit_s=36 * HOUR_S))
    assert size == 1
    assert why == "a group of 2 would need a time limit of 72.17 h for its pilot job, 48 h are allowed"
    assert largest(limits, hep_job(1, time_limit_s=20 * 60)) == (4, "")
    assert largest(limits, hep_job(1, time_limit_s=20 * HOUR_S))[0] == 2
    assert largest(limits, hep_job(1, time_limit_s=0))[0] == 1


def test_a_members_time_limit_is_capped_but_never_below_its_own():
    room, _ = room_of(site(max_time_s=10_000))
    assert room.member_limit_s(hep_job(1, time_limit_s=4000), 2) == 8000
    assert room.member_limit_s(hep_job(1, time_limit_s=4000), 3) == 10_000 - PILOT_EXTRA_S
    assert room.member_limit_s(hep_job(1, time_limit_s=4000), 3, after_s=1000) == 9000 - PILOT_EXTRA_S
    assert room.member_limit_s(hep_job(1, time_limit_s=9900), 2) == 9900


def test_a_group_whose_pilot_would_run_too_long_is_refused():
    jobs = [hep_job(1), hep_job(2)]
    room, _ = room_of(site(max_time_s=2 * HOUR_S), *jobs)
    assert "job 1: a group of 2 would need a time limit of 2.167 h" in room.take_group(group_of(*jobs))
    room, _ = room_of(site(max_time_s=3 * HOUR_S), *jobs)
    long = group_of(*jobs, time_limit_s=4 * HOUR_S)
    assert room.take_group(long) == ("partition main allows 10800 s for each job (MaxTime), Muri's would have 14400")


# Counts of jobs


@pytest.mark.parametrize(
    ("limits", "others", "size", "why"),
    [
        (Limits(max_jobs_per_user=2), [], 1, "2 running jobs for each user (MaxJobsPerUser), alice would have 3"),
        (Limits(max_jobs_per_user=4), [], 3, "MaxJobsPerUser"),
        (Limits(max_jobs_per_user=4), [running(9)], 2, "MaxJobsPerUser"),
        (Limits(max_jobs_per_user=4), [running(9, user="bob")], 3, "MaxJobsPerUser"),
        (Limits(max_submit_per_user=2), [hep_job(2)], 1, "2 waiting and running jobs for each user"),
        (Limits(max_submit_per_user=3), [hep_job(2), hep_job(4, state=JobState.COMPLETED)], 4, ""),
        (Limits(max_submit_per_user=4), [TASKS], 1, "MaxSubmitJobsPerUser), alice would have 5"),
    ],
)
def test_the_pilot_is_one_job_more_to_submit_and_to_run(limits, others, size, why):
    found, told = largest(site(limits), hep_job(1), *others)
    assert found == size
    assert why in told


def test_all_accounts_above_a_job_count_and_of_two_associations_that_of_the_partition():
    limits = site(own=Limits(max_jobs_per_user=9))
    above = Association("physics", parent="root", limits=Limits(grp_jobs=1))
    hep = replace(limits.associations[1], parent="physics")
    nested = replace(limits, associations=(above, hep, *limits.associations[2:]))
    bobs = running(9, user="bob")
    assert "account physics allows 1 running jobs (GrpJobs)" in no_room(nested, hep_job(1), bobs)
    assert no_room(limits, hep_job(1), bobs) == ""
    own = Association("hep", "alice", partition="main", limits=Limits(max_jobs_per_user=1))
    assert "(MaxJobs)" in no_room(replace(limits, associations=(*limits.associations, own)), hep_job(1), running(9))


@pytest.mark.parametrize("limits", [Limits(max_jobs_per_user=9), Limits(max_jobs_per_account=9)])
def test_a_qos_that_limits_jobs_replaces_the_limit_of_an_association(limits):
    own = Limits(max_jobs_per_user=1)
    assert "MaxJobs" in no_room(site(own=own), hep_job(1), running(9))
    assert no_room(site(limits, own=own), hep_job(1), running(9)) == ""


# Resources


def test_gpus_of_a_user_in_a_qos():
    limits = site(Limits(max_tres_per_user=GPU_2))
    why = "QOS normal allows 2 GPUs for each user (MaxTRESPerUser), alice would have 3"
    assert no_room(limits, hep_job(1), running(8), running(9)) == why
    assert no_room(limits, hep_job(1), running(8), running(9, qos="other")) == ""
    of_account = site(above=Limits(grp_tres=GPU_2))
    assert "(GrpTRES)" in no_room(of_account, hep_job(1), running(8), running(9))
    doubled = replace(of_account, qos=(Qos("normal", limit_factor=2.0),))
    assert no_room(doubled, hep_job(1), running(8), running(9)) == ""


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        # The pilot has one CPU and 512 MiB; each member keeps its own 4 CPUs and 1000 MiB.
        (site(Limits(max_tres_per_job=(Tres("mem", 1000), Tres("cpu", 4)))), 4),
        (site(max_mem_per_node_mib=1000), 4),
        (site(Limits(max_tres_per_job=(Tres("mem", 500),))), 1),
        (site(Limits(max_tres_per_user=(Tres("mem", 3511),))), 2),
        (site(Limits(max_tres_per_user=(Tres("mem", 3512),))), 3),
        (site(Limits(max_tres_minutes_per_job=(Tres("mem", 1000 * 200),))), 3),
        (site(Limits(max_tres_per_user=(Tres("cpu", 12),))), 2),
        (site(Limits(max_tres_per_user=(Tres("cpu", 13),))), 3),
    ],
)
def test_the_largest_group_is_the_largest_that_is_allowed(limits, size):
    assert largest(limits, hep_job(1, mem_per_node_mib=1000))[0] == size


@pytest.mark.parametrize(
    ("limits", "cpus", "mem_mib"),
    [
        (site(), 12, 9000),
        (site(Limits(max_tres_per_job=(Tres("cpu", 8), Tres("mem", 5000)))), 8, 5000),
        (site(max_mem_per_node_mib=6000), 12, 6000),
        (site(Limits(max_tres_per_user=(Tres("cpu", 15), Tres("mem", 7024)))), 9, 5000),
        (site(Limits(max_tres_minutes_per_job=(Tres("cpu", 1300),))), 10, 9000),
    ],
)
def test_what_a_plan_gives_threads_beyond_their_requests_is_cut_to_what_is_allowed(limits, cpus, mem_mib):
    jobs = [hep_job(1, mem_per_node_mib=2000), hep_job(2, mem_per_node_mib=2000)]
    room, _ = room_of(limits, *jobs, running(9, mem_per_node_mib=1000))
    group = replace(as_threads(group_of(*jobs)), cpu_count=12, mem_per_node_mib=9000)
    found = room.capped(group)
    assert (found.cpu_count, found.mem_per_node_mib) == (cpus, mem_mib)


def test_the_pilot_of_processes_has_as_many_cpus_as_its_memory_takes():
    jobs = [hep_job(1, mem_per_node_mib=2000), hep_job(2, mem_per_node_mib=2000)]
    for most_mib, cpus in ((None, 1), (512, 1), (300, 2)):
        room, _ = room_of(site(max_mem_per_cpu_mib=most_mib), *jobs)
        found = room.capped(group_of(*jobs))
        assert (found.cpu_count, found.mem_per_node_mib) == (cpus, 512)


def test_the_pilot_has_what_is_demanded_of_each_job():
    jobs = [hep_job(1, mem_per_node_mib=2000), hep_job(2, mem_per_node_mib=2000)]
    room, _ = room_of(site(Limits(min_tres_per_job=(Tres("cpu", 2), Tres("mem", 1000)))), *jobs)
    found = room.capped(group_of(*jobs))
    assert (found.cpu_count, found.mem_per_node_mib) == (2, 1000)
    assert room.take_group(found) == ""


def test_members_without_gpus_do_not_fit_where_each_job_must_have_one():
    why = "QOS normal demands 1 GPUs of each job (MinTRES), a group's member has 0"
    assert largest(site(Limits(min_tres_per_job=(Tres("gres/gpu", 1),))), hep_job(1)) == (1, why)


def test_a_limit_on_a_type_of_gpu():
    limits = site(Limits(max_tres_per_user=(Tres("gres/gpu:a100", 1),)))
    typed = {"gpu_request": "gres/gpu:a100:1"}
    assert "1 gres/gpu:a100 for each user" in no_room(limits, hep_job(1, **typed), running(9, **typed))
    assert no_room(limits, hep_job(1, gpu_request="gres/gpu:v100:1"), running(9, **typed)) == ""
    assert no_room(limits, hep_job(1, **typed)) == ""
    assert "alice would have 2" in no_room(limits, hep_job(1, node_count=2, gpu_count=2, **typed)), "one on each node"
    assert no_room(limits, hep_job(1), running(9, **typed)) == "", "Slurm itself does not foresee the type"


def test_what_slurm_will_start_by_itself_counts_for_groups_only():
    limits = site(Limits(max_tres_per_user=GPU_2))
    released = hep_job(9, held=False, reason="Resources", gpu_count=2)
    jobs = [hep_job(1), hep_job(2)]
    assert no_room(limits, jobs[0], released) == ""
    room, _ = room_of(limits, *jobs, released)
    assert "MaxTRESPerUser" in room.take_group(group_of(*jobs))
    stuck = replace(released, reason="BadConstraints")
    room, _ = room_of(limits, *jobs, stuck)
    assert room.take_group(group_of(*jobs)) == ""
    member = replace(released, reason="Dependency", gpu_count=0, admin_comment=f"muri:on muri-state:{MEMBER}")
    room, _ = room_of(site(Limits(max_jobs_per_user=3)), *jobs, member)
    assert "alice would have 4" in room.take_group(group_of(*jobs)), "it waits for its pilot job only"


# Partitions


@pytest.mark.parametrize(
    ("state", "alone", "size"), [("UP", True, 4), ("DOWN", False, 4), ("DRAIN", True, 1), ("INACTIVE", False, 1)]
)
def test_the_state_of_a_partition(state, alone, size):
    limits = site(state=state)
    assert (no_room(limits, hep_job(1)) == "") is alone
    assert largest(limits, hep_job(1))[0] == size
    whole_nodes = "jobs of partition main do not share nodes (OverSubscribe=EXCLUSIVE)"
    assert largest(site(exclusive=True), hep_job(1)) == (1, whole_nodes)


# What is not known


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (SiteLimits(why_unknown="slurmdbd is away"), "the site's limits are unknown: slurmdbd is away"),
        (replace(site(), partitions=(PartitionLimits("other"),)), "the limits of partition main are unknown"),
        (replace(site(), qos=()), "the limits of QOS normal are unknown"),
        (replace(site(), associations=()), "the limits of alice in account hep are unknown"),
    ],
)
def test_where_limits_are_unknown_jobs_run_alone(limits, why):
    assert largest(limits, hep_job(1)) == (1, why)
    assert no_room(limits, hep_job(1)) == ""


# Joins


def test_a_join_is_one_running_job_more_and_no_gpu():
    jobs = [hep_job(1), running(9), running(8)]
    limits = site(Limits(max_jobs_per_user=3, max_tres_per_user=GPU_2))
    room, _ = room_of(limits, *jobs)
    join = Join(9, "n1", member(jobs[0]), (), 0, ())
    assert room.take_join(join) == ""
    assert "MaxJobsPerUser" in room.take_join(join)


def test_a_join_keeps_to_the_pilots_time_limit():
    jobs = [hep_job(1), running(9)]
    room, _ = room_of(site(max_time_s=2 * HOUR_S), *jobs)
    join = Join(9, "n1", member(jobs[0]), (), 3 * HOUR_S, ())
    assert room.take_join(join) == "the group's pilot job would need a time limit of 3 h, 2 h are allowed"


# Dry runs


def test_a_dry_run_is_a_job_of_its_own():
    jobs = [hep_job(1), hep_job(2)]
    room, view = room_of(site(Limits(max_submit_per_user=3), max_time_s=900), *jobs)
    assert room.take_dry_run(view.jobs[1], "main", 600) == ""
    assert "MaxSubmitJobsPerUser" in room.take_dry_run(view.jobs[2], "main", 600)
    assert "MaxTime" in room.take_dry_run(view.jobs[2], "main", 1000)


# Whatever the limits are

COUNTS = ("max_jobs_per_user", "max_submit_per_user", "max_jobs_per_account", "grp_jobs", "grp_submit")
AMOUNTS = ("max_tres_per_user", "max_tres_per_account", "grp_tres")
MOST = {"cpu": 30, "gres/gpu": 8, "mem": 8000}

#: A seed stands for a whole case: Hypothesis alone would mostly try queues of one job.
SEEDS = st.integers(0, 2**32)


def some_limits(random: Random) -> Limits:
    """Few limits at once, or nothing would ever start."""
    counts = {name: random.randint(3, 14) for name in random.sample(COUNTS, random.randint(0, 2))}
    names = {name: random.choice(list(MOST)) for name in random.sample(AMOUNTS, random.randint(0, 2))}
    amounts = {name: (Tres(tres, random.randint(0, MOST[tres])),) for name, tres in names.items()}
    return Limits(**counts, **amounts)


def some_jobs(random: Random) -> list[Job]:
    """A queue of two users, some of whose jobs run or have ended."""
    states = [JobState.PENDING] * 5 + [JobState.RUNNING, JobState.COMPLETED]
    return [
        hep_job(
            job_id,
            user=random.choice(["alice", "bob"]),
            state=random.choice(states),
            cpu_count=random.randint(1, 4),
            gpu_count=random.choice([1, 1, 2]),
            mem_per_node_mib=random.choice([0, 500, 1000]),
        )
        for job_id in range(1, random.randint(2, 12))
    ]


class Ledger:
    """Slurm's bookkeeping in the plainest form: every job that runs or waits, and all sums made anew."""

    def __init__(self, limits: SiteLimits, jobs: list[Job]) -> None:
        self.limits = limits
        self.running = [self._entry(job) for job in jobs if job.state is JobState.RUNNING]
        self.submitted = [job.user for job in jobs if job.state.is_active]

    @staticmethod
    def _entry(job: Job) -> tuple[str, Counter[str]]:
        return job.user, Counter({"cpu": job.cpu_count, "gres/gpu": job.gpu_count, "mem": job.mem_per_node_mib})

    def start(self, job: Job) -> None:
        self.running.append(self._entry(job))

    def start_group(self, group: StartGroup) -> None:
        pilot = Counter({"cpu": group.cpu_count * group.gpus_per_node, "gres/gpu": group.gpus_per_node})
        pilot["mem"] = group.mem_per_node_mib
        self.running.append((group.user, pilot))
        self.submitted.append(group.user)
        for each in group.members:
            self.running.append((group.user, Counter({"cpu": each.cpu_count, "mem": each.original.mem_per_node_mib})))

    def exceeded(self) -> list[str]:
        """All limits that hold and are exceeded; the QOS goes before associations."""
        qos = self.limits.qos[0].limits
        account, own = (each.limits for each in self.limits.associations[1:3])
        everyone = [entry for _, entry in self.running]
        found = []
        for user in ("alice", "bob"):
            of_user = [entry for name, entry in self.running if name == user]
            submitted = self.submitted.count(user)
            jobs = [qos.max_jobs_per_user]
            if qos.max_jobs_per_user is None and qos.max_jobs_per_account is None:
                jobs.append(own.max_jobs_per_user)
            submit = qos.max_submit_per_user if qos.max_submit_per_user is not None else own.max_submit_per_user
            found += [f"jobs of {user}" for most in jobs if most is not None and len(of_user) > most]
            found += [f"submitted of {user}"] * (submit is not None and submitted > submit)
            found += [f"{tres.name} of {user}" for tres in qos.max_tres_per_user if _sum(of_user, tres) > tres.amount]
            found += self._group(f"{user}'s", of_user, submitted, own)
        found += ["jobs of hep"] * (qos.max_jobs_per_account is not None and len(everyone) > qos.max_jobs_per_account)
        found += [f"{tres.name} of hep" for tres in qos.max_tres_per_account if _sum(everyone, tres) > tres.amount]
        found += self._group("hep's", everyone, len(self.submitted), account)
        found += ["all jobs"] * (qos.grp_jobs is not None and len(everyone) > qos.grp_jobs)
        found += ["all submitted"] * (qos.grp_submit is not None and len(self.submitted) > qos.grp_submit)
        return found + [f"all {tres.name}" for tres in qos.grp_tres if _sum(everyone, tres) > tres.amount]

    def _group(self, whose: str, running: list[Counter[str]], submitted: int, limits: Limits) -> list[str]:
        """The limits of an association that no QOS replaces."""
        qos = self.limits.qos[0].limits
        jobs = limits.grp_jobs if qos.grp_jobs is None else None
        submit = limits.grp_submit if qos.grp_submit is None else None
        replaced = {tres.name for tres in qos.grp_tres}
        found = [f"{whose} jobs"] * (jobs is not None and len(running) > jobs)
        found += [f"{whose} submitted"] * (submit is not None and submitted > submit)
        kept = [tres for tres in limits.grp_tres if tres.name not in replaced]
        return found + [f"{whose} {tres.name}" for tres in kept if _sum(running, tres) > tres.amount]


def _sum(entries: list[Counter[str]], tres: Tres) -> int:
    return sum(entry[tres.name] for entry in entries)


@settings(max_examples=300)
@given(SEEDS)
def test_what_is_taken_never_exceeds_a_limit_and_no_job_alone_is_refused_that_slurm_would_start(seed):
    random = Random(seed)
    jobs, limits = some_jobs(random), site(some_limits(random), some_limits(random), some_limits(random))
    room, view = room_of(limits, *jobs)
    ledger = Ledger(limits, jobs)
    before = set(ledger.exceeded())
    waiting = [job for job in jobs if job.state is JobState.PENDING]
    random.shuffle(waiting)
    while waiting:
        partners = [job for job in waiting if (job.user, job.gpu_count) == (waiting[0].user, waiting[0].gpu_count)]
        chosen = partners[: random.randint(1, 3)]
        before = _take(room, view, ledger, chosen, before)
        waiting = [job for job in waiting if job not in chosen]


def _take(room: SiteRoom, view: View, ledger: Ledger, jobs: list[Job], before: set[str]) -> set[str]:
    """Start a job or a group if there is room; return the limits that were exceeded from the beginning."""
    managed: ManagedJob = view.jobs[jobs[0].job_id]
    trial = Ledger(ledger.limits, [])
    trial.running, trial.submitted = list(ledger.running), list(ledger.submitted)
    if len(jobs) == 1:
        trial.start(jobs[0])
        refused = room.take_alone(managed)
        # Waiting jobs count for no limit on submissions that they have not passed already.
        over = {why for why in trial.exceeded() if "submitted" not in why}
    else:
        group = group_of(*jobs, gpus_per_node=jobs[0].gpu_count)
        trial.start_group(group)
        refused = room.take_group(group)
        over = set(trial.exceeded())
    if refused:
        assert over, f"refused without need: {refused}"
        return before
    assert over <= before, f"taken although {over} is exceeded"
    ledger.running, ledger.submitted = trial.running, trial.submitted
    return before


@given(SEEDS)
def test_a_group_as_large_as_a_job_may_be_in_is_never_refused(seed):
    random = Random(seed)
    jobs, limits = some_jobs(random), site(some_limits(random), above=some_limits(random))
    room, view = room_of(limits, *jobs)
    for job in jobs:
        if job.state is not JobState.PENDING:
            continue
        size, why = room.largest_group(view.jobs[job.job_id], 4)
        assert (size < 4) == bool(why)
        if size > 1:
            fresh, _ = room_of(limits, *jobs)
            group = group_of(*[job] * size, gpus_per_node=job.gpu_count)
            assert fresh.take_group(group) == ""
