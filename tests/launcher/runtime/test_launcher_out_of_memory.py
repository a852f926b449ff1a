"""A script that runs out of GPU memory beside others is offered back to the scheduler; one alone just fails."""

import pytest
from launcher_harness import Launcher, ends
from polling import until
from requeue_client import SLEEPER, member

from muri.launcher.job.out_of_memory import is_out_of_memory

# Stands in for torch.OutOfMemoryError, which is raised by a GPU only.
HUNGRY = """
    class OutOfMemoryError(RuntimeError):
        pass

    try:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    except OutOfMemoryError as error:
        raise ValueError("training failed") from error
"""

SCHEDULER = """
    import os, sys
    from muri.commands import run_command
    from muri.launcher.run import command
    from muri.launcher.job.scheduler import NoMembership

    class Recorder(NoMembership):
        def requeue_for_memory(self, job_id):
            with open("asked", "a") as file:
                file.write(job_id)
            return ANSWER

    command.load_membership = Recorder
    sys.exit(run_command(command.run))
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError("out of memory"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_words_of_cuda(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    later = ValueError("training failed")
    later.__cause__ = error
    assert is_out_of_memory(later) is expected


@pytest.mark.parametrize(("isolation", "answer"), [("thread", True), ("thread", False), ("process", True)])
def test_beside_others_the_scheduler_is_asked(launcher: Launcher, isolation: str, answer: bool) -> None:
    launcher.runtime("1", "2", options=("--isolation", isolation))
    beside = member(launcher, "2", launcher.script(SLEEPER, "sleeper.py"))
    until(lambda: "started" in launcher.out("2"), "the partner's script")
    code = SCHEDULER.replace("ANSWER", repr(answer))
    hungry = member(launcher, "1", launcher.script(HUNGRY, "hungry.py"), code=code)
    assert ends(hungry) == 1
    assert (launcher.folder / "asked").read_text() == "1"
    assert "CUDA out of memory" in launcher.err("1")
    assert beside.poll() is None


def test_a_script_that_dealt_with_it_has_ended_as_it_says(launcher: Launcher) -> None:
    launcher.runtime("1", "2", options=("--isolation", "thread"))
    beside = member(launcher, "2", launcher.script(SLEEPER, "sleeper.py"))
    until(lambda: "started" in launcher.out("2"), "the partner's script")
    handled = HUNGRY.replace('raise ValueError("training failed") from error', "raise SystemExit(0)")
    code = SCHEDULER.replace("ANSWER", "True")
    assert ends(member(launcher, "1", launcher.script(handled, "handled.py"), code=code)) == 0
    assert not (launcher.folder / "asked").exists()
    assert beside.poll() is None


def test_alone_it_fails_as_ever(launcher: Launcher) -> None:
    launcher.threads("1", "2")
    code = SCHEDULER.replace("ANSWER", "True")
    assert ends(member(launcher, "1", launcher.script(HUNGRY, "hungry.py"), code=code)) == 1
    assert not (launcher.folder / "asked").exists()
