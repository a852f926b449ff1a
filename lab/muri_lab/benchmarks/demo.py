"""The figures of `make demo` that the README states: it runs several times, and each run's are kept.

python -m muri_lab.benchmarks.demo --runs 3 --write      # about six minutes a run; leave the machine alone meanwhile
python -m muri_lab.benchmarks.demo --sentence            # what the stored runs say
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from muri_lab.benchmarks.bars import describe_machine

ROOT: Final = Path(__file__).resolve().parents[3]
RESULT: Final = Path(__file__).with_name("results") / "demo.json"
COMMAND: Final = str(ROOT / "scripts" / "demo")

Run = Mapping[str, Any]
"""The figures of one run, in seconds, each by the name of the round; and the machine's load when it began."""


def runs_of(command: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Run the demo so many times; each run's figures, and how busy the machine was when it began."""
    found = []
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="muri-demo-") as folder:
            load = round(os.getloadavg()[0], 1)
            done = subprocess.run([*command, "--out", folder], check=False)
            if done.returncode != 0:
                raise click.ClickException(f"the demo ended with {done.returncode}; nothing is kept")
            figures = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))["figures"]
        found.append({"load_1min": load, **figures})
    return found


def sentence(stored: Mapping[str, Any]) -> str:
    """What the stored runs say, as the README has it."""
    runs = stored["runs"]
    times = [_range(runs, what, name) for name in ("shipped", "muri-jct") for what in ("average JCT", "makespan")]
    count = "one run" if len(runs) == 1 else f"{len(runs)} runs"
    load = _ends([run["load_1min"] for run in runs], 1)
    return (
        f"In {count} (short jobs of {stored['iterations']} iterations, {stored['machine']['cores']} cores, load {load} "
        f"before each run), Muri as shipped made the average JCT {times[0]} times and the makespan {times[1]} times "
        "shorter than plain Slurm; `policy: muri-jct` made the "
        f"average JCT {times[2]} times and the makespan {times[3]} times shorter."
    )


def _range(runs: Sequence[Run], what: str, name: str) -> str:
    return _ends([run[what]["slurm"] / run[what][name] for run in runs], 2)


def _ends(values: Sequence[float], digits: int) -> str:
    return " to ".join(dict.fromkeys(f"{each:.{digits}f}" for each in (min(values), max(values))))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="How many times.")
@click.option(
    "--iterations", default=240, show_default=True, type=click.IntRange(1), help="Of a short job, as the demo's."
)
@click.option("--write/--no-write", "stored", default=False, help=f"Keep them in benchmarks/results/{RESULT.name}.")
@click.option("--sentence", "only_says", is_flag=True, help="Run nothing: say what is stored.")
def main(runs: int, iterations: int, stored: bool, only_says: bool) -> None:
    """Run the demo several times and say how many times shorter Muri made the jobs' times."""
    if only_says:
        click.echo(sentence(json.loads(RESULT.read_text(encoding="utf-8"))))
        return
    command = [COMMAND, "--iterations", str(iterations)]
    found = {"machine": describe_machine(), "iterations": iterations, "runs": runs_of(command, runs)}
    if stored:
        RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(sentence(found))


if __name__ == "__main__":
    main()
