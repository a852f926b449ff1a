"""A script that runs alone is saved at an iteration boundary and goes on as if nothing had happened."""

import signal
import sys
from pathlib import Path

import pytest
from checkpoint_scripts import TRAIN, lines
from launcher_harness import Launcher, ends
from polling import until
from ranks_harness import free_port

import muri

STOPPED = 128 + signal.SIGTERM


@pytest.fixture(autouse=True)
def place(launcher: Launcher) -> Path:
    """Where the scripts' checkpoints are."""
    place = launcher.folder / "c"
    launcher.environment["MURI_CHECKPOINT_DIR"] = str(place)
    return place


def curve_of(launcher: Launcher, name: str, *stops: int, **variables: str) -> list[str]:
    """The losses of a script that is stopped at these iterations, 0: not at all."""
    script, path = launcher.script(TRAIN), launcher.folder / f"{name}.curve"
    variables |= {"MURI_CHECKPOINT_DIR": str(launcher.folder / name)}
    codes = [ends(launcher.member(None, script, path, stop_at, **variables)) for stop_at in stops]
    assert codes == [STOPPED if stop_at else 0 for stop_at in stops], launcher.err(None)
    return lines(path)


def test_stops_in_mid_epoch_and_at_its_end_leave_the_loss_curve_as_it_is(launcher, uninterrupted_curve):
    # Ten iterations make an epoch: stops in the middle, at the end of one, and twice in the same one.
    assert curve_of(launcher, "stopped", 4, 10, 27, 0) == uninterrupted_curve
    assert len(uninterrupted_curve) == 31
    assert "resumed at iteration 27" in launcher.err(None)


def test_a_shuffling_generator_of_the_scripts_own_goes_on_too(launcher):
    whole = curve_of(launcher, "whole", 0, OWN_GENERATOR="1")
    assert curve_of(launcher, "stopped", 13, 0, OWN_GENERATOR="1") == whole


def test_kill_at_any_moment_leaves_a_whole_checkpoint(launcher, uninterrupted_curve):
    """With a checkpoint after every iteration, a killed script loses one iteration at most."""
    text = TRAIN.replace("muri.checkpoint(save, load)", "muri.checkpoint(save, load, every_iterations=1)")
    script = launcher.script(text.replace("done += 1", "done += 1; time.sleep(0.005)"))
    path = launcher.folder / "killed.curve"
    for least in (3, 9, 16):
        process = launcher.member(None, script, path, 0)
        until(lambda least=least: len(lines(path)) >= least, "the first iterations")
        process.kill()
        process.wait()
    launcher.ran(None, script, path, 0)
    assert list(dict.fromkeys(lines(path))) == uninterrupted_curve  # a repeated iteration repeats its loss
    assert len(lines(path)) <= len(uninterrupted_curve) + 3


def test_own_handler_is_called_as_well_and_an_ignored_signal_stops_nothing(launcher):
    script = launcher.script("""
        import os, signal
        signal.signal(signal.SIGTERM, lambda *_: print("own handler", flush=True))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        import muri
        muri.checkpoint(lambda path: path.write_text("state"), lambda path: print(path.read_text()))
        for step in muri.batches(range(1000)):
            os.kill(os.getpid(), {1: signal.SIGUSR1, 3: signal.SIGTERM}.get(step, 0))
    """)
    assert launcher.ran(None, script, code=STOPPED) == "own handler\n"
    assert "saved at iteration 4" in launcher.err(None)


OWN_LOOP = """
    import os, signal, sys, muri
    state = {"step": 0}
    def load(path):
        state["step"] = int(path.read_text())
    start = muri.checkpoint(lambda path: path.write_text(str(state["step"])), load)
    assert start.iteration == state["step"], (start, state)
    while state["step"] < 20:
        state["step"] += 1
        if state["step"] == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        if muri.should_stop():
            sys.exit(5)
    print("finished", state["step"])
"""


def test_a_loop_without_stages_asks_should_stop(launcher):
    script = launcher.script(OWN_LOOP)
    launcher.ran(None, script, code=5)
    assert launcher.ran(None, script) == "finished 20\n"


FAILING = """
    import os, signal, sys, muri
    broken = sys.argv[1] == "broken"
    def save(path):
        path.mkdir()
        (path / "part").write_text("half")
        if broken:
            raise OSError(28, "No space left on device")
    start = muri.checkpoint(save, lambda path: None, every_iterations=5)
    for step in muri.batches(range(8)):
        if broken and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
    print("reached the end from", start.iteration)
"""


def test_a_failing_save_costs_neither_the_job_nor_the_last_checkpoint(launcher, place):
    script = launcher.script(FAILING)
    launcher.ran(None, script, "sound")
    assert launcher.ran(None, script, "broken") == "reached the end from 0\nreached the end from 5\n"
    assert "no space left" in launcher.err(None)
    assert "The job goes on" in launcher.err(None)
    assert [entry.name for entry in place.iterdir() if entry.is_dir()] == ["iteration-0000000005"]


def test_a_checkpoint_that_cannot_be_loaded_is_a_clear_error_and_stays(launcher, place):
    good = launcher.script("""
        import muri
        muri.checkpoint(lambda path: path.write_text("state"), print, every_iterations=1)
        for step in muri.batches(range(3)): pass
    """)
    bad = launcher.script("import muri\nmuri.checkpoint(print, lambda path: 1 / 0)\n", "bad.py")
    launcher.ran(None, good)
    launcher.ran(None, bad, code=1)
    said = launcher.err(None)
    assert "could not be loaded: ZeroDivisionError: division by zero. Nothing was deleted" in said
    assert (place / "iteration-0000000003" / "state").read_text() == "state"


TWO_RANKS = """
    import os, signal, sys, torch, muri
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    state = torch.zeros(1)
    start = muri.checkpoint(lambda path: torch.save(state, path), lambda path: state.copy_(torch.load(path)))
    for step in muri.batches(range(10**9)):  # the ranks look every half second, on a fast machine rarely
        torch.distributed.all_reduce(state.add_(rank + 1), op=torch.distributed.ReduceOp.MAX)
        if rank == 1 and step == 50 and not start.resumed:
            os.kill(os.getpid(), signal.SIGTERM)
        if start.resumed and step > start.iteration + 10:
            break
    print(f"rank {rank} from {start.iteration}", flush=True)
"""


def test_ranks_stop_and_resume_at_the_same_iteration(launcher, place):
    script = launcher.script(TWO_RANKS)

    def both() -> list[int]:
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        environments = [launcher.environment | port | {"RANK": rank} for rank in "01"]
        ranks = [launcher.start(own["RANK"], [sys.executable, script], own) for own in environments]
        return [ends(rank) for rank in ranks]

    assert both() == [STOPPED, STOPPED], launcher.err("0") + launcher.err("1")
    saved = [[int(entry.name[10:]) for entry in (place / f"rank-{rank}").glob("iter*")] for rank in (0, 1)]
    assert saved[0] == saved[1]
    (iteration,) = saved[0]
    assert both() == [0, 0], launcher.err("0") + launcher.err("1")
    assert [launcher.out(rank) for rank in "01"] == [f"rank {rank} from {iteration}\n" for rank in "01"]


def test_unconnected_ranks_are_refused(launcher):
    script = launcher.script("import muri\nmuri.checkpoint(print, print)\n")
    launcher.ran(None, script, WORLD_SIZE="2", code=1)
    assert "call muri.checkpoint after" in launcher.err(None)


VALIDATES = """
    import time, muri
    training = muri.batches(range(1000))
    print("before", *training.lease, flush=True)
    muri.checkpoint(lambda path: path.write_text("state"), lambda path: None)
    for step in training:
        if step == 3:
            print("training", *training.lease, flush=True)
            validation, seen = muri.batches(range(10000)), 0
            for sample in validation:
                seen += 1
                if seen == 2:
                    print("validating", flush=True)
                if not training.lease.renewed:
                    break
                time.sleep(0.01)
            print("asked", *training.lease, seen < 10000, validation.lease == training.lease, flush=True)
        time.sleep(0.01)
    print("never", flush=True)
"""


def test_a_validation_loop_sees_that_the_lease_is_not_renewed(launcher):
    script = launcher.script(VALIDATES)
    process = launcher.member(None, script)
    until(lambda: "validating" in launcher.out(None), "the validation")
    process.terminate()
    assert ends(process) == STOPPED
    told = launcher.out(None).splitlines()
    assert told == ["before True False", "training True True", "validating", "asked False True True True"]
    assert "saved at iteration " in launcher.err(None)


def test_a_script_without_checkpoint_has_a_lease_that_nobody_ends():
    loop = muri.batches([1, 2])
    assert list(loop) == [1, 2]
    assert loop.lease == (True, False)
