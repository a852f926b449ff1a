"""Live progress: one line per job, redrawn on a terminal, one line per change elsewhere."""

import json
import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .cluster import STATE_DIR, Cluster, DemoError, JobRecord

# Often enough to watch, seldom enough not to take the jobs' two cores.
POLL_S = 3.0


def wait_for(cluster: Cluster, ids: tuple[int, ...], console: Console, limit_s: float, *, muri: bool) -> None:
    """Show the jobs until all of them have ended.

    Raises:
        DemoError: They did not end within `limit_s` seconds.
    """
    begun_s = time.monotonic()
    told: dict[int, str] = {}
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            jobs = cluster.jobs()
            details = _details(cluster) if muri else {}
            elapsed_s = time.monotonic() - begun_s
            if console.is_terminal:
                live.update(_table(jobs, ids, details, elapsed_s), refresh=True)
            else:
                _tell_changes(jobs, ids, details, told, console, elapsed_s)
            if all(jobs[job_id].ended for job_id in ids):
                return
            if elapsed_s > limit_s:
                raise DemoError(f"the jobs did not end within {limit_s:.0f} s")
            time.sleep(POLL_S)


def _details(cluster: Cluster) -> dict[int, dict]:  # type: ignore[type-arg]
    """What the controller's last cycle said of each job: the file that `muri queue` reads. It leaves out defaults.

    The file itself, because a command every few seconds would take the jobs' two cores.
    """
    status = json.loads(cluster.run("cat", f"{STATE_DIR}/status.json"))
    return {job["job_id"]: job for job in status["jobs"]}


def _what(job: JobRecord, detail: Mapping[str, object]) -> str:
    if job.ended:
        return f"{job.state} after {job.jct_s:.0f} s"
    if not detail:
        return job.state
    if detail["state"] == "waiting":
        reasons = detail.get("reasons")
        return f"waiting: {reasons[0]}" if isinstance(reasons, list) and reasons else "waiting"
    told = detail.get("partners")
    partners = ", ".join(map(str, told)) if isinstance(told, list) else ""
    speed = detail.get("measured_speed")
    text = str(detail["state"]) + (f" with {partners}" if partners else "")
    return text + (f", speed {speed:.2f}" if isinstance(speed, float) else "")


def _table(
    jobs: Mapping[int, JobRecord], ids: tuple[int, ...], details: Mapping[int, Mapping[str, object]], elapsed_s: float
) -> Table:
    table = Table(title=f"{elapsed_s:.0f} s", title_justify="left", box=None)
    for job_id in ids:
        job = jobs[job_id]
        table.add_row(str(job_id), job.name, job.state, _what(job, details.get(job_id, {})))
    return table


def _tell_changes(
    jobs: Mapping[int, JobRecord],
    ids: tuple[int, ...],
    details: Mapping[int, Mapping[str, object]],
    told: dict[int, str],
    console: Console,
    elapsed_s: float,
) -> None:
    for job_id in ids:
        what = _what(jobs[job_id], details.get(job_id, {})).split(", speed")[0].split(": ")[0]
        if told.get(job_id) != what:
            told[job_id] = what
            console.print(f"  {elapsed_s:4.0f} s  job {job_id} {jobs[job_id].name}: {what}", soft_wrap=True)
