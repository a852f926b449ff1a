"""Sessions that import parts of one package at the same time get whole modules."""

import threading

import pytest
from launcher_harness import ends

from muri.launcher.isolation.local_imports import ImportTurns


def test_members_begin_with_different_parts_of_a_package_while_it_is_loaded_ahead(launcher):
    launcher.runtime("101", "102", options=("--preload", "torch"))
    data = launcher.script("from torch.utils.data import DataLoader\nprint('data')\n", "data.py")
    networks = launcher.script("import torch.nn.functional\nprint('networks')\n", "networks.py")
    members = [launcher.member("101", data), launcher.member("102", networks)]
    assert [ends(member) for member in members] == [0, 0], launcher.err("101") + launcher.err("102")
    assert launcher.out("101") + launcher.out("102") == "data\nnetworks\n"


def test_a_package_that_fails_shows_no_frame_of_the_launcher(launcher):
    launcher.runtime("101")
    launcher.script("1 / 0\n", "broken_package.py", folder="site")
    path = launcher.folder / "site"
    script = launcher.script(f"import sys\nsys.path.append({str(path)!r})\nimport broken_package\n")
    assert ends(launcher.member("101", script)) == 1
    assert "import_turns" not in launcher.err("101")
    assert "importlib" not in launcher.err("101")
    assert launcher.err("101").count("File ") == 2


@pytest.fixture
def turns():
    return ImportTurns(longest_wait_s=0.05)


def test_a_turn_is_shared_by_the_threads_of_one_session_and_by_nobody_else(turns):
    assert turns.take("a")
    assert turns.take("a")
    assert not turns.take("b")
    turns.give()
    assert not turns.take("b")
    turns.give()
    assert turns.take("b")


def test_who_waits_gets_the_turn_when_it_ends():
    turns = ImportTurns()
    turns.take("a")
    got = threading.Event()
    waiting = threading.Thread(target=lambda: turns.take("b") and got.set())
    waiting.start()
    assert not got.is_set()
    turns.give()
    assert got.wait(240)
    waiting.join()
