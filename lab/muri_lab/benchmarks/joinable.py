"""What it costs a job that others may join it, when nobody does: until its script starts, of its speed, at its end.

On a sandbox, a real Slurm, the same job starts in turns behind a pilot job of its own and, with grouping.join: false,
without. Times are from the beginning of the controller's cycle that releases it to the first line of the batch script
and of the training script, and from the batch script's end until Slurm shows that the GPU is free. The speed is that of
a member alone in a group against `muri run` without one, in blocks of short iterations that take turns on one core: how
much longer each takes does not depend on its length. It is CPU time, for the clock shows what disturbs the machine.

A job on two GPUs has two runtimes, and rank 0's orders the network of both. Its speed is that of the same DDP job, in
turns as a job that may be joined and plain; each run tells the median of its iterations, by the clock.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

from muri_lab.benchmarks.bars import Bar, finish, tell
from muri_lab.benchmarks.fidelity_live import STATE_DIR, known_on
from muri_lab.benchmarks.run_overhead import CALIBRATION, Block, Trainer, spread, ways
from sandbox import lifecycle
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.support import Progress

RESULT: Final = Path(__file__).parent / "results" / "joinable.json"
WAYS: Final = {"plain": False, "joinable": True}
STAGES_S: Final = (0.01, 0.01, 0.02, 0.0)
LATEST_SCRIPT_S: Final = 3.0
"""Seconds that the training script may begin later; two starts of Slurm instead of one, and the runtime's."""
LATEST_FREE_S: Final = 2.5
"""Seconds that the GPU may be free later. The pilot job ends 0.2 s after its last member; then slurmd waits for the
member's step, which tries for 1.5 s to reach an srun that is long gone (docs/adr/0010)."""
BLOCK: Final = (4, 60)
"""Images of a batch, and iterations of a block."""
MOST_MORE_MS: Final = 0.25
"""1 % of an iteration of 25 ms."""
MOST_MORE_MS_OF_RANKS: Final = 1.0
"""1 % of an iteration of 100 ms."""

_TRAIN_PY: Final = """\
import sys, time
print("trains", time.time(), flush=True)
import muri
for _ in range(50):
    for name, seconds in zip(("load", "preprocess", "propagate"), (0.01, 0.01, 0.02)):
        with muri.stage(name):
            time.sleep(seconds)
"""

_TRAIN_SH: Final = """\
#!/bin/sh
echo "begun $(date +%s.%N)"
muri run ~/train.py
echo "ended $(date +%s.%N)"
"""

_RANKS_PY: Final = """\
import os, statistics, time
import torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=2)
model = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 256))
ends_s = []
while len(ends_s) < 400:
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=8):
        time.sleep(0.03)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        ends_s.append(time.perf_counter())
took_s = [end - begin for begin, end in zip(ends_s[100:], ends_s[101:])]
if torch.distributed.get_rank() == 0:
    print("iteration_ms", 1e3 * statistics.median(took_s), flush=True)
"""

_RANKS_SH: Final = "#!/bin/sh\nsrun muri run ~/ranks.py\n"

_CYCLE_PY: Final = """\
import json, subprocess, sys, time
from pathlib import Path

output = Path(sys.argv[1])
begin_s = time.time()
subprocess.run(["muri-controller", "--once"], check=True, capture_output=True)
cycle_s = time.time() - begin_s

def said():
    words = [line.split() for line in output.read_text().splitlines()] if output.exists() else []
    return {line[0]: float(line[1]) for line in words if len(line) == 2}

end_s = time.time() + 120
while "ended" not in said() and time.time() < end_s:
    time.sleep(0.02)
while subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout and time.time() < end_s:
    time.sleep(0.02)
free_s, stamps = time.time(), said()
print(json.dumps({"cycle_s": cycle_s, "batch_s": stamps["begun"] - begin_s, "script_s": stamps["trains"] - begin_s,
                  "free_s": free_s - stamps["ended"]}))
"""


@contextmanager
def cluster(gpus: int) -> Iterator[Driver]:
    """A sandbox with one node on all GPUs of which the model is known."""
    name = "joinable"
    lifecycle.down(name, Progress())
    lifecycle.up(name, SUITES["forky"], Shape(nodes=1, gpus_per_node=gpus), Progress())
    try:
        driver = Driver.of(name)
        configure(driver, join=True)
        known_on(driver, [["m", gpus, STAGES_S]])
        driver.write("ranks.py", _RANKS_PY)
        driver.write("ranks.sh", _RANKS_SH)
        driver.write("train.py", _TRAIN_PY)
        driver.write("train.sh", _TRAIN_SH)
        yield driver
    finally:
        lifecycle.down(name, Progress())


def configure(driver: Driver, *, join: bool) -> None:
    """Write the controller's configuration: defaults, but for where it keeps what it knows."""
    config = {"state_dir": STATE_DIR, "status_dir": f"{STATE_DIR}-status", "policy": "muri-s"}
    text = json.dumps(config | {"grouping": {"join": join}})
    driver.write("/etc/muri/muri.yaml", text, user="root", mode="0644")


def measure_waits(driver: Driver, rounds: int) -> dict[str, list[dict[str, float]]]:
    """What each start and end took, both ways in turns; the first round only warms up."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, join in WAYS.items():
            configure(driver, join=join)
            job = driver.submit("--gres=gpu:1", "--time=10", "--muri=model=m,batch-size=8,duration=10s", "train.sh")
            done = driver.run("python", "-c", _CYCLE_PY, f"/home/alice/slurm-{job}.out", user="root")
            if number:
                found[way].append(json.loads(done.stdout))
                tell(f"{way}: {done.stdout.strip()}")
    return found


def measure_ranks(driver: Driver, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of an iteration of a job on two GPUs, both ways in turns."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, join in WAYS.items():
            configure(driver, join=join)
            mark = "--muri=model=m,batch-size=8,duration=60s"
            job = driver.submit("--gres=gpu:2", "--ntasks=2", "--cpus-per-task=2", "--time=10", mark, "ranks.sh")
            driver.run("muri-controller", "--once", user="root")
            driver.wait_state(job, "COMPLETED")
            words = driver.read(f"/home/alice/slurm-{job}.out").split()
            found[way].append(float(words[words.index("iteration_ms") + 1]))
            tell(f"two GPUs, {way}: {found[way][-1]:.2f} ms")
    return found


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: round(median(run[name] for run in runs), 3) for name in runs[0]}


def measure_speed(folder: Path, seconds: float) -> list[tuple[Block, Block]]:
    """Blocks of a member and of `muri run` alone, in turns."""
    with ways(folder) as found:
        trainers = [Trainer(name, found[name], folder) for name in ("member", "muri run")]
        try:
            for trainer in trainers:
                trainer.train(*CALIBRATION)  # imports, caches, and the group's own measuring
            pairs, end_s = [], time.monotonic() + seconds
            while time.monotonic() < end_s:
                member, alone = (trainer.train(*BLOCK) for trainer in trainers)
                pairs.append((member, alone))
            return pairs
        finally:
            for trainer in trainers:
                trainer.close()


def figures(
    waits: Mapping[str, Sequence[Mapping[str, float]]],
    pairs: Sequence[tuple[Block, Block]],
    ranks: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """What was measured."""
    more_ms = [joinable - plain for plain, joinable in zip(ranks["plain"], ranks["joinable"], strict=True)]
    return {
        "ranks_ms": {way: round(median(runs), 2) for way, runs in ranks.items()},
        "ranks_more_ms": spread(more_ms),
        "rounds": len(waits["plain"]),
        "seconds": {way: medians(runs) for way, runs in waits.items()},
        "blocks": len(pairs),
        "iteration_ms": round(median(alone[1] for _, alone in pairs) * 1e3, 2),
        "more_ms": spread([(member[1] - alone[1]) * 1e3 for member, alone in pairs]),
    }


def bars(found: Mapping[str, Any]) -> list[Bar]:
    """What the figures have to reach."""
    plain, joinable = found["seconds"]["plain"], found["seconds"]["joinable"]
    later_s, freed_s = joinable["script_s"] - plain["script_s"], joinable["free_s"] - plain["free_s"]
    return [
        _bar("seconds that the training script begins later", later_s, LATEST_SCRIPT_S),
        _bar("seconds that the GPU is free later", freed_s, LATEST_FREE_S),
        _bar("milliseconds that an iteration takes more", found["more_ms"]["median"], MOST_MORE_MS),
        _bar(
            "milliseconds that an iteration on two GPUs takes more",
            found["ranks_more_ms"]["median"],
            MOST_MORE_MS_OF_RANKS,
        ),
    ]


def _bar(what: str, value: float, limit: float) -> Bar:
    return Bar("joinable", what, round(value, 4), f"< {limit:g}", value < limit)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=8, show_default=True, help="How many starts of each way.")
@click.option("--seconds", default=30.0, show_default=True, help="How long blocks are trained.")
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@click.option("--write/--no-write", "stored", default=False, help="Keep it in benchmarks/results/joinable.json.")
def main(rounds: int, seconds: float, as_json: bool, stored: bool) -> None:
    """Measure what being joinable costs; exit with 1 if a bar is missed. Ten minutes; leave the machine alone."""
    with cluster(1) as driver:
        waits = measure_waits(driver, rounds)
    with cluster(2) as driver:
        ranks = measure_ranks(driver, rounds)
    with tempfile.TemporaryDirectory(prefix="muri-", dir="/tmp") as name:
        pairs = measure_speed(Path(name), seconds)
    result = figures(waits, pairs, ranks)
    if not as_json:
        tell(json.dumps(result, indent=1))
    finish(RESULT, {"joinable": result}, bars(result), stored=stored, as_json=as_json)


if __name__ == "__main__":
    main()
