"""What `muri doctor` says of Slurm's settings: the gate, what is counted, files of jobs, and cycles on events."""

import os

import pytest

from muri.slurm_plugin.cli.doctor_slurm import Level, judge_events, judge_gate, judge_job_files, judge_select
from muri.slurm_plugin.config import Allocation, Config

LICENSES = "LicenseName=matlab Total=2 Used=0\nLicenseName=muri_gate Total=1000000 Used=0 Free=0 Reserved=1000000\n"
HOSTS = {"SlurmctldHost[0]": "head(10.0.0.1)", "SlurmctldHost[1]": "spare.example.org"}
LINEAR, CONS_TRES = "select/linear", "select/cons_tres"
ONLY_CPUS, NEITHER = Allocation(memory="off"), Allocation(cpus="off", memory="off")


@pytest.mark.parametrize(
    ("licenses", "config", "level", "said"),
    [
        (LICENSES, {}, Level.OK, "1200 s after the last cycle"),
        (LICENSES, {"lease_s": 600}, Level.WARNING, "600 s after the last cycle"),
        ("LicenseName=muri_gate_2 Total=1\n", {}, Level.PROBLEM, "start as ordinary jobs"),
        ("", {}, Level.PROBLEM, "start as ordinary jobs"),
        (LICENSES, {"gate": "hold"}, Level.WARNING, "priority 0"),
        ("", {"gate": "hold"}, Level.WARNING, "wait for the watchdog"),
    ],
)
def test_the_gate_is_judged_by_licence_and_lease(licenses, config, level, said):
    finding = judge_gate(licenses, Config(**config))
    assert (finding.level, said in finding.text) == (level, True)
    assert bool(finding.remedy) is (level is not Level.OK)


@pytest.mark.parametrize(
    ("kind", "parameters", "allocation", "level", "said"),
    [
        (CONS_TRES, "CR_CORE_MEMORY", Allocation(), Level.OK, "CR_CORE_MEMORY"),
        (CONS_TRES, "CR_CPU,CR_CORE_DEFAULT_DIST_BLOCK", Allocation(), Level.WARNING, "does not count memory"),
        (CONS_TRES, "CR_MEMORY", Allocation(), Level.WARNING, "does not count CPUs"),
        (LINEAR, "", Allocation(), Level.WARNING, "whole nodes (select/linear with no parameters)"),
        # What may not be changed need not be counted.
        (CONS_TRES, "CR_CORE", ONLY_CPUS, Level.OK, "CR_CORE"),
        (LINEAR, "", NEITHER, None, ""),
        ("", "", Allocation(), None, ""),
    ],
)
def test_what_slurm_does_not_count_is_named(kind, parameters, allocation, level, said):
    settings = {"SelectType": kind, "SelectTypeParameters": parameters}
    findings = [*judge_select(settings, Config(allocation=allocation))]
    assert [finding.level for finding in findings] == ([level] if level else [])
    for finding in findings:
        assert said in finding.text
        assert bool(finding.remedy) == (level is Level.WARNING)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"JobContainerType": "job_container/tmpfs"}, ["JobContainerType=job_container/tmpfs"]),
        ({"NamespaceType": "namespace/linux"}, ["NamespaceType=namespace/linux"]),
        ({"JobContainerType": "job_container/none"}, []),
        ({}, []),
    ],
)
def test_jobs_with_a_tmp_of_their_own_are_named(settings, said):
    texts = [finding.text for finding in judge_job_files(settings)]
    assert len(texts) == len(said)
    assert all(words in text for words, text in zip(said, texts, strict=True))


@pytest.mark.parametrize(
    ("change", "config", "level", "said"),
    [
        ({}, {}, Level.OK, "within seconds"),
        ({"is_watched": False}, {"events": {"enabled": False}}, Level.OK, "off: jobs wait for the timer, up to 360 s"),
        ({"is_watched": False}, {}, Level.WARNING, "jobs wait for the timer, up to 360 s"),
        ({"host": "other"}, {}, Level.WARNING, "slurmctld runs on head or spare and gives no notice here"),
        ({"hosts": {}}, {}, Level.WARNING, "slurmctld runs on another machine"),
        ({}, {"events": {"notice_file": "/"}}, Level.WARNING, "/ is not a file of user"),
        ({}, {"events": {"notice_file": "/nope"}}, Level.WARNING, "/nope is not a file of user"),
        ({"uid": 123456}, {}, Level.WARNING, "notice is not a file of user 123456"),
    ],
)
def test_what_is_left_to_the_timer_is_a_warning_with_a_remedy(tmp_path, change, config, level, said):
    path = tmp_path / "notice"
    path.touch()
    facts = {"is_watched": True, "host": "head", "hosts": HOSTS, "uid": os.geteuid(), **change}
    settings = {**facts["hosts"], "SlurmUser": f"slurm({facts['uid']})"}
    events = {"notice_file": path} | config.get("events", {})
    finding = judge_events(Config(events=events), settings, facts["host"], is_watched=facts["is_watched"])
    assert (finding.level, said in finding.text, bool(finding.remedy)) == (level, True, level is Level.WARNING)
