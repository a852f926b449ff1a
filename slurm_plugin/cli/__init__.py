"""Commands of muri that read or change a site's Slurm; here the options and arguments that several have."""

from pathlib import Path
from typing import Final

import click

from muri.errors import UsageError

CONFIG_OPTION = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Configuration file. [default: $MURI_CONFIG or /etc/muri/muri.yaml]",
)

_LONGEST_ID: Final = 10
"""Digits of a job id."""


def job_id_in(name: str) -> int:
    """Return the job id in a job's name, of a job array's task the array's; a UsageError for another text."""
    array = name.partition("_")[0]
    if not (array.isascii() and array.isdecimal() and len(array) <= _LONGEST_ID):
        raise UsageError(f"{name!r} is not a job id. Use 4711, or 4711_3 for an array task")
    return int(array)
