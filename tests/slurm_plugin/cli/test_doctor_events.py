"""What `muri doctor` says of cycles on events: who watches, and whether slurmctld can give notice."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from muri.slurm_plugin.cli.doctor_checks import EventFacts, Level, judge_events
from muri.slurm_plugin.config import Config


@pytest.fixture
def facts(tmp_path: Path) -> EventFacts:
    path = tmp_path / "notice"
    path.touch()
    return EventFacts(
        is_watched=True, host="head", slurmctld_hosts=("head", "spare"), slurm_uid=os.geteuid(), notice=path.lstat()
    )


def test_all_is_well(facts: EventFacts) -> None:
    assert judge_events(facts, Config()).level is Level.OK


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is_watched": False}, "jobs wait for the timer, up to 360 s"),
        ({"host": "other"}, "slurmctld runs on head or spare and gives no notice here"),
        ({"slurmctld_hosts": ()}, "slurmctld runs on another machine"),
        ({"notice": None}, "/run/muri/notice is no file of user"),
        ({"notice": Path("/").stat()}, "/run/muri/notice is no file of user"),
        ({"slurm_uid": 123456}, "/run/muri/notice is no file of user 123456"),
    ],
)
def test_what_is_left_to_the_timer_is_a_warning_with_a_remedy(
    facts: EventFacts, change: dict[str, object], said: str
) -> None:
    finding = judge_events(replace(facts, **change), Config())  # type: ignore[arg-type]
    assert (finding.level, said in finding.text, bool(finding.remedy)) == (Level.WARNING, True, True)


def test_a_site_may_have_the_timer_alone(facts: EventFacts) -> None:
    finding = judge_events(replace(facts, is_watched=False), Config(events={"enabled": False}))  # type: ignore[arg-type]
    assert (finding.level, finding.text) == (Level.OK, "off: jobs wait for the timer, up to 360 s")
