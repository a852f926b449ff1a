"""Start `sandbox.init` in fresh namespaces, and run commands in a namespace that is up."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from sandbox import host
from sandbox.init import Plan, Report
from sandbox.support import CHECKOUT, StartError

_UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork")


def _init_command(plan_file: Path) -> list[str]:
    return [str(host.python_executable()), "-m", "sandbox.init", str(plan_file)]


def _init_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}


def _write_plan(plan: Plan, plan_file: Path) -> None:
    plan_file.touch(mode=0o600)  # it holds the cluster's key
    plan_file.write_text(json.dumps(plan.to_dict(), indent=1), encoding="utf-8")


@contextlib.contextmanager
def contained(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[IO[str]]:
    """Run a command in namespaces of its own, giving its output; nothing of it outlives this block.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    # Whatever way this process dies, the kernel kills unshare, and unshare its whole pid namespace.
    full = ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, "--kill-child", *command]
    with subprocess.Popen(
        full, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout
            returncode = process.wait()
        finally:
            process.kill()
    if returncode != 0:
        raise subprocess.CalledProcessError(returncode, command)


@contextlib.contextmanager
def run_plan(plan: Plan, plan_file: Path) -> Iterator[IO[str]]:
    """Run the plan's command in a root of its own that vanishes afterwards, giving its output."""
    _write_plan(plan, plan_file)
    with contained(_init_command(plan_file), _init_environment()) as output:
        yield output


def start_plan(plan: Plan, plan_file: Path, log_file: Path) -> Report:
    """Start a root that stays, and those of its hosts.

    Raises:
        StartError: The root could not be made; the text holds what was printed.
    """
    read_end, write_end = os.pipe()
    _write_plan(replace(plan, report_fd=write_end), plan_file)
    network = ["--net"] if plan.private_network else []
    with log_file.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*_UNSHARE, "--kill-child", *network, *_init_command(plan_file)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_init_environment(),
            pass_fds=(write_end,), start_new_session=True,
        )  # fmt: skip
    os.close(write_end)
    try:
        with os.fdopen(read_end) as report:
            answer = report.readline().strip()  # unshare keeps its end open
    except BaseException:
        process.kill()
        process.wait()
        raise
    if not answer:
        process.wait()
        raise StartError(f"the sandbox's root could not be made:\n{log_file.read_text(errors='replace').strip()}")
    return Report.from_line(answer)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, so that a reused id is noticed."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def end(pid: int, ticks: int, deadline_s: float = 20.0) -> None:
    """Kill a namespace's first process, and so everything in it, and wait until it is gone."""
    if start_ticks(pid) != ticks:
        return
    parent = _parent(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    limit = time.monotonic() + deadline_s
    while start_ticks(pid) == ticks or (parent and _is_unshare(parent)):
        if time.monotonic() > limit:
            raise StartError(f"process {pid} of the sandbox does not end after SIGKILL; see `ps -p {pid}`")
        _collect(parent)
        time.sleep(0.02)


def end_strays(plan_file: Path) -> None:
    """Kill what runs this plan without being recorded, because `up` itself was killed."""
    wanted = ["sandbox.init", str(plan_file)]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (entry / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
            ticks = start_ticks(int(entry.name))
            if words[-3:-1] == wanted and words[0] != "unshare" and ticks is not None:
                end(int(entry.name), ticks)


def _parent(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    parent = int(text.rpartition(")")[2].split()[1])
    return parent if _is_unshare(parent) else None


def _is_unshare(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return start_ticks(pid) is not None and Path(f"/proc/{pid}/comm").read_text().strip() == "unshare"
    return False


def _collect(pid: int | None) -> None:
    if pid:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def enter_command(pid: int, user: str, command: list[str], environment: Mapping[str, str],
                  working_directory: str) -> list[str]:  # fmt: skip
    """Return the command line that runs `command` in the namespace of `pid` as `user`."""
    variables = [f"{name}={value}" for name, value in sorted(environment.items())]
    identity = ["--reuid", user, "--regid", user, "--init-groups"] if user != "root" else []
    return [
        "nsenter", "--target", str(pid), "--mount", "--pid", "--ipc", "--uts", "--net", "--cgroup",
        f"--wdns={working_directory}",
        # If nsenter is killed, the command inside gets a SIGTERM instead of living on unseen.
        "/usr/bin/setpriv", "--pdeathsig", "TERM", *identity,
        "/usr/bin/env", "-i", *variables, *command,
    ]  # fmt: skip
