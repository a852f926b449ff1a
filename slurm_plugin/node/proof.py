"""The proof that the SPANK plugin works on a node: without it no member would get GPUs there, nor lose them at the end.

slurmd runs the plugin's prolog, which leaves a file of root's about each job with GPUs, only where it runs the epilog
as well. As a program, this looks on its own node: a pilot job of several nodes runs it on each of them.
"""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muri.slurm_plugin.private_files import ROOT_UID

FOLDER: Final = Path("/run/muri/node")

MISSING: Final = 3
"""The program's exit code without the proof: srun's own failures have others."""

_MOST_BYTES: Final = 65536


def why_missing(environment: Mapping[str, str], folder: Path = FOLDER, owner: int = ROOT_UID) -> str:
    """Return why members cannot get the GPUs of this job on this node; "" where the plugin has opened the way."""
    node = environment.get("SLURMD_NODENAME", "")
    path = folder / node / f"job-{environment.get('SLURM_JOB_ID', '')}"
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            facts = os.fstat(file.fileno())
            lines = file.read(_MOST_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        return (
            f"Muri's SPANK plugin is not loaded by slurmd on node {node} ({path}: {error.strerror}; "
            "docs/troubleshooting.md)"
        )
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} on node {node} is not a file of root's alone (docs/troubleshooting.md)"
    values = dict(line.partition("=")[::2] for line in lines)
    if values.get("uid") != str(os.geteuid()) or not values.get("gpus"):
        return f"{path} on node {node} tells of no GPUs of this user's job (docs/troubleshooting.md)"
    return ""


if __name__ == "__main__":
    why = why_missing(os.environ)
    print(why, file=sys.stderr, end="\n" if why else "")
    sys.exit(MISSING if why else 0)
