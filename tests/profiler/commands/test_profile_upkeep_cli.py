"""`muri profile stale`, `edit`, `audit`, `stats`, and who is written down by rm and import."""

import json
import os
import pwd

import pytest
from profile_builders import make_profile
from profile_commands import invoke, use_own_store

from muri.profiler.records import ProfileDetail
from muri.profiler.store import ProfileStore
from muri.profiler.upkeep import user_name

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    path = use_own_store(tmp_path, monkeypatch)
    with ProfileStore(path) as store:
        store.put(make_profile("resnet18", detail=ProfileDetail(busy_s=(0.2, 0.1, 0.3, 0.0), cpu_cores=2.0)))
        store.put(make_profile("gpt2", gpu_type="a100"))
    return path


def plain(*arguments):
    return json.loads(invoke(*arguments, "--json").output)


def test_a_mark_is_set_listed_and_taken_back():
    assert "No profile is stale." in invoke("stale").output
    assert plain("stale", "gpt2", "--reason", "new loader")["changed"]
    assert not plain("stale", "gpt2", "--reason", "again")["changed"]
    (mark,) = plain("stale")["stale"]
    assert (mark["model"], mark["gpu_type"], mark["reason"], mark["who"]) == ("gpt2", "a100", "new loader", ME)
    assert "new loader" in invoke("stale").output
    assert plain("stale", "gpt2", "--clear")["changed"]
    assert plain("stale")["stale"] == []
    assert [entry["action"] for entry in plain("audit")["audit"]] == ["stale", "clear"]


def test_an_edit_keeps_the_old_figures_as_history_and_says_who(path):
    done = plain("edit", "resnet18", "--load-ms", "150", "--gpu-mem-gib", "5.5")
    assert (done["before"]["load_s"], done["after"]["load_s"]) == (0.12, 0.15)
    with ProfileStore(path, read_only=True) as store:
        new, old = store.history(make_profile("resnet18").key)
    assert (new.source, new.load_s, new.gpu_mem_gib, new.propagate_s) == ("edit", 0.15, 5.5, old.propagate_s)
    assert (new.detail.busy_s, new.detail.cpu_cores) == (None, 2.0)  # hidden use no longer fits
    (entry,) = plain("audit")["audit"]
    assert (entry["who"], entry["action"]) == (ME, "edit")
    assert (entry["before"]["gpu_mem_gib"], entry["after"]["gpu_mem_gib"]) == (3.2, 5.5)
    assert "load_s: 0.12 → 0.15" in invoke("audit", "resnet18").output


def test_editing_only_the_memory_keeps_what_was_measured_of_the_times(path):
    invoke("edit", "resnet18", "--gpu-mem-gib", "8")
    with ProfileStore(path, read_only=True) as store:
        assert store.get(make_profile("resnet18").key).detail.busy_s == (0.2, 0.1, 0.3, 0.0)


def test_removals_and_imports_are_written_down(tmp_path):
    exported = tmp_path / "export.json"
    invoke("export", "-o", exported)
    invoke("rm", "gpt2", "--yes")
    invoke("import", exported)
    actions = [(entry["action"], entry["key"]["model"]) for entry in plain("audit")["audit"]]
    assert actions == [("rm", "gpt2"), ("import", "gpt2"), ("import", "resnet18")]
    assert [entry["key"]["model"] for entry in plain("audit", "--last", "1")["audit"]] == ["resnet18"]


def test_under_sudo_both_names_are_written_down(monkeypatch):
    monkeypatch.setenv("SUDO_USER", "alice")
    assert user_name() == f"alice as {ME}"


def test_stats_count_what_is_there(path):
    invoke("edit", "gpt2", "--gpu-mem-gib", "8")
    invoke("stale", "resnet18", "--reason", "x")
    stats = plain("stats")
    assert (stats["profiles"], stats["models"], stats["stale"], stats["estimates"]) == (2, 2, 1, 0)
    assert stats["measurements"] == {"dry-run": 2, "edit": 1}
    assert stats["gpu_types"] == {"a100": 1, "gpu": 1}
    assert stats["journal"] == "wal"
    assert stats["oldest"] == "2026-03-01T12:00:00Z"
    assert stats["file_mib"] * 1024**2 >= path.stat().st_size - 1024
    assert all(len(line) <= 80 or str(path) in line for line in invoke("stats").output.splitlines())
