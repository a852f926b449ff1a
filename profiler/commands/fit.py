"""`muri profile fit`."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import click

from muri.profiler.commands.options import console, json_option, open_store, store_option, wanted_options
from muri.profiler.interference.errors import FitError
from muri.profiler.interference.fits import (
    KIND,
    LinearFit,
    communication_name,
    computation_name,
    fit_communication,
    fit_computation,
)
from muri.profiler.lookup import Wanted, find_all
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import Document
from muri.profiler.times import now_text

SAMPLE: Final = "sample"
MIB: Final = "MiB"

Fits = dict[str, tuple[str, LinearFit]]
"""By the name of its document: unit and line."""


@click.command("fit", short_help="Fit a model's times to batch size and gradient size.")
@wanted_options
@store_option
@json_option
def fit_command(wanted: Wanted, store_path: Path | None, as_json: bool) -> None:
    """Fit lines through the measured profiles of MODEL: how its times grow.

    t_comp = α + β·batch: from profiles of MODEL with at least two batch sizes, for each GPU
    count and type. t_comm = α' + β'·MiB: for the same GPU count and type, from the gradient
    sizes of all models. Both are stored for the planner. Estimates are left out.

    \b
    Examples:
      muri profile fit resnet18
      muri profile fit resnet18 --gpus 1 --gpu-type a100 --json
    """
    with open_store(store_path, existing=True) as store:
        profiles = store.list()
        keys = set(find_all((item.key for item in profiles), wanted))
        fits = _fits([item for item in profiles if item.key in keys], profiles)
        now = now_text()
        for name, (unit, line) in fits.items():
            store.put_document(KIND, Document(name, now, {"unit": unit, **line.to_dict()}))
    if as_json:
        document = {name: {"unit": unit, **line.to_dict()} for name, (unit, line) in fits.items()}
        click.echo(json.dumps({"fits": document}, indent=2, ensure_ascii=False))
        return
    from muri.profiler.interference.render import print_fit  # -- rich takes a while to load

    for name, (unit, line) in fits.items():
        print_fit(console(), name, unit, line)


def _fits(chosen: list[StageProfile], every: Sequence[StageProfile]) -> Fits:
    """All lines that the profiles determine.

    Raises:
        FitError: None; the text says what is missing.
    """
    fits: Fits = {}
    reasons: list[str] = []
    for key, group in groupby(sorted(chosen, key=_place), key=_place):
        members = list(group)
        first = members[0].key
        try:
            fits[computation_name(first)] = (SAMPLE, fit_computation(members))
        except FitError as error:
            reasons.append(f"{computation_name(first)}: {error}")
        beside = [item for item in every if _place(item) == key]
        try:
            fits[communication_name(first)] = (MIB, fit_communication(beside))
        except FitError as error:
            if first.gpu_count > 1:
                reasons.append(f"{communication_name(first)}: {error}")
    if not any(unit == SAMPLE for unit, _ in fits.values()):
        raise FitError("\n".join((*reasons, "Measure other batch sizes: muri profile run --batch-size …")))
    for reason in reasons:
        click.echo(f"muri: left out: {reason}", err=True)
    return fits


def _place(item: StageProfile) -> tuple[int, str]:
    key: ProfileKey = item.key
    return (key.gpu_count, key.gpu_type)
