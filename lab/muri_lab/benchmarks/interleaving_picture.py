"""Draws docs/images/interleaving.png from a real run of 10 seconds: the four examples in one runtime."""

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from examples.demo.timeline import Captions, busiest_moment_s, draw, read_slices
from muri.group_spec import group_of
from muri_lab.benchmarks.runtime_process import MURI_RUN, as_member, start_runtime

CHECKOUT = Path(__file__).parents[3]
NAMES = {"101": "storage", "102": "network", "103": "cpu", "104": "gpu"}


def record(folder: Path, discipline: str, iterations: int) -> Path:
    """Train the four examples in one runtime and return its trace."""
    trace = folder / "trace.json"
    # The network job starts its peer, which no thread may.
    kept = {"network": "process"}
    members = [{"job_id": job_id, "isolation": kept.get(kind, "thread")} for job_id, kind in NAMES.items()]
    group = group_of({"members": members, "discipline": discipline})
    with start_runtime(folder, group, "--trace", str(trace)) as runtime:
        jobs = [_start(job_id, kind, folder, iterations) for job_id, kind in NAMES.items()]
        codes = [job.wait() for job in jobs]
        runtime.terminate()
    if any(codes):
        raise SystemExit(f"a job failed: exit codes {codes}")
    return trace


def _start(job_id: str, kind: str, folder: Path, iterations: int) -> "subprocess.Popen[bytes]":
    script = CHECKOUT / "examples" / f"train_{kind}.py"
    command = [*MURI_RUN, str(script), "--iterations", str(iterations)]
    variables = os.environ | as_member(folder, job_id)
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def main() -> None:
    """Record, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs" / "images" / "interleaving.png")
    parser.add_argument("--discipline", default="fair")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--span", type=float, default=0.8, help="seconds that are drawn (default: 0.8)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muri-") as name:
        slices = read_slices(record(Path(name), options.discipline, options.iterations))
    captions = Captions(f"Four PyTorch jobs in one runtime, discipline {options.discipline}", NAMES)
    draw(slices, busiest_moment_s(slices, options.span), options.span, options.out, captions)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
