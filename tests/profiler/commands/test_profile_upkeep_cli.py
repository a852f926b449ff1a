"""`muri profile set`, and who is written down by it, by rm and by import."""

import json
import os
import pwd

import pytest
from profile_builders import make_profile
from profile_commands import invoke

from muri.profiler.commands.stored import user_name
from muri.profiler.records import ProfileDetail
from muri.profiler.store import ProfileStore

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(autouse=True)
def path(path):
    with ProfileStore(path) as store:
        store.put(make_profile("resnet18", detail=ProfileDetail(busy_s=(0.2, 0.1, 0.3, 0.0), cpu_cores=2.0)))
        store.put(make_profile("gpt2", gpu_type="a100"))
    return path


def audit(path):
    with ProfileStore(path, read_only=True) as store:
        return store.audit()


def plain(*arguments):
    return json.loads(invoke(*arguments, "--json").output)


def test_an_edit_keeps_the_old_figures_as_history_and_says_who(path):
    done = plain("set", "resnet18", "load_ms=150", "gpu_mem_gib=5.5")
    assert (done["before"]["load_s"], done["after"]["load_s"]) == (0.12, 0.15)
    with ProfileStore(path, read_only=True) as store:
        new, old = store.history(make_profile("resnet18").key)
    assert (new.source, new.load_s, new.gpu_mem_gib, new.propagate_s) == ("edit", 0.15, 5.5, old.propagate_s)
    assert (new.detail.busy_s, new.detail.cpu_cores) == (None, 2.0)  # hidden use no longer fits
    (entry,) = audit(path)
    assert (entry.who, entry.action) == (ME, "set")
    assert (entry.before["gpu_mem_gib"], entry.after["gpu_mem_gib"]) == (3.2, 5.5)
    assert "load_s: 0.15 → 0.2\n" in invoke("set", "resnet18", "load_ms=200").output


def test_editing_only_the_memory_keeps_what_was_measured_of_the_times(path):
    invoke("set", "resnet18", "gpu_mem_gib=8")
    with ProfileStore(path, read_only=True) as store:
        assert store.get(make_profile("resnet18").key).detail.busy_s == (0.2, 0.1, 0.3, 0.0)


def test_removals_and_imports_are_written_down(path, tmp_path):
    exported = tmp_path / "export.json"
    exported.write_text(invoke("export").output)
    invoke("rm", "gpt2", "--yes")
    invoke("import", exported)
    actions = [(entry.action, entry.key.model) for entry in audit(path)]
    assert actions == [("rm", "gpt2"), ("import", "gpt2"), ("import", "resnet18")]


def test_under_sudo_both_names_are_written_down(monkeypatch):
    monkeypatch.setenv("SUDO_USER", "alice")
    assert user_name() == f"alice as {ME}"
