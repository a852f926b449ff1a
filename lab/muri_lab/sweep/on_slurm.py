"""A sweep on a Slurm cluster: one job array, submitted by submitit."""

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError, UsageError
from muri.pythons import THE_LAB
from muri.simulator.metrics import Outcome
from muri.simulator.model import Run
from muri.simulator.run import SweepError, Watch, run_one
from muri.text import yaml_of

_DEFAULTS: Final = {"job_name": "muri-simulate", "time": 240, "cpus_per_task": 1}
"""In submitit's names; `time` is in minutes, and submitit's own default is five."""

_TIME: Final = re.compile(r"[\d:-]*:[\d:-]*")
_POLL_S: Final = 1.0
_QUEUE_EVERY_S: Final = 10.0
_GRACE_S: Final = 30.0  # Time for a result to reach the shared folder after its job has left the queue


def sweep_on_slurm(
    runs: Sequence[Run], at_once: int, words: Iterable[str], folder: Path | None, watch: Watch
) -> tuple[Outcome, ...]:
    """Carry out all runs as a job array and wait for it."""
    logs = (folder or Path.cwd() / "muri-sweep").resolve() / "slurm"
    tasks = _submit(runs, {**_DEFAULTS, **_parameters(words), "array_parallelism": at_once}, logs)
    try:
        _wait(tasks, watch)
        return tuple(_outcome(task, logs) for task in tasks)
    except BaseException:
        for task in tasks:
            task.cancel(check=False)
        raise


def _parameters(words: Iterable[str]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals and text):
            raise UsageError(f"--slurm-option {word!r} must be KEY=VALUE, like partition=cpu")
        # sbatch's own spelling works too; a time like 1:30:00 must stay text.
        parameters[key.removeprefix("--").replace("-", "_")] = text if _TIME.fullmatch(text) else _parsed(word, text)
    return parameters


def _parsed(word: str, text: str) -> Any:
    try:
        return yaml_of(text)
    except ValueError as error:
        raise UsageError(
            f"--slurm-option {word!r}: {text!r} is not a valid value: {' '.join(str(error).split())}"
        ) from error


def _submit(runs: Sequence[Run], parameters: dict[str, Any], logs: Path) -> list[Any]:
    try:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ModuleNotFoundError as error:
        raise UsageError(f"--executor slurm needs submitit: {THE_LAB}") from error
    try:
        executor = submitit.SlurmExecutor(folder=logs)
        executor.update_parameters(**parameters)
    except RuntimeError as error:
        raise UsageError("--executor slurm: there is no Slurm here; leave the option out to run locally") from error
    except (ValueError, TypeError, AttributeError) as error:  # the first lists the valid ones
        raise UsageError(f"--slurm-option: {error}") from error
    try:
        return list(executor.map_array(_answer, runs))
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        raise SweepError(f"Slurm did not take the job array: {error}") from error


def _answer(run: Run) -> Outcome | MuriError:
    """A task's result; errors are results too, so that their messages reach the user."""
    try:
        return run_one(run)
    except MuriError as error:
        return error


def _wait(tasks: Sequence[Any], watch: Watch, clock: Clock = MACHINE_CLOCK) -> None:
    ended: set[int] = set()
    asked_s = gone_s = clock()
    queued = True
    while len(ended) < len(tasks):
        for index in sorted(set(range(len(tasks))) - ended):
            if tasks[index].paths.result_pickle.exists():
                ended.add(index)
                watch(index, 1.0)
        now_s = clock()
        if now_s - asked_s >= _QUEUE_EVERY_S and queued:
            asked_s = gone_s = now_s
            queued = _in_queue(tasks)
        if not queued and now_s - gone_s >= _GRACE_S:
            return  # `_outcome` reports the missing results
        clock.sleep(_POLL_S)


def _in_queue(tasks: Sequence[Any]) -> bool:
    """Whether Slurm still has a task of the array; yes if it does not answer."""
    array = str(tasks[0].job_id).partition("_")[0]
    done = subprocess.run(
        ["squeue", "--noheader", "--format=%i", f"--jobs={array}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return "Invalid job id" not in done.stderr
    return bool(done.stdout.strip())


def _outcome(task: Any, logs: Path) -> Outcome:
    if not task.paths.result_pickle.exists():
        raise SweepError(
            f"job {task.job_id} left the queue without a result (cancelled, out of time or out of memory); "
            f"its output is {task.paths.stderr}"
        )
    try:
        answer = task.result()
    except Exception as error:
        raise SweepError(f"job {task.job_id} failed; its output is in {logs}: {error}") from error
    if isinstance(answer, MuriError):
        raise answer
    if not isinstance(answer, Outcome):
        raise SweepError(f"job {task.job_id} gave {type(answer).__name__} instead of an outcome")
    return answer
