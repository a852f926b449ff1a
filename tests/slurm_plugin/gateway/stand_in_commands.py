"""Stand-ins for Slurm's commands, which write down how they were called."""

import json
import stat
import sys
from pathlib import Path

CONFIG = "ClusterName = invented\nStateSaveLocation = /nowhere\nSLURM_VERSION = {version}\n"


STAND_IN = """#!{python} -IS
import json, os, sys
of_job = sys.argv if "{name}" == "sbatch" else []
fds = [int(argument.split("=")[1]) for argument in of_job if argument.startswith("--export-file")]
files = [open(fd, "rb").read().decode() for fd in fds]
stdin = os.fsdecode(sys.stdin.buffer.read()) if files else ""
entry = dict(argv=sys.argv[1:], env=dict(os.environ), files=files, stdin=stdin)
with open("{log}", "a") as log:
    log.write(json.dumps(["{name}", entry]) + "\\n")
{body}
sys.stdout.write(open("{path}.out").read())
sys.stderr.write(open("{path}.err").read())
sys.exit({code})
"""


class Commands:
    """Scripts in a directory of their own, which write down how they were called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.add("scontrol", CONFIG.format(version="26.05.5"))
        self.add("squeue")

    def add(self, name: str, stdout: str = "", stderr: str = "", code: int = 0, body: str = "") -> None:
        path = self.directory / name
        for stream, text in (("out", stdout), ("err", stderr)):
            (self.directory / f"{name}.{stream}").write_text(text, encoding="utf-8")
        path.write_text(
            STAND_IN.format(python=sys.executable, log=self.log, name=name, path=path, code=code, body=body),
            encoding="utf-8",
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self) -> list[tuple[str, dict[str, object]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text(encoding="utf-8").splitlines()]
