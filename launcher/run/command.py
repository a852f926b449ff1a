"""The command `muri run`: it is `python script.py`, which in a group attaches to the runtime first."""

import contextlib
import ctypes
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import click

from muri import inherited
from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError, UsageError
from muri.files import PRIVATE_FILE, atomic_json
from muri.launcher.job.environment import DURATIONS_S, missing_variables, run_of, seconds_of, task_of, wait_for_end
from muri.launcher.job.scheduler import Membership, load_membership
from muri.launcher.job.script import NAMELESS
from muri.launcher.process_gate import is_gated
from muri.launcher.protocol import ISOLATION_VARIABLE, PILOT_VARIABLE, AttachRequest
from muri.launcher.run.client import (
    NoMemberError,
    NoTurnsError,
    RuntimeLostError,
    attach,
    await_earlier_run,
    require_no_group,
    wait_for_runtime,
)
from muri.launcher.script import script_clock, solo
from muri.launcher.script.hooks import AUTOMATIC_VARIABLE
from muri.launcher.script.trace import require_writable
from muri.profiler.dryrun.messages import DRY_RUN_VARIABLE, DryRunRequest
from muri.pythons import PYTHON_VARIABLE, ScriptPython, script_python, with_library
from muri.text import json_of

REQUEUE_DELAYS_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
_PR_SET_PDEATHSIG: Final = 1
_REFUSED: Final = {
    "E": "Muri reaches a script's Python through PYTHONPATH",
    "I": "Muri reaches a script's Python through PYTHONPATH",
    "S": "Muri is among the packages that it leaves out",
    "i": "a job has no terminal",
    "x": "it is for scripts of DOS",
}
_PYTHON: Final = re.compile(r"python(\d+(\.\d+t?)?)?")

FLAGS: Final = "bBdOPqRsuv"
VALUED: Final = "WX"
"""Python's options that scripts may have, without and with a value."""

EPILOG = """
\b
Examples:
  muri run train.py --lr 0.1          as python train.py --lr 0.1
  muri run -m my.training --epochs 3  as python -m my.training --epochs 3
  muri run python -u train.py         the same as muri run -u train.py
  muri run torchrun train.py          a Python program of PATH
  muri run --timing train.py          stage times on stderr at the end
  muri run --trace t.json train.py    every stage, for ui.perfetto.dev

Everything after SCRIPT belongs to the script. Stages of PyTorch scripts are found by
themselves; muri.stage("load"), "preprocess", "propagate", "synchronize" and
muri.batches(loader) mark them by hand.
"""


class _AsPython(click.Command):
    """A command whose line is Python's, with options of its own before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the line; click reads the command's own options."""
        if ctx.resilient_parsing:  # a shell asks for completions: the line is not whole yet
            return super().parse_args(ctx, [])
        own = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        valued = {name for option in own if not option.is_flag for name in option.opts}
        try:
            line = read_line(args, valued, {name for option in own for name in option.opts} - valued)
        except click.NoSuchOption as error:
            error.ctx = ctx
            raise
        super().parse_args(ctx, list(line.own))
        if not line.target:
            raise click.UsageError("Missing argument 'SCRIPT'.", ctx)
        ctx.params["line"] = line
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Say what follows the options."""
        return [*super().collect_usage_pieces(ctx), "[-m MODULE | -c CODE | - | SCRIPT]", "[ARGUMENTS]..."]


@click.command(cls=_AsPython, epilog=EPILOG)
@click.option("--no-attach", is_flag=True, help="Run alone even when the group's runtime is there.")
@click.option(
    "--isolation",
    type=click.Choice(["thread", "process"]),
    envvar=ISOLATION_VARIABLE,
    help="process: never a thread of its group's runtime; thread: as the scheduler planned (or set MURI_ISOLATION).",
)
@click.option("--no-automatic", is_flag=True, help="Only stages that the script marks (or set MURI_AUTOMATIC=0).")
@click.option("--timing", is_flag=True, help="Print stage times on stderr at the end (or set MURI_TIMING=1).")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a trace of all stages to FILE, for Perfetto.")
def run(
    no_attach: bool, isolation: str | None, no_automatic: bool, timing: bool, trace: str | None, line: "PythonLine"
) -> int:
    """Run a training script; inside a group, interleave it with its partners.

    Alone this is `python SCRIPT …`. Before SCRIPT may stand `python` itself and its options -b -B -d -O -P -q -R -s -u
    -v -W -X; SCRIPT may be a Python program of PATH, such as torchrun. When the job is a member of a Muri group, the
    script takes turns with its partners on the group's GPUs; everything else is as alone.
    """
    for name in DURATIONS_S:
        seconds_of(os.environ, name)  # refuse a malformed value now rather than overlook it later
    if isolation is not None:
        os.environ[ISOLATION_VARIABLE] = isolation
    if no_automatic:
        os.environ[AUTOMATIC_VARIABLE] = "0"
    if timing:
        os.environ[script_clock.TIMING_VARIABLE] = "1"
    if trace is not None:
        os.environ[script_clock.TRACE_VARIABLE] = str(Path(trace).absolute())
    require_writable(os.environ.get(script_clock.TRACE_VARIABLE, ""))
    if line.python and (os.sep in line.python or (not os.environ.get(PYTHON_VARIABLE) and shutil.which(line.python))):
        os.environ[PYTHON_VARIABLE] = line.python
    python, job_id = script_python(os.environ), os.environ.get("SLURM_JOB_ID")
    if job_id and not no_attach and not os.environ.get(DRY_RUN_VARIABLE):
        code = _run_in_group(job_id, python, line)
        if code is not None:
            return code
    return _run_here(python, line)


def _run_here(python: ScriptPython, line: "PythonLine") -> int:
    """Run the script in this job: alone, or in turns with the members of a group."""
    hooks, tells_end = solo.wants_stages(os.environ), task_of(os.environ)[1] > 1 or is_gated(os.environ)
    if hooks and python.why_too_old:
        raise UsageError(python.why_too_old)
    runner = solo.RUNNER if hooks or (tells_end and not python.why_too_old) else ()
    module = ["-m"] if line.module else []
    command = [python.executable, *line.options, *runner, *module, line.target, *line.arguments]
    request = DryRunRequest.from_environment(os.environ)
    os.environ.update(missing_variables(os.environ))
    if not python.is_own:
        os.environ.update(with_library(os.environ))
    if request is None:
        sys.stdout.flush()
        sys.stderr.flush()
        inherited.give_back()
        os.execv(python.executable, command)  # this process becomes the script's
    return _supervise(command, request, python)


def _run_in_group(job_id: str, python: ScriptPython, line: "PythonLine") -> int | None:
    """Return the exit code of the script as a thread of the group's runtime; None when it is to run here."""
    pilot = os.environ.get(PILOT_VARIABLE, "")
    membership = functools.cache(load_membership)
    try:
        if run_of(os.environ):
            await_earlier_run(os.environ, job_id)
        if pilot.isdecimal():
            return _attach(job_id, pilot, python, line, membership)
        if may_be_member(os.environ):
            require_no_group(job_id, membership())
    except RuntimeLostError as error:
        give_up(job_id, error, membership)
    return None


def _attach(
    job_id: str, pilot: str, python: ScriptPython, line: "PythonLine", membership: Callable[[], Membership]
) -> int | None:
    """Attach to the pilot job's runtime; a script that cannot take turns shares the GPUs without them."""
    if python.why_too_old:
        _share_plainly(python.why_too_old)
        return None
    try:
        answer = attach(wait_for_runtime(os.environ, pilot, membership), build_request(job_id, line, python))
    except NoTurnsError as error:
        _share_plainly(str(error))
        return None
    except NoMemberError:
        require_no_group(job_id, membership())  # the variable may come from another job's environment
        return None
    if isinstance(answer, int):
        return answer
    os.environ.update(answer)
    return None


def _share_plainly(why: str) -> None:
    click.echo(f"muri: {why}; this script shares the GPU without turns", err=True)


def build_request(job_id: str, line: "PythonLine", python: ScriptPython) -> AttachRequest:
    """Describe this process, and the Python of its script, so that the runtime can run the script in its place."""
    umask = os.umask(0o077)
    os.umask(umask)
    return AttachRequest(
        job_id=job_id,
        target=line.target,
        module=line.module,
        arguments=line.arguments,
        options=line.options,
        cwd=inherited.working_directory(),
        environment={**(os.environ if python.is_own else with_library(os.environ)), **missing_variables(os.environ)},
        umask=umask,
        executable=python.executable,
        prefix=python.prefix,
        python=python.version,
        blocked=inherited.blocked(),
        ignored=inherited.ignored(),
    )


def may_be_member(environment: Mapping[str, str]) -> bool:
    """Return whether a job may be a member whose runtime has not come yet: a member sees no GPUs."""
    if not environment.get("MURI_JOB"):
        return False
    seen = [environment.get(name) for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES")]
    return all(value in {None, "", "NoDevFiles", "-1"} for value in seen)


def give_up(
    job_id: str, error: RuntimeLostError, membership: Callable[[], Membership], clock: Clock = MACHINE_CLOCK
) -> NoReturn:
    """Requeue the job and wait to be ended: the script must neither end as if done nor run twice."""
    click.echo(f"muri: {error}; requeueing job {job_id}", err=True)
    for delay_s in (*REQUEUE_DELAYS_S, None):
        try:
            membership().requeue(job_id, str(error))
            break
        except MuriError as failure:
            if delay_s is None or not getattr(failure, "worth_retrying", True):
                raise RuntimeLostError(f"{error}; and the job could not be requeued: {failure}") from failure
            clock.sleep(delay_s)
    wait_for_end(os.environ, clock)
    raise RuntimeLostError(f"{error}; job {job_id} was requeued but this process was not ended") from error


@dataclass(frozen=True)
class PythonLine:
    """A command line."""

    own: tuple[str, ...]  # the options of `muri run` itself
    options: tuple[str, ...]  # Python's options, as Python takes them
    module: bool  # whether `target` is a module
    target: str  # a script, a module, or one of `NAMELESS`
    arguments: tuple[str, ...]
    python: str = ""  # the Python that the line or its console script names


def read_line(words: Sequence[str], valued: Collection[str], flags: Collection[str]) -> PythonLine:
    """Take a command line apart; `valued` and `flags` are the long options of `muri run` with and without a value."""
    rest = list(words)
    own = _taken(rest, valued, flags)
    ends = rest[:1] == ["--"]
    del rest[:ends]
    python = rest.pop(0) if rest and not ends and _is_python(rest[0]) else ""
    options: list[str] = []
    while rest and not ends and rest[0].startswith("-") and rest[0] not in NAMELESS:
        word = rest.pop(0)
        if word.startswith("--"):
            raise click.NoSuchOption(word, f"Option {word} must stand before Python's own.")
        more, end = _options_of(word, rest)
        options += more
        if end:
            module, target = (True, rest.pop(0)) if end == "-m" else (False, end)
            return PythonLine(own, tuple(options), module, target, tuple(rest), python)
    if not rest:
        return PythonLine(own, tuple(options), False, "", (), python)
    target, its_python = (rest[0], "") if rest[0] in NAMELESS else _script(rest[0])
    return PythonLine(own, tuple(options), False, target, tuple(rest[1:]), python or its_python)


def _taken(rest: list[str], valued: Collection[str], flags: Collection[str]) -> tuple[str, ...]:
    """Take the options of `muri run` from the front of a line."""
    own: list[str] = []
    while rest and (rest[0] in flags or (rest[0].startswith("--") and rest[0] != "--")):
        name, has_value, _ = rest[0].partition("=")
        if name not in {*valued, *flags}:
            raise click.NoSuchOption(name, possibilities=sorted({*valued, *flags}))
        width = 2 if name in valued and not has_value else 1
        own += rest[:width]
        del rest[:width]
    return tuple(own)


def _options_of(word: str, rest: list[str]) -> tuple[list[str], str]:
    """Read a word of one-letter options, and a value after it; return the options, and "-c" or "-m" as their end."""
    options: list[str] = []
    for place, letter in enumerate(word[1:], start=2):
        if letter in _REFUSED:
            raise click.UsageError(f"muri run takes no -{letter}: {_REFUSED[letter]}")
        if letter in VALUED or letter in "cm":
            if not word[place:] and not rest:
                raise click.BadOptionUsage(letter, f"Option '-{letter}' requires an argument.")
            value = word[place:] or rest.pop(0)
            if letter in "cm":
                rest.insert(0, value)
                return options, f"-{letter}"
            return [*options, f"-{letter}", value], ""
        if letter not in FLAGS:
            raise click.NoSuchOption(f"-{letter}")
        options.append(f"-{letter}")
    return options, ""


def _is_python(word: str) -> bool:
    """Return whether a word calls a Python, and is not a folder that holds a script."""
    known = shutil.which(word) is not None or os.sep not in word
    return bool(_PYTHON.fullmatch(Path(word).name)) and known and not Path(word, "__main__.py").exists()


def _script(word: str) -> tuple[str, str]:
    """Return the path of a script, and its Python if it is a program of PATH."""
    if word.endswith(".ipynb"):
        raise UsageError(f"{word} is a notebook; make a script of it first: jupyter nbconvert --to script {word}")
    is_script = Path(word).exists() and (not Path(word).is_dir() or Path(word, "__main__.py").exists())
    program = None if is_script or os.sep in word else shutil.which(word)
    if program is not None:
        python = _interpreter(Path(program))
        if not python:
            raise UsageError(
                f"{program} is not a Python program; call it without `muri run`, which runs Python scripts"
            )
        return program, python
    if not Path(word).exists():
        raise UsageError(f"there is no script {word}; give its path, or -m and the name of a module")
    return word, ""


def _interpreter(program: Path) -> str:
    """Return the Python that the first lines of a program name, "" when they name none."""
    with program.open("rb") as file:
        first, second = (os.fsdecode(file.readline(4096)).strip() for _ in range(2))
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    elif words and Path(words[0]).name == "sh" and second.startswith("'''exec'"):  # pip's form where a path is long
        words = shlex.split(second.replace("'''exec'", ""))
    named = words[0] if words else ""
    return named if _PYTHON.fullmatch(Path(named).name) else ""


def _supervise(command: Sequence[str], request: DryRunRequest, python: ScriptPython) -> int:
    """Run the script under measurement; returns its exit code, or 128 + the signal that ended it.

    The script's own process measures, writes its result and ends. This process adds the resources that it and its
    subprocesses used. When the script ends without a result, this process writes one that says why.
    """
    if task_of(os.environ)[0] != 0:  # the first of several ranks measures and answers for all
        with _started(command, {}) as process:
            return _exit_code(process.wait())
    from muri.profiler.usage import Sampler, with_usage

    inner = request.for_script()
    for path in (request.result_path, inner.result_path, request.progress_path):
        path.unlink(missing_ok=True)
    with _started(command, inner.environment()) as process, Sampler(process.pid) as sampler:
        code = process.wait()
        usage = sampler.stop()
    request.progress_path.unlink(missing_ok=True)
    result = _take(inner.result_path)
    if result is None:
        result = {"error": _why_no_result(code)}
    elif "error" in result and code > 0:
        result = {"error": f"the script failed with exit code {code}: {result['error']}"}
    else:
        result = with_usage(result, usage)
    result["python"] = {"executable": python.executable, "prefix": python.prefix}
    atomic_json(request.result_path, result, PRIVATE_FILE)
    return _exit_code(code)


@contextlib.contextmanager
def _started(command: Sequence[str], variables: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the script's process; it receives the signals that would end this one, and does not outlive this one."""
    libc, environment = ctypes.CDLL(None), {**os.environ, **variables}

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with this process
        inherited.give_back()

    with subprocess.Popen(command, preexec_fn=prepare, env=environment) as process:  # noqa: PLW1509 (one thread)

        def forward(signum: int, _frame: FrameType | None) -> None:
            process.send_signal(signum)

        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in signals:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        yield process


def _take(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json_of(path.read_text()))
    except FileNotFoundError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _exit_code(code: int) -> int:
    sys.stdout.flush()
    return code if code >= 0 else 128 - code


def _why_no_result(code: int) -> str:
    if code < 0:
        return f"the script was ended by {signal.Signals(-code).name} before the dry run was done"
    ending = "ended" if code == 0 else f"failed with exit code {code}"
    return (
        f"the script {ending}, no stages marked: it never called muri.stage or muri.batches, and automatic stages"
        " saw no loader, module, backward or optimizer of PyTorch (docs/scripts.md)"
    )
