"""`make demo`: eight jobs of four kinds on one GPU, with Muri and then without.

Four long jobs are submitted first and four short ones after them, as when another user's sweep is ahead in the queue.
The makespan shows what interleaving gains; the average JCT also gains from Muri-S letting short jobs go first (SRSF).
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from muri.launcher.telemetry import timeline
from sandbox.support import SandboxError

from .cluster import CHECKOUT, STATE_DIR, Cluster, DemoError, controller, demo_cluster
from .report import Comparison, print_table
from .watch import wait_for

LONG = 1.8
KINDS = ("storage", "network", "cpu", "gpu")
BATCH_SIZES = {"storage": 18, "network": 72, "cpu": 16, "gpu": 4}
LIMIT_S = 600.0


def submit_all(cluster: Cluster, iterations: int, *, muri: bool) -> tuple[int, ...]:
    """Submit a long and a short job of each kind, the long ones first, and return their ids."""
    ids = []
    for length, count in (("long", round(LONG * iterations)), ("short", iterations)):
        for kind in KINDS:
            batch_size = BATCH_SIZES[kind]
            mark = [f"--muri=model={kind},batch-size={batch_size},duration={count * 0.05:.0f}s"] if muri else []
            options = [*mark, "--gres=gpu:1", f"--job-name={kind}-{length}", "--chdir=/home/alice"]
            script = [
                str(CHECKOUT / "examples/train.sh"), str(CHECKOUT / f"examples/train_{kind}.py"),
                "--iterations", str(count), "--batch-size", str(batch_size), "--seed", str(len(ids)),
            ]  # fmt: skip
            ids.append(cluster.submit(options, script))
    return tuple(ids)


def run_round(cluster: Cluster, options: argparse.Namespace, console: Console, *, muri: bool) -> tuple[int, ...]:
    """Submit the jobs and wait until all have ended."""
    with controller(cluster, options.interval, options.out / "controller.log") if muri else nullcontext():
        ids = submit_all(cluster, options.iterations, muri=muri)
        wait_for(cluster, ids, console, LIMIT_S, muri=muri)
    return ids


def save_timeline(cluster: Cluster, names: dict[str, str], path: Path) -> None:
    """Draw the first group's stages.

    Raises:
        DemoError: No group left a trace, so nothing was interleaved.
    """
    traces = cluster.run("sh", "-c", "ls /run/muri/1001/host-*.trace.json").split()
    trace = path.with_name("trace.json")
    trace.write_text(cluster.run("cat", traces[0]))
    slices = timeline.read_slices(trace)
    title = "Four jobs on one GPU: each holds a resource while the others hold the other three"
    start_s = timeline.busiest_moment_s(slices, timeline.DEFAULT_SPAN_S)
    timeline.draw(slices, start_s, timeline.DEFAULT_SPAN_S, path, timeline.Captions(title, names))


def demo(options: argparse.Namespace, console: Console) -> int:
    """Run both rounds, print the table and return the exit code."""
    options.out.mkdir(parents=True, exist_ok=True)
    with demo_cluster() as cluster:
        console.print("\n[bold]1. With Muri[/]: one GPU; sbatch --muri …; new models are profiled first")
        with_ids = run_round(cluster, options, console, muri=True)
        console.print("\n[bold]2. Without Muri[/]: the same eight jobs, the same scripts, one after the other")
        without_ids = run_round(cluster, options, console, muri=False)
        jobs = cluster.jobs()
        names = {str(job_id): jobs[job_id].name for job_id in with_ids}
        timeline = options.out / "timeline.png"
        save_timeline(cluster, names, timeline)
        (options.out / "profiles.json").write_text(
            cluster.run("muri", "profile", "list", "--json", "--store", f"{STATE_DIR}/profiles.db")
        )
    comparison = Comparison(tuple(jobs[i] for i in with_ids), tuple(jobs[i] for i in without_ids))
    console.print()
    print_table(comparison, console)
    console.print(f"Timeline of one group's stages: {timeline}")
    if not comparison.all_completed:
        console.print("[red]Not every job is COMPLETED in Slurm.[/]")
        return 1
    console.print(f"Average JCT with Muri is [bold]{comparison.average_speedup:.2f} ×[/] better, dry runs included.")
    return 0


def main() -> int:
    """Read the options and run the demo."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=140,
        help="iterations of a short job; a long one makes 1.8 times as many (default: 140)",
    )
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two cycles (default: 0.5)")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "out" / "demo", help="where the plot and logs go")
    console = Console(highlight=False)
    try:
        return demo(parser.parse_args(), console)
    except (DemoError, SandboxError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; the sandbox has been taken down")
        return 130


if __name__ == "__main__":
    sys.exit(main())
