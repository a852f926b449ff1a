"""Groups as Slurm's records tell of them: what `muri top` shows on a host without run directories."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_slurm import FakeSlurm, group_at_work, pilots
from rich.console import Console

from muri.launcher.run import top
from muri.launcher.run.top import NoGroupError, find_groups, render
from muri.profiler.records import JobUse, NodeUse, Use
from muri.slurm_plugin.gateway.base import SlurmUnreachableError
from muri.slurm_plugin.node import group_records
from muri.slurm_plugin.node.group_records import groups_in
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import speeds_token
from muri.slurm_plugin.records.roles import view_of

REPORT = {"n": 40, "t": 0.5, "s": [0.1, 0.1, 0.2, 0.0], "w": [0.05, 0.0, 0.0, 0.0]}


@pytest.fixture
def slurm(make_controller: Any) -> FakeSlurm:
    """Four members of one pilot job that run; the pilot has reported of the first."""
    slurm = group_at_work(make_controller)
    (pilot,) = pilots(slurm)
    report = tags.SPEED_PREFIX + tags.format_json({"1": REPORT, "d": "fair"})
    slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=report)
    return slurm


def test_a_group_is_told_from_the_records_of_its_jobs(slurm: FakeSlurm) -> None:
    (pilot,) = pilots(slurm)
    (group,) = groups_in(view_of(slurm.queue()), pilot.uid)
    assert (group["pilot_job"], group["node"], group["discipline"]) == (str(pilot.job_id), "n1", "fair")
    assert sorted(group["members"]) == ["1", "2", "3", "4"]
    first, second = group["members"]["1"], group["members"]["2"]
    assert first["speed"] == pytest.approx(first["solo_iteration_s"] / 0.5)
    assert (first["iterations"], first["iterations_per_s"]) == (40, 2.0)
    assert first["share"] == pytest.approx(
        {"load": 0.2, "preprocess": 0.2, "propagate": 0.4, "synchronize": 0.0, "wait": 0.1, "other": 0.1}
    )
    assert 0 < first["predicted_speed"] <= 1
    assert (second["speed"], second["state"]) == (None, "running")


def test_a_member_that_never_attached_is_told_with_its_use(slurm: FakeSlurm) -> None:
    (pilot,) = pilots(slurm)
    job = JobUse(1.5, 3.0, 0.0, 0.4, 2.0)
    use = {**Use(NodeUse(2.0, 64, 5.0), {"2": job}).to_dict(), "plain": ["2"]}
    token = speeds_token({"members": {"1": {"state": "waiting"}}, "use": use})
    assert token is not None
    slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=token)
    (group,) = groups_in(view_of(slurm.queue()), pilot.uid)
    assert [group["members"][name]["state"] for name in "123"] == ["running", "plain", "running"]
    assert group["use"]["jobs"] == {"2": asdict(job)}


def test_groups_are_shown_to_their_user_and_to_root_until_their_pilot_ends(slurm: FakeSlurm) -> None:
    (pilot,) = pilots(slurm)
    view = view_of(slurm.queue())
    assert len(groups_in(view, 0)) == 1
    assert groups_in(view, pilot.uid + 1) == []
    slurm.end(pilot.job_id)
    assert groups_in(view_of(slurm.queue()), 0) == []


def test_top_shows_the_records_where_no_group_runs_and_says_so(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(group_records, "running_groups", lambda: groups_in(view_of(slurm.queue()), 0))
    groups = find_groups({"MURI_RUN_DIR": str(tmp_path)})
    console = Console(width=80, record=True)
    console.print(render(groups, "job"))
    text = console.export_text()
    assert "No group runs on this host" in text
    assert "on n1: fair" in text
    assert max(map(len, text.splitlines())) <= 80
    assert groups.groups[0].to_json()["file"] is None
    pauses: list[float] = []
    monkeypatch.setattr(top, "_single_keys", lambda: nullcontext(lambda pause_s: pauses.append(pause_s) or "q"))
    monkeypatch.setattr(top, "find_groups", lambda _environment: groups)
    top._watch(console, "job")
    assert pauses == [top.ASKING_S]


def test_top_says_that_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(
        group_records, "running_groups", Mock(side_effect=SlurmUnreachableError("slurmctld does not answer"))
    )
    with pytest.raises(NoGroupError, match="records cannot be read: slurmctld does not answer"):
        find_groups({"MURI_RUN_DIR": str(tmp_path)})
