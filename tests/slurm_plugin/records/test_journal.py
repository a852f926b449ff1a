"""The journal: durable, in order, and clear when it cannot be used."""

import sqlite3

import pytest

from muri.slurm_plugin.records.journal import EXCLUSION, CorruptJournalError, Journal, JournalError


def test_what_was_begun_is_known_after_a_restart(tmp_path):
    with Journal(tmp_path / "j.db") as journal:
        journal.begin("b", "group", {"members": [1]}, 2.0)
        journal.begin("a", "dry-run", {"job_id": 2}, 1.0)
        journal.set_submitted_job("b", 9)
        journal.finish("a", "done")
    with Journal(tmp_path / "j.db") as journal:
        assert [intent.token for intent in journal.intents()] == ["a", "b"]
        (open_intent,) = journal.intents("begun")
        assert (open_intent.token, open_intent.submitted_job, open_intent.payload) == ("b", 9, {"members": [1]})
        journal.forget_before(100.0)
        assert [intent.token for intent in journal.intents()] == ["b"], "only closed ones are forgotten"


@pytest.mark.parametrize("at", [None, 0, 20, 44, 60])
def test_damage_anywhere_in_the_header_is_told_as_such_and_left_as_it_is(tmp_path, at):
    path = tmp_path / "j.db"
    with Journal(path):
        pass
    content = path.read_bytes()
    damaged = content[:at] + bytes(200 for _ in content[at:4096]) + content[4096:] if at is not None else b"none" * 99
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match="move it aside") as caught:
        Journal(path)
    assert isinstance(caught.value, CorruptJournalError)
    assert path.read_bytes() == damaged


def test_a_journal_that_another_process_makes_meanwhile_is_used(tmp_path):
    path = tmp_path / "journal.db"

    class Second(Journal):
        def _version(self):
            version = super()._version()
            if version == 0:
                with Journal(path) as first:
                    first.begin("a", "group", {}, 1.0)
            return version

    with Second(path) as journal:
        assert [intent.token for intent in journal.intents()] == ["a"]


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "j.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(JournalError, match="newer Muri"):
        Journal(path)


def test_facts_are_replaced_and_forgotten_and_what_cannot_be_stored_costs_no_later_one(tmp_path):
    with Journal(tmp_path / "j.db") as journal:
        with pytest.raises(UnicodeEncodeError):
            journal.set_fact(EXCLUSION, "caf\udce9", "its subject has a byte outside UTF-8")
        for why in ("why", "because"):
            journal.set_fact(EXCLUSION, "7", why)
            assert journal.facts(EXCLUSION) == {"7": why}
        journal.forget_fact(EXCLUSION, "7")
        assert journal.facts(EXCLUSION) == {}


def test_a_payload_that_is_no_json_counts_as_damage(tmp_path):
    with Journal(tmp_path / "journal.db") as journal:
        journal.begin("aa", "group", {"members": []}, 1.0)
        journal._connection.execute("UPDATE intents SET payload = 'no JSON'")
        with pytest.raises(CorruptJournalError, match="a value in it cannot be read"):
            journal.intents()


@pytest.mark.parametrize("change", [("finish", "done"), ("set_submitted_job", 7)])
def test_an_intent_that_is_not_found_counts_as_damage(tmp_path, change):
    """Found by stories: with a damaged index every cycle read the intent, ended it, and found it begun again."""
    name, value = change
    with Journal(tmp_path / "journal.db") as journal:
        journal.begin("aa", "group", {"members": []}, 1.0)
        getattr(journal, name)("aa", value)
        with pytest.raises(CorruptJournalError, match="does not find intent bb"):
            getattr(journal, name)("bb", value)
