"""Members that import at the same time, or are interrupted meanwhile, get whole modules of their own."""

import signal
import sys
import threading

import pytest
from launcher_harness import ends
from two_members import run_both

from muri.launcher.shared_process.local_imports import ImportTurns, LocalModules


def test_members_begin_after_all_that_is_loaded_ahead_and_with_different_parts_of_a_package(launcher):
    launcher.script("import time\ntime.sleep(1)\ndone = True\n", "site/slow.py")
    launcher.environment["PYTHONPATH"] = str(launcher.folder / "site")
    launcher.threads("101", "102", options=("--preload", "slow"))
    data = "import sys\nprint(vars(sys.modules['slow'])['done'])\nfrom torch.utils.data import DataLoader\n"
    networks = "import torch.nn.functional\nprint('networks')\n"
    members = [launcher.member("101", launcher.script(data)), launcher.member("102", launcher.script(networks, "2.py"))]
    assert [ends(member) for member in members] == [0, 0], launcher.err("101") + launcher.err("102")
    assert launcher.out("101") + launcher.out("102") == "True\nnetworks\n"


def test_a_package_that_fails_shows_no_frame_of_the_launcher(launcher):
    launcher.threads("101")
    path = launcher.script("1 / 0\n", "site/broken_package.py").parent
    script = launcher.script(f"import sys\nsys.path.append({str(path)!r})\nimport broken_package\n")
    launcher.ran("101", script, code=1)
    assert "import_turns" not in launcher.err("101")
    assert "importlib" not in launcher.err("101")
    assert launcher.err("101").count("File ") == 2


def test_a_turn_is_shared_by_the_threads_of_one_session_and_by_nobody_else():
    turns = ImportTurns(longest_wait_s=0.05)
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


def test_a_session_is_forgotten_while_another_looks_modules_up():
    class Session:
        def __init__(self):
            self.path, self.shared_path, self.belongings = [], frozenset(), {}

    modules, other, over = LocalModules(frozenset()), Session(), threading.Event()

    def look_up():
        number = 0
        while not over.is_set():
            modules.is_local(other, f"module_{number}")
            number += 1

    switching_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    looking = threading.Thread(target=look_up)
    looking.start()
    try:
        for _ in range(1000):
            modules.forget(Session())
    finally:
        over.set()
        looking.join()
        sys.setswitchinterval(switching_s)


WAITS_FOR_A_SIGNAL = """
    import time
    from muri.launcher.shared_process.state import current_session
    print("imported", flush=True)
    current_session().interrupted.wait()
    for _ in range(10**6):
        pass
    whole = True
"""


def test_a_signal_waits_for_the_end_of_an_import_that_others_share(launcher):
    launcher.script(WAITS_FOR_A_SIGNAL, "slow.py", "site")
    launcher.environment["PYTHONPATH"] = str(launcher.folder / "site")
    launcher.threads("101", "102")
    first = launcher.member("101", launcher.script("import slow\nprint('not reached')\n", "first.py"), PYTHONPATH="")
    launcher.says("101", "imported")
    first.send_signal(signal.SIGTERM)
    second = launcher.member("102", launcher.script("import slow\nprint(slow.whole)\n", "second.py"), PYTHONPATH="")
    assert [ends(first), ends(second)] == [143, 0], launcher.err("102")
    assert [launcher.out(member) for member in ("101", "102")] == ["imported\n", "True\n"]


def test_members_use_pytorch_for_the_first_time_at_once(launcher):
    pytest.importorskip("torch", reason="its first use is the subject")
    code = """
        import builtins
        import torch
        def slow_import(name, *arguments, plain=builtins.__import__, sleep=time.sleep, **keywords):
            if name.partition(".")[0] == "torch":
                sleep(0.2)  # lets the other member run
            return plain(name, *arguments, **keywords)
        builtins.__import__ = slow_import
        meet("ready")
        torch.tensor([1.0]).fill_(2.0)
        with torch.autograd.profiler.record_function("step"):
            pass
        print("done")
    """
    assert run_both(launcher, code) == ("done\n", "done\n")


def test_unpickling_finds_the_members_own_modules(launcher):
    for member in ("101", "102"):
        launcher.script(f"OWNER = '{member}'\n", "named.py", member)
    code = r"""
        import io, pickle
        from multiprocessing.reduction import ForkingPickler
        meet("ready")
        switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        reference = b"cnamed\nOWNER\n."  # as a class of the module would be written
        owners = set()
        for _ in range(2000):
            owners.add(pickle.loads(reference))
            owners.add(pickle.load(io.BytesIO(reference)))
            owners.add(ForkingPickler.loads(reference))
            owners.add(pickle.Unpickler(io.BytesIO(reference)).load())
        sys.setswitchinterval(switch_interval_s)
        print(owners)
    """
    assert run_both(launcher, code, own_folders=True) == ("{'101'}\n", "{'102'}\n")


def test_modules_from_directories_that_a_script_adds_are_its_own(launcher):
    for me in ("101", "102"):
        for place in ("first/first_of.py", "last/last_of.py", f"{me}/added.py", "first/package/part.py"):
            launcher.script(f"WHO = '{me} {place[0]}'\n", place, me)
    code = """
        try:
            import added  # not there yet
        except ImportError:
            pass
        import colorsys
        sys.path.insert(0, os.path.join(os.path.dirname(__file__), "first"))
        sys.path.append("last")  # in this member's working directory
        import first_of, last_of
        sys.path.append(me)
        meet("ready")
        import added
        from package import part
        print(first_of.WHO, last_of.WHO, added.WHO, part.WHO, colorsys.__file__ == sys.modules["colorsys"].__file__)
    """
    outputs = run_both(launcher, code, own_folders=True)
    assert outputs == tuple(f"{me} f {me} l {me} {me[0]} {me} f True\n" for me in ("101", "102"))


@pytest.mark.parametrize("first", ["installed", "local"])
def test_a_members_own_module_stands_beside_an_installed_one_of_its_name(launcher, first):
    launcher.script("WHO = 'installed'\n", "named.py", "site")
    launcher.environment["PYTHONPATH"] = str(launcher.folder / "site")
    launcher.script("WHO = 'local'\n", "named.py", "102" if first == "installed" else "101")
    code = """
        if me == "102":
            meet("first")
        import named
        if me == "101":
            meet("first")
        meet("both")
        def again():
            import named
            return named.WHO
        print(named.WHO, again(), again(), flush=True)
    """
    places = [first, "local" if first == "installed" else "installed"]
    outputs = run_both(launcher, code, own_folders=True, PYTHONPATH="")
    assert outputs == tuple(f"{place} {place} {place}\n" for place in places)


REPLACES_ITSELF = """
import os, sys, time, types
open("begun", "w").close()
time.sleep(0.5)
lazy = types.ModuleType(__name__)
lazy.__spec__, lazy.__path__, lazy.Trainer = __spec__, __path__, object
sys.modules[__name__] = lazy
"""


def test_a_member_that_imports_from_a_package_which_replaces_itself_waits_for_its_end(launcher):
    launcher.script(REPLACES_ITSELF, "__init__.py", "site/lazy_package")
    launcher.environment["PYTHONPATH"] = str(launcher.folder / "site")
    code = """
        while me == "102" and not os.path.exists("begun"):
            time.sleep(0.001)
        from lazy_package import Trainer
        print(Trainer)
    """
    assert run_both(launcher, code, PYTHONPATH="") == ("<class 'object'>\n",) * 2
