"""What 0.2 has left behind: a group at work, its journal with a join that was cut off, and old keys of muri.yaml.

`fixtures/0.2` was written by the controller of 0.2 (commit 8cdd5b23).
"""

import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_slurm import FakeSlurm, one_cycle, one_gpu

from muri.slurm_plugin.cli.admin import config as config_command
from muri.slurm_plugin.config import ConfigError, load_config
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState, load_snapshot
from muri.slurm_plugin.records.journal import Journal
from muri.slurm_plugin.renamed import OLD_KEYS

OF_0_2 = Path(__file__).parent / "fixtures" / "0.2"
PILOT, JOINING = 102, 4


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Three jobs at work behind one pilot; a fourth was about to join."""
    connection = sqlite3.connect(tmp_path / "journal.db")
    connection.executescript((OF_0_2 / "journal.sql").read_text())
    connection.close()
    snapshot = load_snapshot(OF_0_2 / "snapshot.json")
    slurm = FakeSlurm(list(snapshot.jobs), one_gpu())
    slurm.now_s = snapshot.taken_s
    return slurm


def test_a_group_of_0_2_lives_on_and_takes_the_member_that_was_about_to_join(make_controller, slurm):
    told = one_cycle(make_controller, slurm)
    slurm.tick()
    assert told[1].partners == (2, 3, JOINING)
    assert {job.state for job in slurm.jobs.values()} == {JobState.RUNNING}
    assert slurm.starts == {JOINING: 1}, "all others run on"
    assert tags.parse_pilot(slurm.jobs[PILOT].admin_comment).members == (1, 2, 3, JOINING)
    assert tags.parse_state(slurm.jobs[JOINING].admin_comment).pilot == PILOT
    slurm.let_work(lambda: one_cycle(make_controller, slurm), (1, 2, 3, JOINING))
    assert {job.state for job in slurm.jobs.values() if job.job_id != PILOT} == {JobState.COMPLETED}


def test_processes_of_0_2_still_read_what_is_changed_in_their_tags(make_controller, slurm):
    one_cycle(make_controller, slurm)
    assert slurm.jobs[PILOT].admin_comment.startswith("muri-host:")
    state = tags.parse_json(tags.token(slurm.jobs[JOINING].admin_comment, tags.STATE_PREFIX))
    assert state["host"] == state["pilot"] == PILOT


def test_a_journal_of_0_2_is_brought_to_the_new_names_once(tmp_path, slurm):
    for _ in range(2):
        with Journal(tmp_path / "journal.db") as journal:
            group, done, begun = journal.intents()
            assert {group.submitted_job, done.payload["pilot"], begun.payload["pilot"]} == {PILOT}
            assert (done.payload["pilot_limit_s"], begun.payload["pilot_limit_s"]) == (11420, 15030)
            assert not {"host", "host_limit_s"} & {*done.payload, *begun.payload}


def test_old_keys_are_read_and_check_names_the_new_ones(tmp_path):
    path = tmp_path / "muri.yaml"
    path.write_text("host: {trace: true, telemetry_s: 7}\npilot: {poll_s: 9}\n")
    assert load_config(path).pilot.model_dump(include={"trace", "telemetry_s", "poll_s"}) == {
        "trace": True, "telemetry_s": 7.0, "poll_s": 9.0,
    }  # fmt: skip
    done = CliRunner().invoke(config_command, ["check", str(path)])
    assert done.exit_code == 0, done.output
    for old in ("host.trace", "host.telemetry_s"):
        assert f"{old}: is called {OLD_KEYS[old]} now; Muri 0.4 will refuse the old name" in done.output


def test_a_key_under_both_names_is_refused(tmp_path):
    path = tmp_path / "muri.yaml"
    path.write_text("host: {poll_s: 5}\npilot: {poll_s: 9}\n")
    with pytest.raises(ConfigError, match=r"host\.poll_s: is called pilot\.poll_s now, which is there, too"):
        load_config(path)
