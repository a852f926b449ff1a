"""The site's limits as scontrol and sacctmgr print them."""

import logging
from collections.abc import Sequence

import pytest

from muri.slurm_plugin.gateway.accounting import LimitsReader
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.limits import Association, Limits, PartitionLimits, Qos, Tres

CONFIG = """Configuration data as of 2026-01-01T00:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = muri
PriorityType            = priority/multifactor
"""
PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL Default=YES QoS=gpuqos DefaultTime=NONE Exclusive=NO MaxNodes=UNLIMITED "
    "MaxTime=2-00:00:00 OverSubscribe=YES:4 PreemptMode=OFF State=UP MaxMemPerNode=64000\n"
    "PartitionName=whole QoS=N/A ExclusiveUser=NO MaxTime=UNLIMITED OverSubscribe=EXCLUSIVE State=DRAIN "
    "MaxMemPerNode=UNLIMITED\n"
)
#: Name, Flags, LimitFactor, MaxWall, GrpJobs, GrpSubmit, MaxJobsPU, MaxSubmitPU, MaxJobsPA, MaxSubmitPA, MaxTRES,
#: MaxTRESMins, GrpTRES, MaxTRESPU, MaxTRESPA, MinTRES
QOS = (
    "normal" + "|" * 15 + "\n" + "small|DenyOnLimit,OverPartQOS|2.000000|1-00:00:00|10|20|2|3|4|5|cpu=8|gres/gpu=600|"
    "gres/gpu=4|gres/gpu=2|gres/gpu=3|cpu=1\n"
)
#: Account, User, Partition, ParentName, MaxWall, GrpJobs, GrpSubmit, MaxJobs, MaxSubmit, MaxTRES, MaxTRESMins,
#: GrpTRES
ASSOCIATIONS = "root" + "|" * 11 + "\nhep|||root" + "|" * 8 + "\n" + "hep|alice|||12:00:00||8|2|3|||gres/gpu=2\n"


class Commands:
    """Slurm's commands with prepared answers; an answer that is an exception is raised."""

    def __init__(self, **answers: object) -> None:
        self.answers = {"config": CONFIG, "partition": PARTITIONS, "qos": QOS, "associations": ASSOCIATIONS} | answers
        self.asked: list[str] = []
        self.last: Sequence[str] = ()

    def run(self, action: str, arguments: Sequence[str]) -> str:
        self.last = arguments
        kind = next(kind for kind in self.answers if kind in arguments)
        self.asked.append(kind)
        answer = self.answers[kind]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


def test_partitions():
    limits = LimitsReader(Commands()).read()
    assert limits.partitions == (
        PartitionLimits("gpu", max_time_s=172800, qos="gpuqos", max_mem_per_node_mib=64000, oversubscribe=4),
        PartitionLimits("whole", state="DRAIN", exclusive=True),
    )
    assert (limits.enforced, limits.priority_type, limits.why_unknown) == (True, "priority/multifactor", "")


@pytest.mark.parametrize(
    ("setting", "jobs_on_cpu", "shares_all"),
    [("NO", 1, False), ("YES:4", 4, False), ("YES:1", 1, False), ("FORCE:4", 1, True), ("FORCE:1", 1, False),
     ("EXCLUSIVE", 1, False)],
)  # fmt: skip
def test_how_many_jobs_share_a_cpu(setting: str, jobs_on_cpu: int, shares_all: bool):
    (found,) = LimitsReader(Commands(partition=f"PartitionName=a OverSubscribe={setting}\n")).read().partitions
    assert (found.oversubscribe, found.shares_all) == (jobs_on_cpu, shares_all)


def test_what_a_partition_sets_goes_before_what_the_cluster_does():
    nothing = "SelectTypeParameters = CR_CORE_MEMORY\n"
    config = (
        f"{nothing}MaxMemPerCPU = 4000\nDefMemPerNode = UNLIMITED\nJobDefaults = DefCpuPerGPU=3,DefMemPerGPU=4000\n"
    )
    partitions = (
        "PartitionName=a JobDefaults=(null) MaxMemPerNode=UNLIMITED\n"
        "PartitionName=b JobDefaults=DefCpuPerGPU=4 MaxMemPerCPU=3000\n"
        "PartitionName=c JobDefaults=(null) MaxMemPerNode=9000 DefMemPerCPU=10\n"
    )
    always = {"mem_per_gpu": True, "counts_mem": True}
    assert LimitsReader(Commands(config=config, partition=partitions)).read().partitions == (
        PartitionLimits("a", max_mem_per_cpu_mib=4000, cpus_per_gpu=3, **always),
        PartitionLimits("b", max_mem_per_cpu_mib=3000, cpus_per_gpu=4, **always),
        PartitionLimits("c", max_mem_per_node_mib=9000, default_mem=True, cpus_per_gpu=3, **always),
    )
    found = LimitsReader(Commands(config=nothing, partition=partitions)).read().partitions
    assert [each.all_mem for each in found] == [True, True, False]


def test_qos():
    normal, small = LimitsReader(Commands()).read().qos
    assert normal == Qos("normal")
    assert small == Qos(
        "small",
        Limits(
            max_wall_s=86400,
            grp_jobs=10,
            grp_submit=20,
            max_jobs_per_user=2,
            max_submit_per_user=3,
            max_jobs_per_account=4,
            max_submit_per_account=5,
            max_tres_per_job=(Tres("cpu", 8),),
            max_tres_minutes_per_job=(Tres("gres/gpu", 600),),
            grp_tres=(Tres("gres/gpu", 4),),
            max_tres_per_user=(Tres("gres/gpu", 2),),
            max_tres_per_account=(Tres("gres/gpu", 3),),
            min_tres_per_job=(Tres("cpu", 1),),
        ),
        over_partition_qos=True,
        limit_factor=2.0,
    )


def test_associations_are_those_of_this_cluster():
    commands = Commands()
    assert LimitsReader(commands).read().associations == (
        Association("root"),
        Association("hep", parent="root"),
        Association(
            "hep",
            "alice",
            limits=Limits(
                max_wall_s=43200,
                grp_submit=8,
                max_jobs_per_user=2,
                max_submit_per_user=3,
                grp_tres=(Tres("gres/gpu", 2),),
            ),
        ),
    )
    assert "cluster=muri" in commands.last


@pytest.mark.parametrize(
    ("enforce", "expected"),
    [("none", False), ("associations", False), ("associations,limits", True), ("associations,limits,qos,safe", True)],
)
def test_whether_limits_are_enforced(enforce, expected):
    config = CONFIG.replace("associations,limits,qos", enforce)
    assert LimitsReader(Commands(config=config)).read().enforced is expected


def test_without_accounting_only_partitions_are_read():
    commands = Commands(config=CONFIG.replace("associations,limits,qos", "none"))
    limits = LimitsReader(commands).read()
    assert commands.asked == ["config", "partition"]
    assert (limits.enforced, len(limits.partitions)) == (False, 2)


def test_limits_are_kept_for_some_minutes():
    now_s, commands = [0.0], Commands()
    reader = LimitsReader(commands, lambda: now_s[0])
    first = reader.read()
    now_s[0] = 299.0
    assert reader.read() is first
    assert len(commands.asked) == 4
    now_s[0] = 301.0
    commands.answers["partition"] = PARTITIONS.replace("2-00:00:00", "1-00:00:00")
    assert reader.read().partitions[0].max_time_s == 86400


def test_a_line_that_cannot_be_read_costs_itself(caplog):
    qos = QOS + "odd|||soon" + "|" * 12 + "\n" + "shares|Relative" + "|" * 14 + "\nshort|\n"
    with caplog.at_level(logging.WARNING):
        limits = LimitsReader(Commands(qos=qos)).read()
    assert [each.name for each in limits.qos] == ["normal", "small"]
    assert "'soon' is not a time limit" in caplog.text
    assert "percentages" in caplog.text
    assert "2 columns instead of 16" in caplog.text


def test_while_slurmdbd_is_away_the_last_limits_hold():
    now_s, commands = [0.0], Commands()
    reader = LimitsReader(commands, lambda: now_s[0])
    first = reader.read()
    now_s[0], commands.answers["qos"] = 301.0, GatewayError("cannot read the site's limits: Connection refused")
    assert reader.read() is first
    now_s[0] = 310.0
    reader.read()
    assert commands.asked.count("qos") == 2, "slurmdbd is not asked in every cycle while it is away"
    now_s[0], commands.answers["qos"] = 362.0, QOS
    assert reader.read() == first
    assert commands.asked.count("qos") == 3


def test_limits_that_were_never_read_are_unknown_not_unlimited():
    refused = GatewayError("cannot read the site's limits: Connection refused")
    assert "Connection refused" in LimitsReader(Commands(associations=refused)).read().why_unknown
