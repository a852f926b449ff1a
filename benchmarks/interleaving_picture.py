"""Draws docs/images/interleaving.png from a real run: the four examples in one runtime.

python -m benchmarks.interleaving_picture                # 10 seconds of training, one picture
python -m benchmarks.interleaving_picture --out /tmp/x.png --discipline lockstep
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from muri.launcher.telemetry.timeline import Captions, busiest_moment_s, draw
from muri.launcher.telemetry.trace_reader import read_slices

CHECKOUT = Path(__file__).parents[1]
NAMES = {"101": "storage", "102": "network", "103": "cpu", "104": "gpu"}
START_LIMIT_S = 60.0


def record(folder: Path, discipline: str, iterations: int) -> Path:
    """Train the four examples in one runtime and return its trace."""
    trace, status, run_dir = folder / "trace.json", folder / "status.json", folder / "run"
    command = [sys.executable, "-m", "muri.launcher.runtime", "--members", ",".join(NAMES), "--run-dir", str(run_dir)]
    command += ["--discipline", discipline, "--trace", str(trace), "--status-file", str(status)]
    with subprocess.Popen(command) as runtime:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not status.exists() and runtime.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        jobs = [_start(job_id, kind, run_dir, iterations) for job_id, kind in NAMES.items()]
        codes = [job.wait() for job in jobs]
        runtime.terminate()
    if any(codes):
        raise SystemExit(f"a job failed: exit codes {codes}")
    return trace


def _start(job_id: str, kind: str, run_dir: Path, iterations: int) -> "subprocess.Popen[bytes]":
    script = CHECKOUT / "examples" / f"train_{kind}.py"
    command = [str(Path(sys.executable).with_name("muri")), "run", str(script), "--iterations", str(iterations)]
    variables = os.environ | {"SLURM_JOB_ID": job_id, "MURI_RUN_DIR": str(run_dir)}
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
