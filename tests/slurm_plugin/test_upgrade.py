"""What 0.2 has left behind: a group at work, its journal with a join that was cut off, and old keys of muri.yaml.

`fixtures/0.2` was written by the controller of 0.2 (commit 8cdd5b23).
"""

import sqlite3
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_slurm import FakeSlurm, one_cycle, one_gpu

from muri.slurm_plugin.cli.admin import config as config_command
from muri.slurm_plugin.config import Config, ConfigError, load_config
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState, load_snapshot
from muri.slurm_plugin.records.journal import Journal
from muri.slurm_plugin.renamed import FIXED_KEYS, GONE_KEYS, OLD_KEYS, POLICY_KEYS

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
    (tag,) = slurm.jobs[PILOT].admin_comment.split()
    assert tag.startswith("muri-host:")
    state = tags.parse_json(tags.token(slurm.jobs[JOINING].admin_comment, tags.STATE_PREFIX))
    assert state["host"] == state["pilot"] == PILOT


def test_a_journal_of_0_2_is_brought_to_the_new_names_once(tmp_path, slurm):
    for _ in range(2):
        with Journal(tmp_path / "journal.db") as journal:
            group, done, begun = journal.intents()
            assert {group.submitted_job, done.payload["pilot"], begun.payload["pilot"]} == {PILOT}
            assert (done.payload["pilot_limit_s"], begun.payload["pilot_limit_s"]) == (11420, 15030)
            assert not {"host", "host_limit_s"} & {*done.payload, *begun.payload}


def checked(path: Path) -> str:
    done = CliRunner().invoke(config_command, ["check", str(path)])
    assert done.exit_code == 0, done.output
    return done.output


def test_old_keys_are_read_and_check_names_the_new_ones(tmp_path):
    path = tmp_path / "muri.yaml"
    path.write_text("host: {trace: true}\npilot: {hang_timeout_s: 9}\ngrouping: {pilot_qos: p}\n")
    assert load_config(path).pilot.model_dump() == {"trace": True, "hang_timeout_s": 9.0, "qos": "p"}
    path.write_text("host: {trace: true, hang_timeout_s: 9}\n")
    for old in ("host.trace", "host.hang_timeout_s"):
        assert f"{old}: it is called {OLD_KEYS[old]} now; Muri 0.4 will refuse the old name" in checked(path)


def test_the_gate_s_old_word_is_read_and_check_names_the_new_one(tmp_path):
    path = tmp_path / "muri.yaml"
    path.write_text("gate: licence\n")
    assert load_config(path).gate == "license"
    assert "gate: licence is spelled license now; Muri 0.4 will refuse the old word" in checked(path)


def test_a_file_with_every_key_of_0_2_as_shipped_is_the_configuration_of_0_3(tmp_path):
    path = OF_0_2 / "muri.yaml"
    assert load_config(path) == Config(node_python="/usr/lib/muri/python")
    path = tmp_path / "muri.yaml"
    path.write_text((OF_0_2 / "muri.yaml").read_text().replace("/usr/lib/muri/python", sys.executable))
    told = checked(path)
    assert all(f"{key}: removed in 0.3: " in told for key in (*FIXED_KEYS, *POLICY_KEYS, *GONE_KEYS))


def test_a_key_without_any_meaning_left_may_have_any_value(tmp_path):
    path = tmp_path / "muri.yaml"
    path.write_text(f"node_python: {sys.executable}\ngrouping: {{joinable_share: 0.5}}\n")
    assert load_config(path) == Config()
    assert "grouping.joinable_share: removed in 0.3: members bring their own CPUs and memory; take it out" in checked(
        path
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "host: {hang_timeout_s: 5}\npilot: {hang_timeout_s: 9}",
            "it is called pilot.hang_timeout_s now, which is there",
        ),
        ("host: {poll_s: 5}", "host.poll_s: removed in 0.3: it is always 30.0 (found 5)"),
        ("cycle_calls: 9", "cycle_calls: removed in 0.3: it is always 2000 (found 9)"),
        (
            "tiresias: {promote_after: 9}",
            "tiresias.promote_after: removed in 0.3: it is policy_options.promote_after now",
        ),
        ("grouping: {ordering: worst}", "grouping.ordering: removed in 0.3: it is policy_options.ordering now"),
        ("host: {x: 1}", "host: unknown key"),
    ],
)
def test_what_an_old_key_asked_for_and_0_3_does_not_do_is_an_error(tmp_path, text, told):
    path = tmp_path / "muri.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert told in str(caught.value)
