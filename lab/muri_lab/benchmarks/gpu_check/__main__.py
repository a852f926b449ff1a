"""Measures Muri on this machine's GPU, in parts of a minute or so; the most telling ones come first.

    scripts/gpu-check                     # all parts, eight minutes at most; leave the machine alone
    scripts/gpu-check --parts losses errors --out /tmp/check
    scripts/gpu-check --smoke             # no GPU: all parts in tiny sizes on the CPU

Each part writes gpu-NAME.json as soon as it has a figure, so what is stopped costs one part. No setting of the GPU is
changed. `python -m muri_lab.benchmarks.pages` brings the results that are kept into the docs.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from muri_lab.benchmarks.bars import describe_machine
from muri_lab.benchmarks.gpu_check.check import Check
from muri_lab.benchmarks.gpu_check.parts import PARTS, do_parts
from muri_lab.benchmarks.job_runs import write_random_file
from muri_lab.benchmarks.runtime_process import BenchmarkError

ROOT = Path(__file__).resolve().parents[4]
LIMIT_S = 480.0
DATA_MIB, SMOKE_DATA_MIB = 512, 4


_FACTS = """
import json, sys, time
begin = time.perf_counter()
import torch
loaded = time.perf_counter()
found = {"torch": torch.__version__, "import_s": round(loaded - begin, 2)}
if sys.argv[1] == "cpu":
    found["gpu"] = None
elif torch.cuda.is_available():
    layer = torch.nn.Conv2d(3, 8, 3).cuda()
    layer(torch.rand(2, 3, 32, 32, device="cuda")).sum().backward()
    (torch.rand(64, 64, device="cuda") @ torch.rand(64, 64, device="cuda")).sum().item()
    found["first_use_s"] = round(time.perf_counter() - loaded, 2)
    properties = torch.cuda.get_device_properties(0)
    found["gpu"] = properties.name
    found["gpu_mem_gib"] = round(properties.total_memory / 2**30, 1)
    found["cuda"] = torch.version.cuda
print(json.dumps(found))
"""
"""Run by a fresh process. It also brings PyTorch and CUDA's libraries into the page cache."""


def facts(*, smoke: bool) -> dict[str, Any]:
    """PyTorch, the GPU, and how long the first process took to use it."""
    command = [sys.executable, "-c", _FACTS, "cpu" if smoke else "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{sys.executable} cannot use PyTorch; PYTHON=/path/to/python3 names another one.\n"
                             f"{done.stderr.strip()[-600:]}")  # fmt: skip
    found = dict(json.loads(done.stdout.splitlines()[-1]))
    if "gpu" not in found:
        raise BenchmarkError(
            f"PyTorch {found['torch']} finds no GPU here. Run this where there is one (srun --gres=gpu:1 …), with "
            "PyTorch's CUDA build; --smoke tries all parts in tiny sizes on the CPU"
        )
    return found


def check_all(options: argparse.Namespace) -> int:
    """Do the parts that are asked for, one after the other; returns the exit code."""
    begin_s, limit_s = time.monotonic(), options.limit_s or (math.inf if options.smoke else LIMIT_S)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe_machine() | ({"commit": options.commit} if options.commit else {}),
        **facts(smoke=options.smoke),
    }
    print(f"gpu-check: {head['gpu'] or 'no GPU, tiny sizes'}, PyTorch {head['torch']}; results in {out}", flush=True)
    if options.smoke:
        os.environ["OMP_NUM_THREADS"] = "1"  # threads that spin would take the cores from the other members
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.data) as folder:
        os.chdir(folder)  # in the checkout, `import muri` would not find the other rooms
        check = Check(out, Path(folder), options.smoke, head)
        write_random_file(check.data / "images.bin", SMOKE_DATA_MIB if check.smoke else DATA_MIB)
        failed = do_parts(check, options.parts, begin_s + limit_s)
        os.chdir(ROOT)
    if failed:
        print(f"\ngpu-check: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main() -> int:
    """Read the options and run the check."""
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "out" / "gpu-check", help="where the results go (default: out/gpu-check)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--smoke", action="store_true", help="tiny sizes on the CPU: does everything run?")
    add("--limit-s", type=float, help=f"seconds for all parts together (default: {LIMIT_S:g}, with --smoke none)")
    add("--data", type=Path, default=ROOT, help="directory on the disk that samples are read from (default: checkout)")
    add("--commit", help="commit of the results, for a copy without .git")
    options = parser.parse_args()
    try:
        return check_all(options)
    except BenchmarkError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gpu-check: interrupted; what was measured by then is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
