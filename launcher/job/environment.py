"""The surroundings of a script's process: variables about its job, and the processes that it has started.

`srun` starts one task per GPU and numbers them; so does torchrun (`torchrun --no-python … muri run train.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import UsageError

FIRST_PORT: Final = 15000
PORTS: Final = 15000
"""Derived MASTER_PORTs lie below the range from which Linux gives ports to connections (32768 and up)."""

AGENT_VARIABLE: Final = "MURI_AGENT_PID"
"""Tells a rank which process of torchrun has started it."""

ATTACH_TIMEOUT_VARIABLE: Final = "MURI_ATTACH_TIMEOUT_S"
REQUEUE_WAIT_VARIABLE: Final = "MURI_REQUEUE_WAIT_S"
HANG_TIMEOUT_VARIABLE: Final = "MURI_HANG_TIMEOUT_S"
DURATIONS_S: Final = {ATTACH_TIMEOUT_VARIABLE: 120.0, REQUEUE_WAIT_VARIABLE: 60.0, HANG_TIMEOUT_VARIABLE: 900.0}
"""How long a member waits for its group's runtime, and a process for Slurm to end it after its job was requeued; after
how long without a sign of life a member is ended, 0: never. In seconds, where the variable is not set."""

STEPS_VARIABLE: Final = "MURI_ACCUMULATE_STEPS"
"""The scheduler's choice; it has no effect on a script that doesn't call `muri.accumulate`."""


def task_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """The process's rank and the number of ranks: torch's own variables, else those of srun; (0, 1) alone.

    Slurm sets a step's variables in a batch script too, as for the only task of a step.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        values = environment.get(rank, ""), environment.get(size, "")
        if all(value.isdecimal() for value in values):
            return int(values[0]), int(values[1])
    return 0, 1


def run_of(environment: Mapping[str, str]) -> int:
    """How often the job was requeued before this run."""
    text = environment.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def missing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR (the step's first node) and MASTER_PORT (derived from job and step) where a task lacks them.

    RANK and WORLD_SIZE are left to the script: a step of several tasks need not be one distributed training.
    """
    if task_of(environment)[1] < 2:
        return {}
    job, step = (int(environment.get(name, "0") or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = FIRST_PORT + (job * 37 + step % 1000) % PORTS
    nodes, first = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST"), "127.0.0.1"
    if nodes:
        from ClusterShell.NodeSet import NodeSet  # slow to import, and rarely needed

        first = str(NodeSet(nodes)[0])
    wanted = {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
    return {name: value for name, value in wanted.items() if name not in environment}


def seconds_of(environment: Mapping[str, str], name: str, default_s: float | None = None) -> float:
    """Return the seconds that a variable of `DURATIONS_S` holds; without it `default_s`, or what stands there."""
    text, default_s = environment.get(name), DURATIONS_S[name] if default_s is None else default_s
    if not text:
        return default_s
    try:
        value_s = float(text)
    except ValueError:
        value_s = -1.0
    if not 0 <= value_s < math.inf:
        hint = ", or 0 to wait forever" if name == HANG_TIMEOUT_VARIABLE else ""
        raise UsageError(f"{name}={text!r} is not a number of seconds ≥ 0; give for example {default_s:g}{hint}")
    return value_s


def wait_for_end(environment: Mapping[str, str], clock: Clock = MACHINE_CLOCK) -> None:
    """Wait for Slurm to end this process after its job was requeued."""
    clock.sleep(seconds_of(environment, REQUEUE_WAIT_VARIABLE))


class AccumulateError(UsageError, ValueError):
    """A number of micro-batches, or a batch, that makes no sense."""


def chosen_steps() -> int:
    """The scheduler's number of micro-batches; 1 without one. A malformed one costs the micro-batches, not the run."""
    value = os.environ.get(STEPS_VARIABLE) or "1"
    if value.isascii() and value.isdigit() and int(value) > 0:
        return int(value)
    print(f"muri: {STEPS_VARIABLE}: {value!r} is not a number of micro-batches; batches stay whole", file=sys.stderr)
    return 1


leaves_steps_to_scheduler: Final = threading.Event()
"""Set once the script leaves the number of micro-batches to the scheduler."""


MURIS_OWN: Final = "muri-looks"
"""The kernel's name for a thread of Muri's own in a script's process, whose work is not the script's."""


def name_as_muris_own() -> None:
    """Give the calling thread that name, which other processes can read."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(MURIS_OWN)


def threads_of(pid: int) -> list[Path]:
    """All threads of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def stat_of(task: Path) -> tuple[str, list[str]]:
    """The name of a thread or process, given as its directory in /proc, and the fields of proc(5) from its state on."""
    named, _, rest = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    return named.partition("(")[2], rest.split()


def descendants_of(root: int) -> Iterator[int]:
    """All processes that descend from one and still exist; parents come before their children."""
    waiting = [root]
    while waiting:
        for thread in threads_of(waiting.pop(0)):
            with contextlib.suppress(OSError):
                children = list(map(int, (thread / "children").read_text().split()))
                yield from children
                waiting.extend(children)
