"""Choose and open the gateway."""

import logging
from typing import Literal

from muri.slurm_plugin.command_gateway import CommandGateway
from muri.slurm_plugin.gateway import Gateway, GatewayUnavailableError
from muri.slurm_plugin.pyslurm_gateway import PyslurmGateway

log = logging.getLogger(__name__)

GatewayKind = Literal["auto", "pyslurm", "command"]
GATEWAY_KINDS: tuple[GatewayKind, ...] = ("auto", "pyslurm", "command")


def open_gateway(kind: GatewayKind = "auto") -> Gateway:
    """Open the way to Slurm that the configuration names.

    Args:
        kind: "pyslurm", "command", or "auto": pyslurm where it works, else the commands, with one logged line.

    Raises:
        GatewayUnavailableError: It cannot work on this machine; the text says what to do.
        SlurmUnreachableError: slurmctld does not answer.
    """
    if kind not in GATEWAY_KINDS:
        raise GatewayUnavailableError(f"gateway {kind!r} is unknown: choose one of {', '.join(GATEWAY_KINDS)}")
    if kind == "command":
        return CommandGateway()
    try:
        return PyslurmGateway(helper=_helper())
    except GatewayUnavailableError as err:
        if kind == "pyslurm":
            raise
        log.warning("using the command gateway: %s", err)
        return CommandGateway()


def _helper() -> CommandGateway | None:
    try:
        return CommandGateway()
    except GatewayUnavailableError as err:
        log.warning("Slurm's commands cannot be used beside pyslurm: %s", err)
        return None
