"""Which members of a group are threads of its runtime, and what is said of the others."""

from dataclasses import replace

import pytest
from at_work import cycle_of
from fake_slurm import make_job

from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.slurm_plugin.planning.cycle_input import Knowledge, KnownPythons, MeasuredPython
from muri.slurm_plugin.planning.gathered import known_job
from muri.slurm_plugin.planning.starts import Isolation, isolations
from muri.slurm_plugin.records.roles import ManagedJob, read_job

HERE, THERE = "a" * 16, "b" * 16
PROFILE = StageProfile(ProfileKey("m", 8, 1, "gpu"), 0.1, 0.1, 0.7, 0.1, iteration_s=1.0, iterations=20)
PYTHONS = KnownPythons.of(MeasuredPython("m", "alice", each, "/home/alice/python") for each in (HERE, THERE))
THREAD = Isolation("thread", "its runs showed no danger; the site allows it")
OTHER = Isolation("process", "its Python or its environment is not that of the group's threads")
UNKNOWN = Isolation("process", "its Python or its environment is not known")


def job(number: int, environment: str = HERE, **changes: int) -> ManagedJob:
    facts = f" muri-facts:1.{environment}.{'c' * 16}..YQA" if environment else ""
    return replace(read_job(make_job(number, admin_comment=f"muri:model=m{number}{facts}")), **changes)


def planned(
    jobs: list[ManagedJob], dangers: list[tuple[str, ...] | None], mode: str = "interleave", isolation: str = "auto"
) -> list[Isolation]:
    cycle = cycle_of([], [], grouping={"isolation": isolation})
    keys = [cycle.key_of(job) for job in jobs]
    known = {
        key: replace(PROFILE, key=key, detail=ProfileDetail(dangers=each))
        for key, each in zip(keys, dangers, strict=True)
    }
    cycle = replace(cycle, knowledge=Knowledge(known, pythons=PYTHONS))
    return isolations([known_job(job, cycle) for job in jobs], mode, cycle.knowledge, cycle.config)


def test_threads_are_those_whose_runs_showed_no_danger_where_the_site_has_any() -> None:
    assert planned([job(1), job(2)], [(), ()], isolation="process") == [Isolation("process", "")] * 2
    found = planned([job(number) for number in range(4)], [(), ("children", "compile"), None, ()])
    assert [found[0], found[3]] == [THREAD, THREAD]
    assert found[1] == Isolation("process", "its runs used DataLoader workers or other child processes, torch.compile")
    assert found[2] == Isolation("process", "its runs were not looked at for what threads cannot keep apart")


@pytest.mark.parametrize(
    ("environments", "kinds"),
    [
        ([HERE, THERE, THERE, HERE, THERE], [OTHER, THREAD, THREAD, OTHER, THREAD]),
        ([HERE, "d" * 16, HERE, ""], [THREAD, OTHER, THREAD, UNKNOWN]),
        (["", ""], [UNKNOWN, UNKNOWN]),
        ([HERE, THERE], [Isolation("process", "no partner could share a process with it")] * 2),
    ],
)
def test_threads_have_one_python_and_one_environment(environments: list[str], kinds: list[Isolation]) -> None:
    jobs = [job(number, environment) for number, environment in enumerate(environments)]
    assert planned(jobs, [()] * len(jobs)) == kinds


def test_members_without_turns_and_those_on_several_gpus_are_processes() -> None:
    assert {each.kind for each in planned([job(1), job(2)], [(), ()], mode="plain")} == {"process"}
    assert {each.kind for each in planned([job(1, gpu_count=2), job(2, gpu_count=2)], [(), ()])} == {"process"}
