"""A controller on a small Slurm in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FOUR_KINDS, FakeSlurm

from muri.profiler.records import StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_controller
from muri.slurm_plugin.controller.cycle import Controller


@pytest.fixture(autouse=True)
def status_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where cycles tell users about their jobs; not this machine's."""
    monkeypatch.setenv("MURI_STATUS_DIR", str(tmp_path / "status"))
    return tmp_path / "status"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ProfileStore]:
    """The profile store of the controllers that `make_controller` opens."""
    with ProfileStore(tmp_path / "profiles.db") as store:
        yield store


@pytest.fixture
def make_controller(tmp_path: Path, configured: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Open a controller on a FakeSlurm, as a fresh process would, with the shipped configuration but for `changes`."""

    @contextmanager
    def make(slurm: FakeSlurm, known: tuple[StageProfile, ...] = FOUR_KINDS, /, **changes: Any) -> Iterator[Controller]:
        # Not this machine's files; and the gate that this Slurm has.
        files = {"state_dir": tmp_path, "status_dir": tmp_path / "status"}
        gate = "license" if slurm.gate_license else "hold"
        keys = {**files, "gate": gate, **configured(**changes)}
        tuning = keys.pop("tuning", {})
        config = Config(**keys).tuned(**tuning)
        with ProfileStore(tmp_path / "profiles.db") as store:
            if not store.list():
                store.put_all(known)
        with open_controller(config, slurm) as controller:
            yield controller

    return make
