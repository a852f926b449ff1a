"""Whether `muri doctor` sees that Slurm does not count CPUs or memory."""

import pytest

from muri.slurm_plugin.cli.doctor_checks import Level, examine_select, judge_job_files, judge_select
from muri.slurm_plugin.config import Allocation, Config
from muri.slurm_plugin.gateway.base import GatewayUnavailableError

LINEAR, CONS_TRES = "select/linear", "select/cons_tres"


def settings(kind, parameters):
    return (
        f"SelectType              = {kind}\nSelectTypeParameters    = {parameters}\nSlurmUser               = root(0)\n"
    )


@pytest.mark.parametrize(
    ("kind", "parameters", "level", "said"),
    [
        (CONS_TRES, "CR_CORE_MEMORY", Level.OK, "CR_CORE_MEMORY"),
        (CONS_TRES, "CR_CPU,CR_CORE_DEFAULT_DIST_BLOCK", Level.WARNING, "does not count memory"),
        (CONS_TRES, "CR_MEMORY", Level.WARNING, "does not count CPUs"),
        (LINEAR, "", Level.WARNING, "whole nodes (select/linear with no parameters)"),
    ],
)
def test_what_slurm_does_not_count_is_named(kind, parameters, level, said):
    finding = judge_select(settings(kind, parameters), Config())
    assert finding.level is level
    assert said in finding.text
    assert bool(finding.remedy) == (level is Level.WARNING)


def test_what_may_not_be_changed_need_not_be_counted():
    raw = settings(CONS_TRES, "CR_CORE")
    assert judge_select(raw, Config(allocation=Allocation(memory="off"))).level is Level.OK
    assert judge_select(settings(LINEAR, ""), Config(allocation=Allocation(cpus="off", memory="off"))) is None
    assert judge_select("", Config()) is None


def test_a_machine_without_slurm_has_nothing_to_tell():
    class NoCommands:
        def run(self, action, arguments):
            raise GatewayUnavailableError("there is no scontrol")

    assert examine_select(Config(), NoCommands()) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("JobContainerType        = job_container/tmpfs", "JobContainerType=job_container/tmpfs"),
        ("NamespaceType           = namespace/linux", "NamespaceType=namespace/linux"),
        ("JobContainerType        = job_container/none", ""),
        ("NamespaceType           = (null)", ""),
        ("", ""),
    ],
)
def test_jobs_with_a_tmp_of_their_own_are_named(line, said):
    finding = judge_job_files(f"ClusterName = x\n{line}\nSlurmUser = root(0)\n")
    assert (finding is not None) == bool(said)
    assert said in (finding.text if finding else "")
