"""Jobs' processes in real cgroups, laid out as Slurm does, and the program that ends them."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from polling import until

from sandbox.init import HIERARCHIES

#: Tests at the same time, and sandboxes, have nodes of other names: what belongs to no cgroup is sought everywhere.
NODE = f"n{os.getpid()}"
USER = 65534

#: A process forks a child and ends, again and again: killing one after the other hardly ever meets it.
COMET = "import os\nprint(flush=True)\nwhile True:\n    if os.fork(): os._exit(0)"
STUBBORN = "trap '' TERM; echo; while :; do sleep 0.05; done"


def refusal(version: str) -> str:
    """Return why this machine cannot have a job's cgroups, "" if it can."""
    if os.geteuid() != 0:
        return "only root makes cgroups"
    missing = [name for name in HIERARCHIES[version] if not os.access(f"/sys/fs/cgroup/{name}/cgroup.procs", os.W_OK)]
    return f"no cgroups {', '.join(missing)} are mounted here" if missing else ""


class JobCgroup:
    """A job's cgroup and its processes."""

    def __init__(self, version: str, name: str, scratch: Path) -> None:
        self.roots = [Path("/sys/fs/cgroup", each, name, "uid_1", "job_7") for each in HIERARCHIES[version]]
        self.path = self.roots[0]
        self._scratch = scratch
        self._started: list[subprocess.Popen[str]] = []
        if version == "v1":
            self.stepd_in, self.task_in = "step_batch", "step_batch/task_0"
        else:
            self.stepd_in, self.task_in = "step_batch/slurm", "step_batch/user/task_0"
        for root in self.roots:
            for below in (self.stepd_in, self.task_in):
                (root / below).mkdir(parents=True, exist_ok=True)

    def start(self, *command: str, into: str | None = None, user: int | None = USER) -> subprocess.Popen[str]:
        """Start a process in the task's cgroup, or another one below the job's, and wait until it has said a line."""
        groups = [root / (self.task_in if into is None else into) for root in self.roots]
        if len(groups) > 1 and into is None:
            groups[1] = self.roots[1] / "step_batch"  # Slurm makes no tasks in the freezer's hierarchy

        enter = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"'
        become = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        line = ["sh", "-c", enter, "sh", *map(str, groups), "--", *become, *command]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def stepd(self, code: str = "", into: str | None = None, user: int | None = None) -> subprocess.Popen[str]:
        """Start what looks like Slurm's own process; `code` is shell that runs in it."""
        program = self._scratch / "slurmstepd"
        if not program.exists():
            shutil.copy("/bin/bash", program)
            program.chmod(0o755)
        script = f"{code} echo; kill -STOP $$"
        return self.start(str(program), "-c", script, into=self.stepd_in if into is None else into, user=user)

    def python(self, code: str, **options: str) -> subprocess.Popen[str]:
        """Start Python in the job."""
        return self.start(sys.executable, "-c", code, **options)

    def pids(self) -> set[int]:
        """All processes below the job, in every hierarchy."""
        files = (file for root in self.roots for file in root.rglob("cgroup.procs"))
        return {int(pid) for file in files for pid in file.read_text().split()}

    def remove(self) -> None:
        """Kill what is left and remove the cgroups."""

        def emptied() -> bool:
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not self.pids()

        until(emptied, "the end of all processes")
        for process in self._started:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for root in self.roots:
            top = root.parent.parent
            for directory in sorted((each for each in top.rglob("*") if each.is_dir()), reverse=True):
                until(partial(removed, directory), f"the removal of {directory}")
            until(partial(removed, top), f"the removal of {top}")


def removed(directory: Path) -> bool:
    """Remove a cgroup; the kernel may need a moment for its last process."""
    with suppress(OSError):
        directory.rmdir()
    return not directory.exists()


@contextmanager
def job_cgroup(version: str, scratch: Path) -> Iterator[JobCgroup]:
    """Give a job's cgroup in a hierarchy of this version."""
    group = JobCgroup(version, f"muri-test-{os.getpid()}", scratch)
    try:
        yield group
    finally:
        group.remove()
