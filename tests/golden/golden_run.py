"""Run Muri's own commands on a recorded situation and collect their output and their calls of Slurm.

Only this module names parts of the product: three commands, the reader of snapshots, and the two stores that a
site's controller fills over the days. What changes there moves here and nowhere else.
"""

import itertools
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import click
import pytest
import yaml
from click.testing import CliRunner

from muri.cli import cli
from muri.profiler.records import Document
from muri.profiler.store import Author, ProfileStore
from muri.slurm_plugin.cli.admin import controller
from muri.slurm_plugin.config import Tuning
from muri.slurm_plugin.records.cluster import parse_snapshot
from muri.slurm_plugin.records.journal import Journal

RECORDED: Final = Path(__file__).parent / "recorded"  # A folder for each situation
OPEN_GATEWAY: Final = "muri.slurm_plugin.controller.assemble.open_gateway"
"""What opens the way to Slurm for a controller."""

CONSTANTS: Final = "muri.slurm_plugin.config.TUNING"  # The constants of controllers


@dataclass(frozen=True)
class Case:
    """The content of a site's files when a cycle begins.

    Attributes:
        store: The profile store: profiles as in a file of `muri profile export`, other documents, and the models
            whose profiles are marked as stale.
    """

    snapshot: dict[str, Any]  # What `muri plan --save` writes
    config: dict[str, Any]  # Keys of muri.yaml, and as `tuning` constants of the controller
    store: dict[str, Any]
    journal: dict[str, Any]  # The journal: its intents, and its facts as (name, subject, value)

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read a situation's files."""
        config = yaml.safe_load((folder / "muri.yaml").read_text())
        names = ("snapshot", "profiles", "journal")
        snapshot, store, journal = (json.loads((folder / f"{name}.json").read_text()) for name in names)
        return cls(snapshot, config, store, journal)


class RecordingSlurm:
    """A Slurm that shows the same queue whatever is asked of it, and writes down what is asked."""

    name = "golden"

    def __init__(self, text: str) -> None:
        self._snapshot = parse_snapshot(text)
        self._ids = itertools.count(9001)
        self.calls: list[dict[str, Any]] = []
        self.slurm_calls: Counter[str] = Counter()

    def snapshot(self) -> Any:
        return self._snapshot

    queue = snapshot

    def gpu_removal(self, *_known: Any) -> Any:
        return self._snapshot.gpu_removal

    def submit(self, job: Any) -> int:
        self.calls.append({"call": "submit", **_given(job)})
        return next(self._ids)

    def modify(self, job_id: int, change: Any) -> None:
        self.calls.append({"call": "modify", "job_id": job_id, **_given(change)})

    def __getattr__(self, name: str) -> Any:
        if name not in {"hold", "release", "requeue_hold", "cancel"}:
            raise AttributeError(name)
        return lambda job_id: self.calls.append({"call": name, "job_id": job_id})

    def job_environment(self, job_id: int) -> dict[str, str]:
        return {"HOME": "/home/alice", "SLURM_JOB_ID": str(job_id), "SLURM_SUBMIT_DIR": "/home/alice", "A": "b c"}


def _told(status: str) -> str:
    """Leave out of a status how often Slurm was called: nothing is called here."""
    assert json.loads(status)["slurm_calls"] == {}
    return status.replace(', "slurm_calls": {}', "")


def _given(record: Any) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults."""
    return {name: value for name, value in asdict(record).items() if value is not None}


def prepare_site(case: Case, folder: Path) -> dict[str, Path]:
    """Write a site's files; return their paths by option."""
    state = folder / "state"
    state.mkdir()
    places = {"state_dir": str(state), "status_dir": str(state / "status")}
    # The recorded queues have no license, and answers name no machine's paths; all else is as shipped.
    keys = {name: value for name, value in case.config.items() if name != "tuning"}
    config = {**places, "gate": "hold", "node_python": "/opt/muri/bin/python", **keys}
    files = {"config": folder / "muri.yaml", "snapshot": folder / "snapshot.json", "profiles": state / "profiles.db"}
    files["config"].write_text(yaml.safe_dump(config, sort_keys=True))
    files["snapshot"].write_text(json.dumps(case.snapshot))
    (state / "gpu-removal.json").write_text(json.dumps(case.snapshot["gpu_removal"]))
    export = folder / "profiles.json"
    export.write_text(json.dumps({"schema": "muri-profiles", "version": 1, "profiles": case.store["profiles"]}))
    run_command("profile", "import", str(export), "--store", str(files["profiles"]))
    with ProfileStore(files["profiles"]) as store:
        for each in case.store["documents"]:
            store.put_document(each["kind"], Document(each["name"], each["measured_at"], each["body"]))
        for key in (known.key for known in store.list() if known.key.model in case.store["stale"]):
            store.mark_stale(key, "it drifted", Author("tests", "2026-01-01T00:00:00+00:00", "stale"))
    with Journal(state / "journal.db") as journal:
        for each in case.journal["intents"]:
            journal.begin(each["token"], each["kind"], each["payload"], each["begun_s"])
            if each["submitted_job"] is not None:
                journal.set_submitted_job(each["token"], each["submitted_job"])
            if each["state"] != "begun":
                journal.finish(each["token"], each["state"])
        for name, subject, value in case.journal["facts"]:
            journal.set_fact(name, subject, value)
    return files


def run_command(*arguments: str, command: click.Command = cli) -> str:
    """Run `muri ARGUMENTS`, or another command, and return its standard output."""
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, f"{command.name} {' '.join(arguments)}: {result.output}"
    return result.stdout


def outputs_of(case: Case, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return, by file name, what Muri makes of a situation.

    plan.txt and plan.jsonl: `muri plan`. decision.jsonl: `muri-controller --dry-run`. calls.jsonl: what one cycle
    asks of Slurm, the whole text of the jobs that it submits included. status.json: its messages to users.
    """
    files = prepare_site(case, folder)
    for name in ("MURI_CONFIG", "MURI_STATE_DIR", "MURI_PROFILES"):
        patch.delenv(name, raising=False)
    slurm = RecordingSlurm(files["snapshot"].read_text())
    patch.setattr(OPEN_GATEWAY, lambda kind, note=None: slurm)
    tokens = itertools.count(1)
    patch.setattr(CONSTANTS, Tuning(**case.config.get("tuning", {})))
    patch.setattr("secrets.token_hex", lambda size: f"{next(tokens):0{2 * size}x}")
    options = [f"--{name}={path}" for name, path in files.items()]
    config = f"--config={files['config']}"
    text, lines = run_command("plan", *options), run_command("plan", *options, "--json")
    decision = run_command(config, "--dry-run", command=controller)
    run_command(config, "--once", command=controller)
    calls = "".join(json.dumps(call, sort_keys=True, ensure_ascii=False) + "\n" for call in slurm.calls)
    status = _told((files["profiles"].parent / "status.json").read_text())
    return {"plan.txt": text, "plan.jsonl": lines, "decision.jsonl": decision, "calls.jsonl": calls,
            "status.json": status}  # fmt: skip
