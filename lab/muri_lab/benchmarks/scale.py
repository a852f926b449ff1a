"""What Muri costs on a large cluster: CPU seconds and memory of a process per row, beside the bars it has to keep.

    python -m muri_lab.benchmarks.scale --json                          every row
    python -m muri_lab.benchmarks.scale --row decide-10k --row joins    some of them
    python -m muri_lab.benchmarks.scale --list                          what there is

Each row runs in a process of its own. Its seconds are the process's CPU time without imports and without making up the
cluster; its memory is the most that the process ever held, the cluster included.

The rows `cycle-*` need root: they run a controller in a sandbox, which they start and fill in some minutes and leave up
for each other (`bin/muri-sandbox down --name scale-10000-2000`). Their seconds are those of a second cycle with its
commands.
"""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click

from muri.profiler.store import ProfileStore
from muri.simulator.metrics import metrics_of
from muri.simulator.model import Cluster, Settings, Trace
from muri.simulator.run import simulate
from muri.simulator.traces.generator import Recipe, generate
from muri.simulator.traces.read import read_trace
from muri.slurm_plugin.cli.look import show_queue
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.controller.cycle import cycle_input
from muri.slurm_plugin.controller.status import STATUS_NAME, Status, notes_of, read_status, refresh, report, status_of
from muri.slurm_plugin.planning.decision import decide
from muri.slurm_plugin.records.cluster import Snapshot
from muri.slurm_plugin.records.journal import Journal
from muri.slurm_plugin.records.roles import view_of
from muri_lab.benchmarks import scale_runtime
from muri_lab.benchmarks.bars import Bar, finish, measured, tell
from muri_lab.benchmarks.scale_clusters import Size, cycle_of, profiles, snapshot_of
from muri_lab.benchmarks.scale_slurm import cycling

RESULT: Final = Path(__file__).with_name("results") / "scale.json"
TRACE_1: Final = Path(__file__).parents[4] / "shared" / "traces" / "muri_trace1.csv"
"""The Muri paper's first trace: 1,494 jobs. It is not ours to ship."""

Row = Callable[[], dict[str, Any]]


def deciding(size: Size, policy: str) -> Row:
    """One cycle's decision."""

    def row() -> dict[str, Any]:
        cycle = cycle_of(size, policy=policy)
        chosen = policy_of(cycle.config)
        decide(cycle_of(Size(20, 4), policy=policy), chosen)  # what is imported late is imported now
        return measured(lambda: {"actions": len(decide(cycle, chosen).actions)})

    return row


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


def simulating(policy: str, trace_of: Callable[[], Trace]) -> Callable[[], dict[str, Any]]:
    """One simulation."""

    def row() -> dict[str, Any]:
        trace, cluster, how = trace_of(), Cluster(8, 8), Settings()
        simulate(Trace("beginning", trace.jobs[:20]), policy, cluster, how)  # what is imported late is imported now

        def work() -> dict[str, Any]:
            figures = metrics_of(simulate(trace, policy, cluster, how))
            return {"jobs": figures.jobs, "decisions": figures.decisions, "avg_jct_s": figures.avg_jct_s}

        return measured(work)

    return row


def on_trace_1(policy: str) -> Callable[[], dict[str, Any]]:
    """Simulate the paper's trace, or say that its file is missing."""

    def row() -> dict[str, Any]:
        if not TRACE_1.exists():
            return {"skipped": f"there is no {TRACE_1.name} in {TRACE_1.parent}"}
        return simulating(policy, lambda: read_trace(TRACE_1))()

    return row


def slurmctld_2000_groups() -> dict[str, Any]:
    """What Muri asks of slurmctld in an hour, on a real one; needs root and half an hour."""
    from muri_lab.benchmarks.scale_slurmctld import slurmctld_2000_groups as row  # needs the sandbox

    return measured(row)


ROWS: Final[dict[str, tuple[Row, dict[str, float]]]] = {
    "decide-1k": (deciding(Size(1_000, full=True), "auto"), {}),
    "decide-10k": (deciding(Size(10_000, full=True), "auto"), {"cpu_s": 1.0}),
    "cycle-10k": (lambda: whole_cycle(Size(10_000, full=True)), {"cpu_s": 1.0}),
    "queue-10k": (lambda: queue_command(Size(10_000, full=True)), {"cpu_s": 1.0}),
    "decide-10k-idle": (deciding(Size(10_000), "auto"), {}),
    "decide-50k": (deciding(Size(50_000, full=True), "auto"), {"cpu_s": 4.0, "peak_rss_mib": 600.0}),
    "joins": (deciding(Size(10_000, groups=2_000, full=True), "auto"), {}),
    "muri-jct-100-users": (deciding(Size(10_000), "muri-jct"), {"cpu_s": 2.0, "peak_rss_mib": 400.0}),
    "muri-jct-one-user": (deciding(Size(10_000, users=1), "muri-jct"), {"cpu_s": 2.0, "peak_rss_mib": 400.0}),
    "muri-hybrid-100-users": (deciding(Size(10_000), "muri-hybrid"), {"cpu_s": 2.0, "peak_rss_mib": 400.0}),
    "muri-hybrid-one-user": (deciding(Size(10_000, users=1), "muri-hybrid"), {"cpu_s": 2.0, "peak_rss_mib": 400.0}),
    **scale_runtime.ROWS,
    "slurmctld-2000-groups": (slurmctld_2000_groups, {"slurmctld_s_per_hour": 60.0}),
    "cycle-10k-pyslurm": (cycling("pyslurm"), {"cpu_s": 1.0}),
    "cycle-10k-command": (cycling("command"), {"cpu_s": 2.0, "peak_rss_mib": 300.0}),
    "simulate-trace-1-srtf": (on_trace_1("srtf"), {}),
    "simulate-trace-1-synergy": (on_trace_1("synergy"), {}),
    "simulate-trace-1-muri-s": (on_trace_1("muri-s"), {"cpu_s": 5.0}),
    "simulate-trace-1-muri-jct": (on_trace_1("muri-jct"), {"cpu_s": 15.0}),
    "simulate-20k-muri-jct": (simulating("muri-jct", lambda: generate(Recipe(20_000, 64))), {}),
    "simulate-100k-muri-jct": (simulating("muri-jct", lambda: generate(Recipe(100_000, 64))), {"cpu_s": 120.0}),
}
"""Each row, and the most that its figures may be."""


def bars(name: str, figures: dict[str, Any]) -> list[Bar]:
    """Return the bars of a row."""
    _, most = ROWS[name]
    return [
        Bar(name, what, figures[what], f"at most {limit:g}", figures[what] <= limit) for what, limit in most.items()
    ]


def run_apart(name: str) -> dict[str, Any]:
    """Run one row in a process of its own."""
    command = [sys.executable, __file__, "--here", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


@click.command(help=__doc__)
@click.option("--row", "names", type=click.Choice(list(ROWS)), multiple=True, help="Only these rows.")
@click.option("--here", type=click.Choice(list(ROWS)), help="Run one row in this very process and print its figures.")
@click.option("--list", "listing", is_flag=True, help="Name the rows.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--keep/--no-keep", "stored", default=True, help=f"Keep the figures in {RESULT.name}.")
def main(*, names: tuple[str, ...], here: str | None, listing: bool, as_json: bool, stored: bool) -> None:
    """Measure."""
    if listing:
        click.echo("\n".join(ROWS))
        return
    if here:
        click.echo(json.dumps(ROWS[here][0]()))
        return
    cases = {}
    for name in names or ROWS:
        figures = run_apart(name)
        if "skipped" in figures:
            tell(f"{name}: skipped: {figures['skipped']}")
            continue
        cases[name] = figures
        tell(f"{name}: {cases[name]['cpu_s']} s of CPU, {cases[name]['peak_rss_mib']:.0f} MiB")
    found = [bar for name, figures in cases.items() for bar in bars(name, figures)]
    finish(RESULT, cases, found, stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
