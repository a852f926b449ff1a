"""`muri profile fit-slowdown`: f of Horus for a type of GPU, from the pairs measured there."""

from pathlib import Path
from typing import Final

import click

from muri.profiler.commands.options import echo_json, json_option, open_store, store_option
from muri.profiler.errors import FitError
from muri.profiler.interference.ratios import known_pairs, pair_points
from muri.profiler.interference.slowdown import published_slowdown
from muri.profiler.interference.slowdown_fits import KIND, PairPoint, SlowdownFit, fit_slowdown, r_squared
from muri.profiler.store import Document, ProfileStore
from muri.utc import now_text

_WEAK: Final = 0.5
"""R² below which most of what slows jobs down has other causes than their use of the GPU."""


@click.command("fit-slowdown", short_help="Fit how use slows jobs down on a GPU type, from measured pairs.")
@click.argument("gpu_type", metavar="GPU_TYPE")
@click.option("--no-store", is_flag=True, help="Only print the curve.")
@click.option("--forget", is_flag=True, help="Remove the stored curve; plans use the published ones again.")
@store_option
@json_option
def slowdown_command(gpu_type: str, no_store: bool, forget: bool, store_path: Path | None, as_json: bool) -> None:
    """Fit f, how use of the GPU slows jobs down, to the pairs measured on GPU_TYPE.

    The policies horus, horus-f and pab plan with it from the next cycle on, instead of the curves
    that were published for other GPUs. A pair counts once it was measured (`muri profile pair`, or
    running jobs under muri-hybrid) and both models have measured profiles.

    \b
    Examples:
      muri profile fit-slowdown a100
      muri profile fit-slowdown a100 --no-store --json
      muri profile fit-slowdown a100 --forget
    """
    if no_store and forget:
        raise click.UsageError("give --no-store or --forget, not both")
    with open_store(store_path, read_only=no_store, existing=not no_store) as store:
        if forget:
            _forget(store, gpu_type, as_json)
            return
        points = pair_points(store, gpu_type)
        if not points:
            raise FitError(_nothing(store, gpu_type))
        fit = fit_slowdown(points)
        if not no_store:
            store.put_document(KIND, Document(gpu_type, now_text(), fit.to_dict()))
    published = r_squared(published_slowdown(gpu_type), points)
    if as_json:
        echo_json({"gpu_type": gpu_type, **fit.to_dict(), "r_squared_of_published": published})
        return
    click.echo(_text(gpu_type, fit, published, points))


def _forget(store: ProfileStore, gpu_type: str, as_json: bool) -> None:
    if not store.remove_document(KIND, gpu_type):
        stored = ", ".join(document.name for document in store.documents(KIND)) or "none"
        raise FitError(f"no curve of {gpu_type} is stored; stored are: {stored}")
    if as_json:
        echo_json({"gpu_type": gpu_type, "forgotten": True})
    else:
        click.echo(f"The curve of {gpu_type} is removed.")


def _nothing(store: ProfileStore, gpu_type: str) -> str:
    types = sorted({pair.a.key.gpu_type for pair in known_pairs(store)} - {gpu_type})
    others = f"; there are pairs of: {', '.join(types)}" if types else ""
    return (
        f"no pair on {gpu_type} was measured whose models have measured profiles{others}. "
        "Measure some: muri profile pair --next"
    )


def _text(gpu_type: str, fit: SlowdownFit, published: float, points: tuple[PairPoint, ...]) -> str:
    curve = fit.curve
    lines = [
        f"{gpu_type}: f(x) = {curve.constant:.5g} {curve.linear:+.3g} x {curve.square:+.3g} x², x in % of a GPU",
        f"  R² {fit.r_squared:.2f} over {len(points)} jobs of {fit.pairs} pairs; the published curve: {published:.2f}",
        f"  measured from {fit.least_percent:.0f} to {fit.most_percent:.0f} %: "
        f"f = {curve(fit.least_percent):.2f} to {curve(fit.most_percent):.2f}",
    ]
    if fit.r_squared < _WEAK:
        lines.append("  R² is low: here jobs slow each other down for other reasons than their use of the GPU.")
    return "\n".join(lines)
