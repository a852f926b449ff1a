"""The shell's completion of `muri profile`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from profile_builders import make_profile

from muri.profiler.store import ProfileStore

NAMED_LIKE_A_PATH = "ann:/home/ann/runs:sbatch train.sh"


@pytest.fixture(autouse=True)
def path(path):
    with ProfileStore(path) as store:
        store.put_all(
            (
                make_profile("resnet18", synchronize_s=0.0),
                make_profile("resnet18", gpu_count=2, synchronize_s=0.02, iteration_s=0.5),
                make_profile("gpt2", batch_size=4, gpu_type="a100", synchronize_s=0.0),
                make_profile(NAMED_LIKE_A_PATH, batch_size=0),
            )
        )
    return path


def complete(path, *words):
    """What bash offers for the last word, by the function that click's script for bash defines."""
    bash = shutil.which("bash")
    assert bash
    script = 'eval "$(_MURI_COMPLETE=bash_source muri)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
    script += "_muri_completion muri; printf '%s\\n' \"${COMPREPLY[@]}\""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": search, "MURI_PROFILES": str(path)}
    done = subprocess.run(
        [bash, "-c", script, "bash", *words], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes_commands_options_and_models(path):
    assert complete(path, "muri", "prof") == ["profile"]
    assert complete(path, "muri", "profile", "p") == ["publish"]
    assert complete(path, "muri", "profile", "show", "re") == ["resnet18"]
    assert complete(path, "muri", "profile", "show", "ann") in ([], [""])  # its name has blanks
    assert complete(path, "muri", "profile", "show", "gpt2", "--gpu-type", "") == ["a100", "gpu"]
    assert complete(path, "muri", "profile", "show", "--gp") == ["--gpus", "--gpu-type"]
    assert complete(path.with_name("none.db"), "muri", "profile", "show", "re") in ([], [""])
