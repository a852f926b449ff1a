"""What real Slurms printed, recorded by tests/slurm/record_fixtures.py, and commands that print it again."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError
from muri.slurm_plugin.gateway.squeue import FieldReader, job_of
from muri.slurm_plugin.gateway.text_fields import details_of
from muri.slurm_plugin.records.cluster import Job

FIXTURES: Final = Path(__file__).parent / "fixtures"
VERSIONS: Final = ("22.05.8", "24.11.5", "26.05.5")
MARK: Final = "<recorded>"


@cache
def recorded(version: str) -> dict[str, Any]:
    """Return what was recorded of a release."""
    return dict(json.loads((FIXTURES / f"slurm-{version}.json").read_text(encoding="utf-8")))


def rows(version: str) -> list[dict[str, str]]:
    """Return squeue's records."""
    document = recorded(version)
    return list(FieldReader(document["fields"].split(), MARK).rows(document["squeue"].encode()))


def row(version: str, name: str) -> dict[str, str]:
    """Return squeue's record of one job."""
    return next(each for each in rows(version) if each["Name"] == name)


def shown(version: str) -> dict[int, str]:
    """Return what scontrol prints of each job."""
    lines = recorded(version)["jobs"].splitlines(keepends=True)
    return {int(line.split()[0].removeprefix("JobId=")): line for line in lines}


def jobs(version: str) -> dict[str, Job]:
    """Return the jobs by name, with their details."""
    details = {job_id: details_of(text) for job_id, text in shown(version).items()}
    found = (job_of(each, details[int(each["JobID"])], 0.0) for each in rows(version))
    return {job.name: job for job in found}


class RecordedCommands:
    """Slurm's commands, which print what was recorded unless a test has changed it."""

    timeout_s = 1.0

    def __init__(self, version: str) -> None:
        self.fields: list[str] = recorded(version)["fields"].split()
        self.rows = rows(version)
        self.shown = shown(version)
        self.nodes: str = recorded(version)["nodes"]
        self.texts = {"config": f"SLURM_VERSION = {version}\nClusterName = muri\nStateSaveLocation = /nowhere\n"}
        self.calls: dict[str, int] = {}
        self.asked: list[list[str]] = []

    def run(self, action: str, arguments: Sequence[str]) -> str:
        self.asked.append(list(arguments))
        if "--helpFormat" in arguments:
            if "SLURM_VERSION = 22" in self.texts["config"]:  # 23.11 has no such option, either
                raise GatewayError("cannot list squeue's fields: squeue: unrecognized option '--helpFormat'")
            return " ".join(self.fields)
        if arguments[0] == "squeue":  # the ids alone
            return "\n".join(each["JobID"] for each in self.rows)
        if "nodes" in arguments:
            return self.nodes
        return next((text for name, text in self.texts.items() if name in arguments), "")

    def output(self, action: str, arguments: Sequence[str], variables: dict[str, str] | None = None) -> bytearray:
        self.asked.append(list(arguments))
        if arguments[0] == "scontrol":
            return bytearray(_bytes("".join(self._shown(arguments[-1]))))
        names = [field.split(":0") for field in (variables or {})["SQUEUE_FORMAT2"].split(",")]
        chosen = [word.removeprefix("--jobs=").split(",") for word in arguments if word.startswith("--jobs=")]
        wanted = [each for each in self.rows if not chosen or each["JobID"] in chosen[0]]
        return bytearray(b"".join(_line(each, names) for each in wanted))

    def _shown(self, job_id: str) -> Iterable[str]:
        if not job_id.isdecimal():
            return self.shown.values()
        if int(job_id) not in self.shown:
            raise NoSuchJobError("Invalid job id specified")
        return [self.shown[int(job_id)]]


def _line(record: dict[str, str], names: list[list[str]]) -> bytes:
    text = "".join(record.get(name, "") + mark for name, mark in names)
    return _bytes(text) + b"\n"


def _bytes(text: str) -> bytes:
    return text.replace("\ud800", "?").encode("utf-8", "surrogateescape")  # no bytes stand for that half of a character
