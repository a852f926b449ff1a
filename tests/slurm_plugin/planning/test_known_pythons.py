"""Which Python a job's script runs under, told by dry runs; and which members of a group are threads of one."""

import base64
from dataclasses import replace
from typing import Any

import pytest
from at_work import cycle_of
from fake_slurm import FakeSlurm, dry_runs, end_dry_run, make_job, make_node, one_cycle, one_gpu, pilots, told
from option_sources import SPANK_SOURCE

from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.pythons import DECIDING
from muri.slurm_plugin.planning.cycle_input import Knowledge, KnownPythons, MeasuredPython
from muri.slurm_plugin.planning.gathered import known_job
from muri.slurm_plugin.planning.starts import Isolation, isolations
from muri.slurm_plugin.records.cluster import Job
from muri.slurm_plugin.records.comment_reports import python_in
from muri.slurm_plugin.records.roles import ManagedJob, read_job

pytestmark = pytest.mark.configuration(profiling={"mode": "dry-run"})

HERE, THERE = "a" * 16, "b" * 16
OWN, OTHER = "/home/alice/venv/bin/python3", "/home/alice/conda/bin/python"


def job_in(environment: str, job_id: int, model: str = "m1", **changes: Any) -> Job:
    """A job submitted in an environment, "" for one without facts."""
    facts = f" muri-facts:1.{environment}.{'c' * 16}..YQA" if environment else ""
    comment = f"muri:model={model},batch-size=8,duration=100{facts}"
    return make_job(job_id, **{"admin_comment": comment, **changes})


class Exporting(FakeSlurm):
    def job_environment(self, job_id: int) -> dict[str, str]:
        return {"PATH": "/bin", "LD_LIBRARY_PATH": "/opt/cuda", "SECRET": "x", "PYTHONPATH": "/home/alice/lib"}


def finish_dry_runs(slurm: FakeSlurm, **result: Any) -> int:
    """End each dry run with a result; returns how many there were."""
    figures = DryRunResult((0.7, 0.1, 0.1, 0.1), 1.0, iterations=20).to_dict() | result
    found = dry_runs(slurm)
    for run in found:
        target = int(slurm.submitted[run.job_id].script.split("--target ")[1].split()[0])
        end_dry_run(slurm, run, target, **figures)
    return len(found)


def measured_and_planned(slurm: Exporting, make_controller: Any, grouping: Any = None, **result: Any) -> Any:
    """Measure what has to be measured and plan; returns the last status by job id."""
    with make_controller(slurm, (), profiling={"at_once": 4}, grouping=grouping or {}) as controller:
        controller.cycle()
        slurm.tick()
        finish_dry_runs(slurm, **result)
        return {job.job_id: job for job in controller.cycle().jobs}


def cluster(*jobs: Job) -> Exporting:
    return Exporting(list(jobs), one_gpu())


KEY = ProfileKey("m1", 8, 1, "gpu", "alice")
KNOWN = KnownPythons.of(
    [
        MeasuredPython(str(KEY), "alice", HERE, OWN),
        MeasuredPython(str(ProfileKey("m2", 8, 1, "gpu", "alice")), "alice", "d" * 16, OWN),
        MeasuredPython(str(ProfileKey("m3", 8, 1, "gpu", "alice")), "alice", "d" * 16, OTHER),
        MeasuredPython(str(ProfileKey("m1", 8, 1, "gpu", "bob")), "bob", THERE, OTHER),
    ]
)


@pytest.mark.parametrize(
    ("model", "environment", "python"),
    [
        ("m1", HERE, OWN),  # measured so
        ("m9", HERE, OWN),  # all that was measured there had this one
        ("m1", THERE, None),  # measured elsewhere only; bob's says nothing of alice's
        ("m9", "d" * 16, None),  # two were found there
        ("m9", THERE, ""),  # nothing is known
        ("m1", "", ""),  # no facts
    ],
)
def test_what_is_known_of_a_jobs_python(model: str, environment: str, python: str | None) -> None:
    job = read_job(job_in(environment, 1, model))
    assert KNOWN.of_job(job, ProfileKey(model, 8, 1, "gpu", "alice")) == python


@pytest.mark.parametrize(
    ("first", "python"), [("/opt/muri/bin/python3", ""), ("/home/alice/venv/bin/python3", None), ("", "")]
)
def test_where_nothing_was_measured_the_first_python_in_path_may_be_the_sites(first: str, python: str | None) -> None:
    encoded = base64.urlsafe_b64encode(first.encode()).decode().rstrip("=")
    job = read_job(make_job(1, admin_comment=f"muri:model=m1 muri-facts:1.{THERE}.{'c' * 16}.{encoded}.YQA"))
    assert job.facts is not None
    assert job.facts.python == first
    assert KnownPythons.of([], "/opt/muri/bin/python").of_job(job, KEY) == python


def test_threads_run_under_the_python_that_dry_runs_told(make_controller: Any) -> None:
    slurm = cluster(job_in(HERE, 1, "m1"), job_in(HERE, 2, "m2"))
    told_of = {"detail": ProfileDetail(dangers=()).to_dict(), "python": OWN}
    status = measured_and_planned(slurm, make_controller, grouping={"isolation": "auto"}, **told_of)
    (pilot,) = (slurm.submitted[job.job_id] for job in pilots(slurm))
    assert (told(pilot).python, told(pilot).threads) == (OWN, {"1", "2"})
    assert pilot.environment["MURI_MEMBERS_LD_LIBRARY_PATH"] == "/opt/cuda"
    assert pilot.environment["MURI_MEMBERS_PYTHONPATH"] == "/home/alice/lib"
    assert "LD_LIBRARY_PATH" not in pilot.environment
    assert "SECRET" not in str(pilot.environment)
    assert "thread: its runs showed no danger; the site allows it" in status[1].reasons


@pytest.mark.parametrize("isolation", ["process", "auto"])
def test_processes_need_no_python_of_the_runtime_and_no_dry_run_tells_one(make_controller: Any, isolation: str) -> None:
    slurm = cluster(job_in(HERE, 1, "m1"), job_in(THERE, 2, "m2"))
    own = {"grouping": {"isolation": isolation}}
    status = measured_and_planned(slurm, make_controller, python=OWN, detail={"dangers": ["compile"]}, **own)
    (pilot,) = (slurm.submitted[job.job_id] for job in pilots(slurm))
    assert (told(pilot).python, told(pilot).threads) == ("", frozenset())
    assert not any(name.startswith("MURI_MEMBERS_") for name in pilot.environment)
    said = [why for why in status[1].reasons if why.startswith(("process", "thread"))]
    assert said == (["process: its runs used torch.compile"] if isolation == "auto" else [])


def test_a_model_is_measured_once_however_many_environments_there_are(make_controller: Any) -> None:
    slurm = cluster(job_in(HERE, 1, "m1"))
    with make_controller(slurm, ()) as controller:
        controller.cycle()
        assert finish_dry_runs(slurm, python=OWN) == 1
        controller.cycle()
        for job_id, environment in ((2, THERE), (3, HERE)):
            slurm.jobs[job_id] = job_in(environment, job_id, "m1")
        controller.cycle()
        assert dry_runs(slurm) == []


def test_unknown_arguments_leave_a_job_alone(make_controller: Any) -> None:
    """From an older SPANK plugin, on a Slurm that keeps no submit line."""
    unnamed = {"submit_line": "", "admin_comment": "muri:on muri-script:0123456789abcdef"}
    too_long = f"muri:on muri-script:0123456789abcdef muri-facts:1.{HERE}.{'c' * 16}..~"
    jobs = [make_job(1, **unnamed), make_job(2, admin_comment=too_long), job_in("", 3, "m1", submit_line="")]
    slurm = Exporting(jobs, [make_node("n1", gpu_count=4)])
    with make_controller(slurm) as controller:  # m1 has a profile: its command does not matter
        status = {job.job_id: job for job in controller.cycle().jobs}
    assert dry_runs(slurm) == []
    assert any("nothing tells its script's arguments" in why for why in status[1].reasons), status[1]
    assert any("too long to travel" in why for why in status[2].reasons), status[2]
    assert not any("arguments" in why for why in status[3].reasons), status[3]
    assert not any(slurm.jobs[each].held for each in (1, 2))


def test_a_dry_run_gets_the_words_of_the_facts_in_an_alphabet_without_quotes(make_controller: Any) -> None:
    slurm = cluster(job_in(HERE, 1, "m9"))
    one_cycle(make_controller, slurm)
    (run,) = dry_runs(slurm)
    assert slurm.submitted[run.job_id].script.endswith(" --words YQA\n")


@pytest.mark.parametrize("forged", ["python3", "/x\ny", "/" + "x" * 2000, 7, None, ["/bin/sh"], {"executable": "/x"}])
def test_what_can_be_no_path_is_not_taken_for_a_python(forged: Any) -> None:
    assert python_in({"python": forged}) == ""
    assert python_in({"python": OWN}) == OWN


def test_damaged_notes_cost_nobody_the_cycle(make_controller: Any) -> None:
    slurm = cluster(job_in(HERE, 1, "m1"), job_in(HERE, 2, "m2"))
    with make_controller(slurm) as controller:
        for number, damaged in enumerate(([], ["only one"], "text", None, 7, ["a", "b", "c", "d", "e"])):
            controller._journal.set_fact("python", str(number), damaged)
        controller.cycle()
        assert len(pilots(slurm)) == 1
        assert controller._journal.facts("python") == {}


def test_the_two_lists_of_deciding_variables_are_one() -> None:
    text = (SPANK_SOURCE / "facts.c").read_text()
    names = text.split("deciding[] = {")[1].split("}")[0].replace('"', "").replace(",", " ").split()
    assert set(names) - {"MURI_PYTHON", "SBATCH_EXPORT"} == set(DECIDING)


# Which members of a group are threads of its runtime, and what is said of the others

PROFILE = StageProfile(ProfileKey("m", 8, 1, "gpu"), 0.1, 0.1, 0.7, 0.1, iteration_s=1.0, iterations=20)
PYTHONS = KnownPythons.of(MeasuredPython("m", "alice", each, OWN) for each in (HERE, THERE))
THREAD = Isolation("thread", "its runs showed no danger; the site allows it")
OTHER = Isolation("process", "its Python or its environment is not that of the group's threads")
UNKNOWN = Isolation("process", "its Python or its environment is not known")


def job(number: int, environment: str = HERE, **changes: Any) -> ManagedJob:
    return read_job(job_in(environment, number, f"m{number}", **changes))


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
