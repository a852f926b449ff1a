"""A job's lease: renewed until it is asked to stop, which its loops see."""

import signal

from launcher_harness import Launcher, ends
from polling import until

import muri

STOPPED = 128 + signal.SIGTERM

SCRIPT = """
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


def test_a_validation_loop_sees_that_the_lease_is_not_renewed(launcher: Launcher) -> None:
    script = launcher.script(SCRIPT)
    process = launcher.member(None, script, MURI_CHECKPOINT_DIR=str(launcher.folder / "c"))
    until(lambda: "validating" in launcher.out(None), "the validation")
    process.terminate()
    assert ends(process) == STOPPED
    told = launcher.out(None).splitlines()
    assert told == ["before True False", "training True True", "validating", "asked False True True True"]
    assert "saved at iteration " in launcher.err(None)


def test_a_script_without_checkpoint_has_a_lease_that_nobody_ends() -> None:
    loop = muri.batches([1, 2])
    assert list(loop) == [1, 2]
    assert loop.lease == (True, False)
