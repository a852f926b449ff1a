"""`make demo`: eight jobs of four kinds on one GPU, in three rounds, each on a fresh cluster of one node.

1. Plain Slurm, in the order of submission.
2. Muri, which may change the order, but shares nothing (grouping.max_group_size: 1).
3. Muri as it is: jobs share the GPU. It has seen none of the models before.

Users say how long their jobs take, so Muri's order is SRSF: short jobs first. What round 2 gains on round 1 is due to
the order, what round 3 gains on round 2 to sharing.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from muri.launcher.telemetry import timeline
from sandbox.support import SandboxError

from .cluster import CHECKOUT, STATE_DIR, Cluster, DemoError, controller, fresh_cluster
from .report import Comparison, Jobs, print_table, save
from .watch import wait_for

LONG = 1.8
KINDS = ("storage", "network", "cpu", "gpu")
BATCH_SIZES = {"storage": 18, "network": 72, "cpu": 16, "gpu": 4}
LIMIT_S = 600.0

# What a round is called, and how many jobs may share the GPU; None: without Muri.
ROUNDS: tuple[tuple[str, int | None], ...] = (
    ("Plain Slurm: eight jobs on one GPU, in the order of submission", None),
    ("Muri without sharing: the same jobs and scripts, short jobs first", 1),
    ("Muri: the same again, and jobs share the GPU; no model is known", 4),
)


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


def run_round(console: Console, options: argparse.Namespace, max_group_size: int | None, out: Path) -> Jobs:
    """Run the jobs on a fresh cluster until all have ended; without a group size, without Muri."""
    out.mkdir(parents=True, exist_ok=True)
    muri = max_group_size is not None
    with fresh_cluster() as cluster:
        with controller(cluster, max_group_size, out / "controller.log") if muri else nullcontext():
            ids = submit_all(cluster, options.iterations, muri=muri)
            wait_for(cluster, ids, console, LIMIT_S, muri=muri)
        jobs = cluster.jobs()
        found = tuple(jobs[i] for i in ids)
        if (max_group_size or 1) > 1:
            keep(cluster, found, options.out)
    return found


def keep(cluster: Cluster, jobs: Jobs, out: Path) -> None:
    """Keep what sharing leaves behind: a group's timeline and the models' profiles."""
    save_timeline(cluster, {str(job.job_id): job.name for job in jobs}, out / "timeline.png")
    profiles = cluster.run("muri", "profile", "list", "--json", "--store", f"{STATE_DIR}/profiles.db")
    (out / "profiles.json").write_text(profiles)


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
    """Run the rounds, print the table and return the exit code."""
    rounds = []
    for number, (title, max_group_size) in enumerate(ROUNDS, start=1):
        console.print(f"\n[bold]{number}. {title}")
        rounds.append(run_round(console, options, max_group_size, options.out / f"round-{number}"))
    comparison = Comparison(*rounds)
    save(comparison, options.out / "result.json")
    console.print()
    print_table(comparison, console)
    console.print(f"Timeline of one group's stages: {options.out / 'timeline.png'}", soft_wrap=True)
    if not comparison.all_completed:
        console.print("[red]Not every job is COMPLETED in Slurm.[/]")
        return 1
    return 0


def main() -> int:
    """Read the options and run the demo."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=240,
        help="iterations of a short job; a long one makes 1.8 times as many (default: 240)",
    )
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
