"""Which GPUs running jobs have: Slurm 26.05 tells it of jobs (`scontrol --details show job`) and no longer of nodes."""

import re
from collections.abc import Iterator
from typing import Final

from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.gateway.text_fields import indices_in

_SHARE: Final = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES=(\S*)")
"""What a job has on some of its nodes.

A user's own texts could hold the same words: who believes it compares the number of GPUs with the nodes' table.
"""

_AT_WORK: Final = (" JobState=RUNNING ", " JobState=SUSPENDED ", " JobState=COMPLETING ")

Held = tuple[str, tuple[int, ...]]
"""A folded host list, and Slurm's indices of the GPUs that a job has on each of these nodes."""


def read_gpus_in_use(commands: SlurmCommands) -> tuple[Held, ...]:
    """Return which GPUs running jobs have.

    Raises:
        GatewayError: Slurm cannot be asked.
    """
    show = ["scontrol", "--all", "--details", "--oneliner", "show", "job"]
    return tuple(held_in(commands.run("read which GPUs are in use", show)))


def held_in(text: str) -> Iterator[Held]:
    """Read what `scontrol --details --oneliner show job` prints."""
    for line in text.split("\n"):
        if any(state in line for state in _AT_WORK):
            found = ((nodes, indices_in(gres)) for nodes, gres in _SHARE.findall(line))
            yield from ((nodes, indices) for nodes, indices in found if indices)
