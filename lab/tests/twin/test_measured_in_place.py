"""Models never seen start at once and are measured while they train; no script runs twice."""

from pathlib import Path

import pytest

from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.records import comment_tags as tags
from muri_lab.twin.programs import Work
from muri_lab.twin.sharing import Iteration
from muri_lab.twin.site import Site, plain_nodes
from muri_lab.twin.submission import FIRST_UID, Submission
from muri_lab.twin.twin import EPOCH_S, Twin

TIMES_S = {"m1": (0.7, 0.1, 0.1, 0.1), "m2": (0.1, 0.7, 0.1, 0.1), "m3": (0.1, 0.1, 0.7, 0.1)}
INTERVAL_S = 60.0


def job(model: str, iterations: int = 200, submit_s: float = 1.0, gpu_mem_gib: float = 4.0) -> Submission:
    work = Work(Iteration(TIMES_S[model], 1.0), iterations, gpu_mem_gib=gpu_mem_gib)
    mark = f"model={model},batch-size=8"
    return Submission(EPOCH_S + submit_s, "alice", FIRST_UID, work, mark, name=model, cpus_per_task=2)


def twin_of(folder: Path, gpus: int, **changes: object) -> Twin:
    config = Config(**{"policy": "sjf-bsbf", "interval_s": INTERVAL_S, **changes})
    return Twin(Site(plain_nodes(1, gpus)), config, folder)


class Seen:
    """Notes each job of Muri's own that starts."""

    def __init__(self, twin: Twin) -> None:
        self.dry_runs = 0
        twin.slurm.notes.append(self._note)

    def _note(self, _what: str, job) -> None:
        self.dry_runs += tags.token(job.admin_comment, tags.DRY_RUN_PREFIX) is not None


def stored(twin: Twin) -> dict[str, StageProfile]:
    with ProfileStore(twin.config.state_dir / "profiles.db", read_only=True) as store:
        return {profile.key.model: profile for profile in store.list()}


def test_three_models_never_seen_start_at_once_and_are_measured_while_they_train(tmp_path: Path) -> None:
    twin = twin_of(tmp_path, gpus=3)
    seen = Seen(twin)
    twin.submit(job(model) for model in TIMES_S)
    twin.run()
    for course in twin.courses:
        assert course.state == "COMPLETED"
        assert course.starts_s[0] - course.submitted_s < INTERVAL_S + 10
        assert len(course.starts_s) == 1
    assert seen.dry_runs == 0
    found = stored(twin)
    assert found.keys() == TIMES_S.keys()
    for model, profile in found.items():
        assert (profile.source, profile.key) == ("in-place", ProfileKey(model, 8, 1, "gpu", "alice"))
        assert profile.stage_s == pytest.approx(TIMES_S[model])
        assert (profile.iteration_s, profile.iterations) == (pytest.approx(1.0), 10)
