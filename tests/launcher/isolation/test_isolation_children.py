"""Members at once fork and look after children: each has its own, and no child inherits another member's lock."""

import psutil
import pytest
from launcher_harness import Launcher, ends

OWN_CHILDREN = """
    import multiprocessing, os, sys, time
    me, other = sys.argv[1:]

    def wait_for(*names):
        while not all(map(os.path.exists, names)):
            time.sleep(0.01)

    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=wait_for, args=(f"{me}-looked", f"{other}-looked"))
    child.start()
    open(f"{me}-started", "w").close()
    wait_for(f"{other}-started")
    children = multiprocessing.active_children()
    print([process.name for process in children], children == [child], flush=True)
    for process in set(children) - {child}:
        process.terminate()  # as a script does that cleans up after its own pool
    open(f"{me}-looked", "w").close()
    child.join()
    print(child.exitcode)
"""
LEFT_BEHIND = """
    import multiprocessing, time
    fork = multiprocessing.get_context("fork")
    def report():
        time.sleep(0.3)
        print("the child's last word", flush=True)
    pool = fork.Pool(2)  # never closed
    kept = [pool]
    kept.append(kept)
    fork.Process(target=report).start()
    fork.Process(target=time.sleep, args=(600,), daemon=True).start()
    print(len(multiprocessing.active_children()), flush=True)
"""
HELD = """
def held():
    open("held", "w").close()
    while not os.path.exists("forking"):
        time.sleep(0.01)
    time.sleep(0.5)
"""
HOLDS_PYTORCHS_LOCK = f"""
import os, time
import torch.cuda
{HELD}
with torch.cuda._initialization_lock:
    held()
"""
SETS_PYTORCHS_FLAGS = f"""
import os, time
import torch
from muri.launcher.isolation.torch_settings import flags
{HELD}
with flags.lock:
    held()
"""
IS_IMPORTING = f"""
import os, sys, time
{HELD}
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "sched":
            held()
sys.meta_path.insert(0, Slow())
import sched
sys.meta_path.pop(0)
"""
FORKS = """
    import os, signal, time
    import torch
    while not os.path.exists("held"):
        time.sleep(0.01)
    open("forking", "w").close()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a child that waits in vain
        torch.manual_seed(1)
        torch.are_deterministic_algorithms_enabled()
        import sched
        print("seeded", flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_each_member_sees_its_own_children_only(launcher: Launcher) -> None:
    script = launcher.script(OWN_CHILDREN)
    launcher.threads("101", "102")
    pairs = (("101", "102"), ("102", "101"))
    processes = [launcher.member(me, script, me, other) for me, other in pairs]
    assert [ends(process) for process in processes] == [0, 0], launcher.err("101") + launcher.err("102")
    for member in ("101", "102"):
        assert launcher.out(member) == "['ForkProcess-1'] True\n0\n"


def test_children_left_behind_end_as_they_do_alone(launcher: Launcher) -> None:
    script = launcher.script(LEFT_BEHIND)
    runtime = launcher.threads("101", "102")
    before = len(psutil.Process(runtime.pid).children())
    for member in (None, "101"):
        assert ends(launcher.member(member, script)) == 0, launcher.err(member)
        assert launcher.out(member) == "4\nthe child's last word\n"
    left = [child for child in psutil.Process(runtime.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    assert len(left) == before, left


@pytest.mark.parametrize("holds", [HOLDS_PYTORCHS_LOCK, SETS_PYTORCHS_FLAGS, IS_IMPORTING])
def test_no_forked_process_waits_for_another_members_thread(launcher: Launcher, holds: str) -> None:
    pytest.importorskip("torch", reason="one of the locks is PyTorch's")
    launcher.threads("101", "102")
    holder = launcher.member("101", launcher.script(holds, "holder.py"))
    forking = launcher.member("102", launcher.script(FORKS))
    assert [ends(process) for process in (holder, forking)] == [0, 0], launcher.err("101") + launcher.err("102")
    assert launcher.out("102") == "seeded\n0\n"
