"""Cost of a controller's cycle and of `muri queue`, without their calls of Slurm."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from muri.profiler.store import ProfileStore
from muri.slurm_plugin.cli.look import show_queue
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.controller.cycle import cycle_input
from muri.slurm_plugin.controller.status import STATUS_NAME, Status, notes_of, read_status, refresh, report, status_of
from muri.slurm_plugin.planning.decision import decide
from muri.slurm_plugin.records.cluster import Snapshot
from muri.slurm_plugin.records.journal import Journal
from muri.slurm_plugin.records.roles import view_of
from muri_lab.benchmarks.machine import measured
from muri_lab.benchmarks.scale_clusters import Size, profiles, snapshot_of


def whole_cycle(size: Size) -> dict[str, Any]:
    """Read the stores, read the comments, decide, and tell everybody, where nothing can start: the second cycle."""
    with TemporaryDirectory() as folder:
        first, cycle, _ = _site(size, Path(folder))
        cycle(first)
        snapshot = snapshot_of(size)
        return measured(lambda: {"jobs_told": len(cycle(snapshot).jobs)})


def queue_command(size: Size) -> dict[str, Any]:
    """Read what the last cycle has told, bring it up to the queue, and print the table."""
    with TemporaryDirectory() as folder:
        snapshot, cycle, config = _site(size, Path(folder))
        cycle(snapshot)

        def show() -> dict[str, Any]:
            text = io.StringIO()
            with redirect_stdout(text):
                show_queue(refresh(read_status(config.state_dir / STATUS_NAME), view_of(snapshot)))
            return {"lines": len(text.getvalue().splitlines())}

        return measured(show)


def _site(size: Size, folder: Path) -> tuple[Snapshot, Callable[[Snapshot], Status], Config]:
    config = Config(policy="auto", state_dir=folder, status_dir=folder / "status")
    store, journal, policy = ProfileStore(folder / "profiles.db"), Journal(folder / "journal.db"), policy_of(config)
    for profile in profiles(size):
        store.put(profile)

    def cycle(snapshot: Snapshot) -> Status:
        decision = decide(cycle_input(snapshot, store, config, journal), policy)
        estimated = notes_of(decision.preparation.request.jobs, decision.plan)
        notes = {job_id: (why,) for job_id, why in estimated.items()}
        jobs = status_of(decision.view, decision.plan, decision.preparation.waiting, notes)
        status = Status(snapshot.taken_s, decision.plan.policy, "pyslurm", jobs)
        report(config, status, decision.view)
        return status

    cycle(snapshot_of(Size(20, 4)))  # what is imported late is imported now
    return snapshot_of(size), cycle, config
