"""A script asks the scheduler, and its user reads the answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muri.launcher.job import scheduler

SAYS = """
import sys
print("muri: the job goes back to the queue", file=sys.stderr, flush=True)
open({fifo!r}).read()
print(0)
"""
ASKS = """
from muri.launcher.job import scheduler
scheduler.own_command = lambda environment, module: {command!r}
print(scheduler.ask_slurm(scheduler.REQUEUE_FOR_MEMORY, "7", 0))
"""


def test_a_user_reads_why_before_slurm_may_end_the_script(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", SAYS.format(fifo=str(fifo))]
    line = [sys.executable, "-c", ASKS.format(command=command)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert process.stderr.readline() == "muri: the job goes back to the queue\n"  # while the call still waits
        fifo.write_text("")
        assert process.communicate() == ("True\n", "")


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        pytest.param(
            "import sys; print('slurmctld is away', file=sys.stderr); print(1)", "slurmctld is away", id="said"
        ),
        pytest.param("import sys; sys.exit(9)", "exit code 9", id="silent"),
    ],
)
def test_a_call_that_failed_says_why(monkeypatch: pytest.MonkeyPatch, program: str, complaint: str) -> None:
    monkeypatch.setattr(scheduler, "own_command", lambda _environment, _module: [sys.executable, "-c", program])
    with pytest.raises(scheduler.SchedulerCallError, match=complaint):
        scheduler.ask_slurm(scheduler.DECLARE_CHECKPOINT, "7", 0)
