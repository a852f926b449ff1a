"""A script that runs out of GPU memory beside others is offered back to the scheduler; one alone just fails."""

from textwrap import dedent

import pytest
from launcher_harness import Launcher, ends
from polling import until
from requeue_client import SLEEPER, member

from muri.launcher.job.script import is_out_of_memory

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
    from muri.launcher.job.scheduler import Membership

    class Recorder(Membership):
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
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."), True),
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


DEALS = HUNGRY.replace('raise ValueError("training failed") from error', "raise SystemExit(0)")


@pytest.mark.parametrize(
    ("isolation", "script", "beside", "answer", "asked"),
    [
        ("thread", HUNGRY, True, True, True),
        ("thread", HUNGRY, True, False, True),
        ("process", HUNGRY, True, True, True),
        ("thread", DEALS, True, True, False),
        ("thread", HUNGRY, False, True, False),
    ],
    ids=["beside another", "with no for an answer", "in a process", "that dealt with it", "alone"],
)
def test_beside_others_the_scheduler_is_asked_for_a_script_that_fails(
    launcher: Launcher, isolation: str, script: str, beside: bool, answer: bool, asked: bool
) -> None:
    launcher.runtime("1", "2", options=("--isolation", isolation))
    others = [member(launcher, "2", launcher.script(SLEEPER, "sleeper.py"))] if beside else []
    until(lambda: not beside or "started" in launcher.out("2"), "the partner's script")
    code = SCHEDULER.replace("ANSWER", repr(answer))
    assert ends(member(launcher, "1", launcher.script(script, "hungry.py"), code=code)) == (script is HUNGRY)
    assert (launcher.folder / "asked").exists() == asked
    assert ("CUDA out of memory" in launcher.err("1")) == (script is HUNGRY)
    assert [other.poll() for other in others] == [None] * beside


def test_the_second_of_two_scripts_that_run_out_of_memory_together_was_not_alone_either(launcher: Launcher) -> None:
    launcher.runtime("1", "2", options=("--isolation", "process"))
    waits = 'import os, time\nprint("started", flush=True)\nwhile not os.path.exists("go"): time.sleep(0.01)\n'
    code = SCHEDULER.replace("ANSWER", "True")
    second = member(launcher, "2", launcher.script(waits + dedent(HUNGRY), "second.py"), code=code)
    launcher.says("2")
    assert ends(member(launcher, "1", launcher.script(HUNGRY, "first.py"), code=code)) == 1
    (launcher.folder / "go").touch()
    assert ends(second) == 1
    assert (launcher.folder / "asked").read_text() == "12"
