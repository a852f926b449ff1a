"""A script that leaves while gloo still works ends with its own exit code."""

import subprocess

from launcher_harness import MURI

LEAVES_AT_ONCE = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
for _ in range(300):
    dist.all_reduce(torch.zeros(1), async_op=True)
sys.exit(5)
"""
TASK_OF_TWO = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1"}


def run_as_task_of_two(launcher, text):
    command, environment = [*MURI, "run", launcher.script(text)], launcher.environment | TASK_OF_TWO
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_a_script_in_a_hurry_keeps_its_exit_code(launcher):
    done = run_as_task_of_two(launcher, LEAVES_AT_ONCE)
    assert done.returncode == 5, done.stderr


def test_a_script_without_gloo_does_not_wait(launcher):
    done = run_as_task_of_two(launcher, "import sys\nsys.exit(3)\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
