"""`make demo`: eight jobs of four kinds on one GPU, in three rounds, each on a fresh cluster of one node.

1. Plain Slurm, in the order of submission.
2. Muri as shipped. It has seen none of the models before, and `policy: auto` keeps to Slurm's order: what this round
   gains on round 1 is due to sharing.
3. Muri with `policy: muri-jct`. Users say how long their jobs take, so short jobs go first: what that order adds.
"""

import argparse
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from sandbox.support import SandboxError

from .cluster import CHECKOUT, MURI_JCT, SHIPPED, STATE_DIR, Cluster, DemoError, controller, fresh_cluster
from .report import Jobs, draw_timeline, print_table, save
from .watch import wait_for

LONG = 1.8
KINDS = ("storage", "network", "cpu", "gpu")
BATCH_SIZES = {"storage": 18, "network": 72, "cpu": 16, "gpu": 4}
LIMIT_S = 600.0

# Each round's name in the results, its title, and muri.yaml; None: without Muri.
ROUNDS: tuple[tuple[str, str, str | None], ...] = (
    ("slurm", "Plain Slurm: eight jobs on one GPU, in the order of submission", None),
    ("shipped", "Muri as shipped: the same jobs and scripts share the GPU; no model is known", SHIPPED),
    ("muri-jct", "Muri with `policy: muri-jct`: the same again, short jobs first", MURI_JCT),
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


def run_round(console: Console, iterations: int, config: str | None, out: Path) -> Jobs:
    """Run the jobs on a fresh cluster until all have ended; without a configuration, without Muri."""
    shutil.rmtree(out, ignore_errors=True)  # traces of an earlier demo
    out.mkdir(parents=True)
    muri = config is not None
    with fresh_cluster() as cluster:
        with nullcontext() if config is None else controller(cluster, config, out / "controller.log"):
            ids = submit_all(cluster, iterations, muri=muri)
            wait_for(cluster, ids, console, LIMIT_S, muri=muri)
        jobs = cluster.jobs()
        if muri:
            keep(cluster, out)
    return tuple(jobs[i] for i in ids)


def keep(cluster: Cluster, out: Path) -> None:
    """Keep what sharing leaves behind: the groups' traces and the models' profiles."""
    for trace in cluster.run("sh", "-c", "ls /run/muri/1001/pilot-*.trace.json").split():
        (out / Path(trace).name).write_text(cluster.run("cat", trace))
    profiles = cluster.run("muri", "profile", "list", "--json", "--store", f"{STATE_DIR}/profiles.db")
    (out / "profiles.json").write_text(profiles)


def demo(options: argparse.Namespace, console: Console) -> int:
    """Run the rounds, print the table and return the exit code."""
    rounds, picture = {}, options.out / "timeline.png"
    for number, (name, title, config) in enumerate(ROUNDS, start=1):
        console.print(f"\n[bold]{number}. {title}")
        rounds[name] = run_round(console, options.iterations, config, options.out / name)
    save(rounds, options.out / "result.json")
    console.print()
    print_table(rounds, console)
    title = draw_timeline(options.out / "shipped", rounds["shipped"], picture)
    console.print(f"{picture}: {title}", soft_wrap=True)
    if not all(job.state == "COMPLETED" for jobs in rounds.values() for job in jobs):
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
