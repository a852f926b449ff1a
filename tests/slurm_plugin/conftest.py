"""A controller on a small Slurm in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller import Controller
from muri.slurm_plugin.setup import open_controller


def profile(model: str, stages: tuple[float, float, float, float]) -> StageProfile:
    """A profile of a one-GPU model."""
    return StageProfile(ProfileKey(model, 8, 1, "gpu"), *stages, iteration_s=sum(stages), iterations=20)


FOUR_KINDS = (
    profile("m1", (0.7, 0.1, 0.1, 0.1)),
    profile("m2", (0.1, 0.7, 0.1, 0.1)),
    profile("m3", (0.1, 0.1, 0.7, 0.1)),
    profile("m4", (0.1, 0.1, 0.1, 0.7)),
)


@pytest.fixture
def make_controller(tmp_path: Path) -> Callable[..., Any]:
    """Open a controller on a FakeSlurm, as a fresh process would."""

    @contextmanager
    def make(slurm: FakeSlurm, known: tuple[StageProfile, ...] = FOUR_KINDS, /, **changes: Any) -> Iterator[Controller]:
        config = Config(**{"state_dir": tmp_path, "policy": "muri-s", **changes})
        with ProfileStore(tmp_path / "profiles.db") as store:
            if not store.list():
                store.put_all(known)
        with open_controller(config, slurm) as controller:
            yield controller

    return make
