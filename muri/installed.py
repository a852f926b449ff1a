"""How Muri was installed here: it decides which Python modules are missing, and what brings them.

The packages muri-node and muri-controller bring environments of their own, into which pip installs nothing. Elsewhere
pip has installed Muri, and extras bring more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

THE_LAB: Final = "pip install ./lab in Muri's checkout, into the environment of this muri"
"""What brings the distribution muri-lab and the Python modules that only it needs."""

OF_THE_CONTROLLER: Final = frozenset({"highspy", "networkx", "numpy", "prometheus_client", "rustworkx", "scipy"})
"""Modules of Muri's dependencies that the package muri-node leaves out."""

_PACKAGES: Final = Path("/usr/lib/muri")


def is_packaged(place: Path = Path(__file__)) -> bool:
    """Whether this Muri comes from its own .deb or .rpm.

    Args:
        place: A file of this Muri.
    """
    return place.is_relative_to(_PACKAGES)


def what_brings(extra: str, package: str = "") -> str:
    """Say how a Python module comes here that only an extra of Muri has.

    Args:
        extra: The extra.
        package: Muri's .deb or .rpm that has the module, too; "" where none has.
    """
    if is_packaged() and package:
        return f"the package {package} brings it"
    if is_packaged():
        return (
            "Muri's packages leave it out: install Muri from its checkout into an environment of your own "
            f"(`pip install '.[{extra}]'`) and use the muri of that one"
        )
    return f"pip install 'muri[{extra}]'"


def what_plans(module: str) -> str:
    """Say where a command works that needs one of `OF_THE_CONTROLLER`."""
    return (
        f"needs the Python module {module}, which is not here: run it where the package muri-controller is installed, "
        "or in an environment into which pip has installed Muri"
    )
