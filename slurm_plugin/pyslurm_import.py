"""Import pyslurm late, and make sure that it fits the Slurm it is to speak to."""

import importlib
from collections.abc import Mapping
from typing import Any

from muri.slurm_plugin.gateway import GatewayUnavailableError

#: pyslurm's release → releases of libslurm that it was seen to build for and to work with.
COMPATIBLE: Mapping[str, tuple[str, ...]] = {"25.11": ("25.11", "26.05")}

_WHAT_TO_DO = (
    "Rebuild pyslurm against the libslurm of this machine (`pip install --force-reinstall --no-cache-dir "
    "--no-binary :all: pyslurm==<Slurm's release>.*`), or set `gateway: command` in muri.yaml"
)


def import_pyslurm() -> Any:
    """Return the module pyslurm.

    Raises:
        GatewayUnavailableError: It is missing, or cannot be loaded on this machine.
    """
    try:
        return importlib.import_module("pyslurm")
    except ModuleNotFoundError as err:
        if err.name != "pyslurm":
            raise GatewayUnavailableError(f"pyslurm cannot be imported: {err}. {_WHAT_TO_DO}") from err
        raise GatewayUnavailableError(
            "pyslurm is not installed for this Python. Install it (`pip install muri[slurm]`, which needs Slurm's "
            "headers), or set `gateway: command` in muri.yaml"
        ) from err
    except (ImportError, OSError, AttributeError) as err:
        raise GatewayUnavailableError(f"pyslurm cannot be imported: {err}. {_WHAT_TO_DO}") from err


def release(version: str) -> str:
    """Return a version's release: "25.11" of "25.11.2"."""
    return ".".join(version.split(".")[:2])


def check_library(pyslurm_version: str, library: str) -> None:
    """Refuse a pyslurm that was not made for the libslurm in this process.

    The structures that both share differ from release to release; a mismatch reads wrong memory. The dynamic
    linker catches most of them, for libslurm's file name changes as well.

    Args:
        pyslurm_version: Such as "25.11.2".
        library: libslurm's release such as "26.05", "" when it is newer than Muri and cannot be judged.

    Raises:
        GatewayUnavailableError: They don't fit.
    """
    fits = COMPATIBLE.get(release(pyslurm_version), (release(pyslurm_version),))
    if library and library not in fits:
        raise GatewayUnavailableError(
            f"pyslurm {pyslurm_version} was made for Slurm {' or '.join(fits)}, but libslurm here is of Slurm "
            f"{library}. {_WHAT_TO_DO}"
        )


def check_controller(slurmctld_version: str, library: str) -> None:
    """Refuse a libslurm newer than slurmctld, which Slurm does not support.

    Raises:
        GatewayUnavailableError: It is newer.
    """
    if library and _order(slurmctld_version) < _order(library):
        raise GatewayUnavailableError(
            f"libslurm is of Slurm {library}, newer than slurmctld {slurmctld_version}, and Slurm serves clients of "
            "its own or an older release only. Install the client packages of slurmctld's release, or set "
            "`gateway: command` in muri.yaml and give it commands of that release"
        )


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release(version).split(".") if part.isdigit())
