"""Which GPUs running jobs have: Slurm 26.05 tells it of jobs (`scontrol --details show job`) and no longer of nodes."""

import re
from typing import Final

from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.gpu_islands import indices_in
from muri.slurm_plugin.records.host_lists import HostListError, names_in

_SHARE: Final = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES=(\S*)")
"""What a job has on some of its nodes.

A user's own texts could hold the same words: who believes it compares the number of GPUs with the nodes' table.
"""


def read_gpus_in_use(commands: SlurmCommands) -> dict[str, tuple[int, ...]]:
    """Return Slurm's indices of the GPUs that running jobs have, by node.

    Raises:
        GatewayError: Slurm cannot be asked.
    """
    show = ["scontrol", "--all", "--details", "--oneliner", "show", "job"]
    return gpus_in(commands.run("read which GPUs are in use", show))


def gpus_in(text: str) -> dict[str, tuple[int, ...]]:
    """Read what `scontrol --details --oneliner show job` prints."""
    found: dict[str, set[int]] = {}
    for line in text.split("\n"):
        if " JobState=RUNNING " in line or " JobState=SUSPENDED " in line or " JobState=COMPLETING " in line:
            for nodes, gres in _SHARE.findall(line):
                indices = indices_in(gres)
                for name in _names(nodes) if indices else ():
                    found.setdefault(name, set()).update(indices)
    return {name: tuple(sorted(indices)) for name, indices in found.items()}


def _names(nodes: str) -> frozenset[str]:
    try:
        return names_in(nodes)
    except HostListError:
        return frozenset()
