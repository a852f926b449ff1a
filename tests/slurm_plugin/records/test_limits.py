"""Slurm's texts of limits, its words for a limit that is reached, and limits in snapshot files."""

import pytest
from fake_slurm import make_job

from muri.slurm_plugin.gateway.base import slurm_error
from muri.slurm_plugin.records.cluster import Snapshot, dump_snapshot, parse_snapshot
from muri.slurm_plugin.records.limits import (
    Association,
    Limits,
    LimitTextError,
    PartitionLimits,
    Qos,
    SiteLimits,
    Tres,
    is_limit_reason,
    is_limit_refusal,
    parse_count,
    parse_duration_s,
    parse_tres,
)

LIMITS = SiteLimits(
    partitions=(PartitionLimits("gpu", max_time_s=172800, qos="gpuqos"),),
    enforced=True,
    qos=(Qos("small", Limits(max_tres_per_user=(Tres("gres/gpu", 2),), max_jobs_per_user=0), limit_factor=2.0),),
    associations=(Association("hep", "alice", parent="", limits=Limits(max_wall_s=3600)),),
    priority_type="priority/multifactor",
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("30:15", 1815),
        ("90", 5400),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_time_limits(text, seconds):
    assert parse_duration_s(text) == seconds
    assert (parse_count("0"), parse_count(""), parse_count("UNLIMITED")) == (0, None, None), "zero is a limit"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cpu=4,mem=64G,gres/gpu:a100=2", [("cpu", 4), ("mem", 65536), ("gres/gpu:a100", 2)]),
        ("mem=1.50T,mem=500M", [("mem", 1572864), ("mem", 500)]),
        ("", []),
    ],
)
def test_resources(text, found):
    assert [(each.name, each.amount) for each in parse_tres(text)] == found


@pytest.mark.parametrize(
    ("read", "text"),
    [(parse_duration_s, "soon"), (parse_duration_s, "1:2:3:4"), (parse_tres, "cpu"), (parse_tres, "=4"),
     (parse_count, "-1"), (parse_count, "²"),
     # Numbers of thousands of digits.
     (parse_count, "9" * 5000), (parse_duration_s, "9" * 5000), (parse_duration_s, "9" * 5000 + "-00:00:00"),
     (parse_tres, "cpu=" + "9" * 5000), (parse_tres, "mem=" + "9" * 400 + "P")],
)  # fmt: skip
def test_what_is_no_limit_is_named(read, text):
    with pytest.raises(LimitTextError, match=text[:9]):
        read(text)


@pytest.mark.parametrize(
    "reason",
    ["QOSMaxGRESPerUser", "QOSMaxJobsPerUserLimit", "QOSGrpCpuLimit", "QOSMinGRES", "AssocMaxJobsLimit", "AssocGrpGRES",
     "AssocGrpGRESRunMinutes", "AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit", "MaxGRESPerAccount",
     "MaxGRESRunMinsPerUser", "MaxJobsPerAccount", "PartitionTimeLimit", "PartitionNodeLimit", "QOSUsageThreshold",
     "AssociationJobLimit"],
)  # fmt: skip
def test_reasons_that_are_limits(reason):
    assert is_limit_reason(reason)
    assert not make_job(1, reason=reason).waits_for_resources


@pytest.mark.parametrize(
    "reason",
    ["BadConstraints", "Cleaning", "ReqNodeNotAvail, UnavailableNodes:n2", "ReqNodeNotAvail, Reserved for maintenance",
     "Reservation", "Dependency", "DependencyNeverSatisfied", "BeginTime", "JobHeldUser", "JobHeldAdmin", "Licenses",
     "InvalidQOS", "QOSNotAllowed", "AccountNotAllowed", "JobArrayTaskLimit", "launch failed requeued held"],
)  # fmt: skip
def test_reasons_that_free_gpus_do_not_end(reason):
    assert not make_job(1, reason=reason).waits_for_resources
    assert not is_limit_reason(reason)


@pytest.mark.parametrize(
    "reason",
    ["", "None", "Priority", "Resources",
     "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions"],
)  # fmt: skip
def test_reasons_that_free_gpus_end(reason):
    assert make_job(1, reason=reason).waits_for_resources
    assert not is_limit_reason(reason)


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: "
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits) (2050)",
    ],
)
def test_refusals_that_are_limits(words):
    assert is_limit_refusal(words)
    assert is_limit_refusal(str(slurm_error("submit job 'muri:1+2'", words)))
    assert not is_limit_refusal("Invalid account or account/partition combination specified: Access/permission denied")


def test_a_snapshot_file_holds_the_limits():
    snapshot = Snapshot(1.0, "c", "26.05.5", (), (), limits=LIMITS)
    text = dump_snapshot(snapshot)
    assert parse_snapshot(text) == snapshot
    assert dump_snapshot(parse_snapshot(text)) == text
    without = text[: text.index(',\n "limits"')] + "\n}\n"
    assert parse_snapshot(without).limits == SiteLimits()
