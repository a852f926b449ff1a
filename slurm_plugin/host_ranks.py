"""The host's step when a group has several GPUs: one runtime per GPU, one rank each."""

import os
import secrets
import socket
import subprocess
from typing import Any

KEY_VARIABLE = "MURI_GROUP_KEY"


def step_options(options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what srun and each runtime are told of the group's ranks.

    Slurm numbers the tasks; rank 0 is on the node where this host runs, which srun tells the others.
    """
    nodes, gpus = options["node_count"], options["gpus_per_node"]
    if nodes * gpus == 1:
        return ["--ntasks=1"], []
    step = [f"--nodes={nodes}", f"--ntasks={nodes * gpus}", f"--ntasks-per-node={gpus}", "--distribution=block"]
    return step, ["--world-size", str(nodes * gpus), "--order-port", str(free_port())]


def free_port() -> int:
    """Return a TCP port of this node that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start the step, with a fresh key by which its ranks know each other."""
    environment = os.environ | {KEY_VARIABLE: secrets.token_hex(32)}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
