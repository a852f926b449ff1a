"""Which of a job's tasks this process is, and what `torch.distributed` needs to know of it.

`srun` starts one task per GPU and numbers them; so does torchrun (`torchrun --no-python … muri run train.py`).
"""

from collections.abc import Mapping
from typing import Final

FIRST_PORT: Final = 15000
PORTS: Final = 15000
"""Derived MASTER_PORTs lie below the range from which Linux gives ports to connections (32768 and up)."""


def task_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """The process's rank and the number of ranks: torch's own variables, else those of srun; (0, 1) alone.

    In a batch script itself Slurm sets the variables of a step's tasks too, as the only one of them.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        values = environment.get(rank, ""), environment.get(size, "")
        if all(value.isdecimal() for value in values):
            return int(values[0]), int(values[1])
    return 0, 1


def missing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR (the step's first node) and MASTER_PORT (derived from job and step) where a task lacks them.

    RANK and WORLD_SIZE are left to the script: a step of several tasks need not be one distributed training.
    """
    if task_of(environment)[1] < 2:
        return {}
    wanted = {"MASTER_ADDR": _first_node(environment), "MASTER_PORT": str(_port(environment))}
    return {name: value for name, value in wanted.items() if name not in environment}


def _first_node(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    if not nodes:
        return "127.0.0.1"
    from ClusterShell.NodeSet import NodeSet  # (only when needed)

    return str(NodeSet(nodes)[0])


def _port(environment: Mapping[str, str]) -> int:
    job, step = (int(environment.get(name, "0") or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return FIRST_PORT + (job * 37 + step % 1000) % PORTS
