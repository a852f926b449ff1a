"""A script that runs out of GPU memory beside others is offered back to the scheduler; one alone just fails."""

import signal
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from launcher_harness import Launcher, Process, ends
from polling import until
from requeue_client import SLEEPER, member

from muri.launcher.job import scheduler
from muri.launcher.job.scheduler import DONE, NOT_DONE
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

PYTHON = """#!{python}
import os, sys
open("asked", "a").write(" ".join([*sys.argv[6:], "\\n"]))
print({code})
sys.exit({code})
"""
"""Stands in for Muri's own Python, which a script's process lets speak to Slurm."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."), True),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with"), True),
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
    ("script", "beside", "answer", "asked"),
    [(HUNGRY, True, True, True), (HUNGRY, True, False, True), (DEALS, True, True, False), (HUNGRY, False, True, False)],
    ids=["beside another", "with no for an answer", "that dealt with it", "alone"],
)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_beside_others_the_scheduler_is_asked_for_a_script_that_fails(
    launcher: Launcher, isolation: str, script: str, beside: bool, answer: bool, asked: bool
) -> None:
    launcher.runtime("1", "2", options=("--isolation", isolation))
    others = [member(launcher, "2", launcher.script(SLEEPER, "sleeper.py"))] if beside else []
    until(lambda: not beside or "started" in launcher.out("2"), "the partner's script")
    assert ends(hungry(launcher, "1", script, answer=answer)) == (script is HUNGRY)
    assert (launcher.folder / "asked").exists() == asked
    if asked:
        assert (launcher.folder / "asked").read_text() == "requeue-for-memory 1 4 \n"
    assert ("CUDA out of memory" in launcher.err("1")) == (script is HUNGRY)
    assert [other.poll() for other in others] == [None] * beside


def hungry(launcher: Launcher, job_id: str, script: str, *, answer: bool, **more: str) -> Process:
    """Start a member; the scheduler, asked to requeue its job, gives this answer."""
    python = launcher.folder / "own-python"
    python.write_text(PYTHON.format(python=sys.executable, code=DONE if answer else NOT_DONE))
    python.chmod(0o755)
    variables = {"MURI_OWN_PYTHON": str(python), "SLURM_RESTART_COUNT": "4", **more}
    return member(launcher, job_id, launcher.script(script, f"hungry-{job_id}.py"), **variables)


def test_a_process_that_waits_to_be_ended_after_that_heeds_no_handler_of_the_script(launcher: Launcher) -> None:
    launcher.runtime("1", "2", options=("--isolation", "process"))
    member(launcher, "2", launcher.script(SLEEPER, "sleeper.py"))
    launcher.says("2")
    handler = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
    waits = hungry(launcher, "1", handler + dedent(HUNGRY), answer=True, MURI_REQUEUE_WAIT_S="600")
    until((launcher.folder / "asked").exists, "its question")
    until(lambda: "sleep" in wchan(waits.pid), "its wait")
    waits.terminate()
    assert ends(waits) == -signal.SIGTERM


@pytest.mark.parametrize(("requeued", "code"), [(True, DONE), (False, NOT_DONE)])
def test_muris_own_python_answers_whether_the_job_may_try_again(
    monkeypatch: pytest.MonkeyPatch, requeued: bool, code: int
) -> None:
    asked: list[str] = []

    class Recorder:
        def requeue_for_memory(self, job_id: str) -> bool:
            asked.append(job_id)
            return requeued

    monkeypatch.setattr(scheduler, "load_membership", Recorder)
    assert scheduler.answer([scheduler.REQUEUE_FOR_MEMORY, "101", "4"]) == code
    assert asked == ["101"]


def wchan(pid: int) -> str:
    """Where in the kernel a process waits."""
    return Path(f"/proc/{pid}/wchan").read_text()


def test_a_scheduler_that_refuses_is_told_and_the_script_fails_as_alone(launcher: Launcher) -> None:
    launcher.runtime("1", "2", options=("--isolation", "process"))
    member(launcher, "2", launcher.script(SLEEPER, "sleeper.py"))
    launcher.says("2")
    script = launcher.script(HUNGRY, "hungry.py")
    assert ends(member(launcher, "1", script, MURI_OWN_PYTHON="/bin/false")) == 1
    assert "ran out of GPU memory while others shared its GPU, and the job could not be requeued" in launcher.err("1")


def test_the_second_of_two_scripts_that_run_out_of_memory_together_was_not_alone_either(launcher: Launcher) -> None:
    launcher.runtime("1", "2", options=("--isolation", "process"))
    waits = 'import os, time\nprint("started", flush=True)\nwhile not os.path.exists("go"): time.sleep(0.01)\n'
    second = hungry(launcher, "2", waits + dedent(HUNGRY), answer=True)
    launcher.says("2")
    assert ends(hungry(launcher, "1", HUNGRY, answer=True)) == 1
    (launcher.folder / "go").touch()
    assert ends(second) == 1
    assert (launcher.folder / "asked").read_text() == "requeue-for-memory 1 4 \nrequeue-for-memory 2 4 \n"
