"""Commands for models that share GPUs plainly (SJF-BSBF): `muri-lab pair` and `muri-lab fit`."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muri.clock import age, now_text
from muri.errors import UsageError
from muri.profiler.commands.stored import (
    console,
    echo_json,
    json_option,
    open_store,
    read_if_any,
    refuse_unwritable,
    store_option,
    wanted_options,
)
from muri.profiler.dryrun.runner import check_command
from muri.profiler.errors import FitError, NoSuchProfileError
from muri.profiler.interference import (
    FITS,
    Interference,
    LinearFit,
    Side,
    computation_name,
    every_pair,
    fit_computation,
    known_pairs,
    put,
)
from muri.profiler.lookup import Wanted, find_all, of_command
from muri.profiler.records import Document, ProfileKey, StageProfile
from muri.profiler.render import add_figures, milliseconds
from muri.profiler.slowdown import SLOWDOWNS, SlowdownFit, published_slowdown
from muri.profiler.store import ProfileStore
from muri_lab.interference.corun import Budget, measure_pair
from muri_lab.interference.fits import (
    Candidate,
    PairPoint,
    communication_name,
    expected,
    fit_communication,
    fit_slowdown,
    next_pairs,
    pair_points,
    r_squared,
)
from muri_lab.selectors import SELECTOR, key_for, selector

SECONDS_HELP: Final = "Measure at most so long, once both have warmed up."
STARTUP_HELP: Final = "Seconds that both may take to warm up."
PER_SAMPLE: Final = "sample"
PER_MIB: Final = "MiB"

Fits = dict[str, tuple[str, LinearFit]]  # The unit and the line, by the name of the line's document


class PairUsageError(UsageError):
    """The options or scripts of `muri-lab pair` do not make one pair."""


_SECONDS: Final = click.FloatRange(0, min_open=True)


@click.command("pair", short_help="Measure how two scripts slow each other down.")
@click.argument("scripts", nargs=-1, metavar="[A B]")
@click.option("--model-a", metavar=SELECTOR, help="What A is.  [default: its name and a fingerprint]")
@click.option("--model-b", metavar=SELECTOR, help="What B is.")
@click.option("--seconds", type=_SECONDS, default=30.0, show_default=True, help=SECONDS_HELP)
@click.option("--startup", type=_SECONDS, default=120.0, show_default=True, help=STARTUP_HELP)
@click.option("--no-store", is_flag=True, help="Only print the ratios.")
@click.option("--list", "listed", is_flag=True, help="List all pairs, measured and learned.")
@click.option("--next", "upcoming", is_flag=True, help="List the pairs of known models that are worth measuring.")
@click.option("--expect", is_flag=True, help=f"A and B are {SELECTOR}: what was measured of them, else an estimate.")
@store_option
@json_option
def pair_command(scripts: tuple[str, ...], store_path: Path | None, as_json: bool, **given: Any) -> None:
    """Measure how two scripts slow each other down, as plain processes on one device.

    A and B are scripts; quote them where they have arguments. Both are started, take turns
    alone and side by side for about half a minute, and are then ended. The ratio ξ of a model
    says how much longer its iteration takes beside the other: 1 is undisturbed.

    \b
    Examples:
      muri-lab pair train_a.py train_b.py
      muri-lab pair "train.py --lr 0.1" "-m my.training" --seconds 15
      muri-lab pair a.py b.py --model-a resnet18:64 --model-b bert:8
      muri-lab pair --list
      muri-lab pair --expect resnet18:64 bert:8
      muri-lab pair --next --json | jq -r '.pairs[0].a.model'
    """
    views = {"--list": given["listed"], "--next": given["upcoming"], "--expect": given["expect"]}
    _check_usage(scripts, [name for name, wanted in views.items() if wanted])
    if given["expect"]:
        _expect(scripts, store_path, as_json)
    elif given["listed"]:
        _list(read_if_any(store_path, every_pair), as_json)
    elif given["upcoming"]:
        pairs, keys = read_if_any(store_path, known_pairs), read_if_any(store_path, _profile_keys)
        _next(next_pairs(pairs, keys), as_json)
    else:
        _print_pairs([_measure(scripts, given, store_path)], as_json)


def _check_usage(scripts: tuple[str, ...], views: Sequence[str]) -> None:
    if len(views) > 1:
        raise PairUsageError(f"give {' or '.join(views)}, not both")
    if views and views[0] != "--expect":
        if scripts:
            raise PairUsageError(f"{views[0]} takes no scripts")
        return
    if len(scripts) != 2:
        raise PairUsageError(
            f"a pair is two models, not {len(scripts)}: muri-lab pair --expect resnet18:64 bert:8"
            if views
            else f"a pair is two scripts, not {len(scripts)}; quote a script that has arguments: "
            'muri-lab pair "a.py --lr 0.1" b.py. --list shows what was measured'
        )


def _profile_keys(store: ProfileStore) -> tuple[ProfileKey, ...]:
    return tuple(item.key for item in store.list())


def _measure(scripts: tuple[str, ...], given: Mapping[str, Any], store_path: Path | None) -> Interference:
    commands = [_split(script) for script in scripts]
    for command in commands:
        check_command(command)
    key_a, key_b = _keys(commands, (given["model_a"], given["model_b"]), store_path)
    if (key_a.gpu_count, key_a.gpu_type) != (key_b.gpu_count, key_b.gpu_type):
        raise PairUsageError(f"{key_a} and {key_b} cannot share GPUs: say the same GPUS and TYPE for both")
    if not given["no_store"]:
        refuse_unwritable(store_path)

    def tell(text: str) -> None:
        click.echo(f"muri: {text}", err=True)

    budget = Budget(given["seconds"], given["startup"])
    found = measure_pair(commands[0], commands[1], (key_a, key_b), budget=budget, tell=tell)
    if not given["no_store"]:
        with open_store(store_path) as store:
            put(store, found)
    return found


def _keys(commands: Iterable[Sequence[str]], models: Iterable[str | None], store_path: Path | None) -> list[ProfileKey]:
    """What each script is: as the user says, else its fingerprint."""
    known = read_if_any(store_path, _profile_keys, missing_ok=True)
    named = zip(commands, models, strict=True)
    return [key_for(known, selector(known, text) if text else Wanted(of_command(command))) for command, text in named]


def _split(script: str) -> list[str]:
    try:
        return shlex.split(script)
    except ValueError as error:
        raise PairUsageError(f"{script!r} is not a command line: {error}") from error


def _expect(models: tuple[str, ...], store_path: Path | None, as_json: bool) -> None:
    with open_store(store_path, read_only=True) as store:
        known = _profile_keys(store)
        key_a, key_b = (key_for(known, selector(known, text)) for text in models)
        found = expected(store, key_a, key_b)
    if found is None:
        unknown = [str(key) for key in (key_a, key_b) if key not in known]
        raise NoSuchProfileError(
            f"nothing is known of {' and of '.join(dict.fromkeys(unknown))}; measure a profile (muri profile run) or "
            "the pair (muri-lab pair A B)"
        )
    if as_json:
        echo_json(asdict(found))
        return
    sure = "" if found.confidence is None else f", {found.confidence * 100:.0f} % sure"
    for key, ratio in ((key_a, found.ratio_a), (key_b, found.ratio_b)):
        click.echo(f"{key}: {ratio:.2f} times as long ({found.source}{sure})")


def _list(pairs: tuple[Interference, ...], as_json: bool) -> None:
    if pairs or as_json:
        _print_pairs(pairs, as_json)
    else:
        click.echo("No pairs yet: measure one with `muri-lab pair A.py B.py`.")


def _print_pairs(pairs: Iterable[Interference], as_json: bool) -> None:
    if as_json:
        echo_json({"pairs": [asdict(item) for item in pairs]})
        return
    print_pairs(console(), tuple(pairs), datetime.now(UTC))


def _next(found: Sequence[Candidate], as_json: bool) -> None:
    if as_json:
        echo_json({"pairs": [asdict(item) for item in found]})
    elif found:
        print_candidates(console(), found)
    else:
        click.echo("No pair is left to measure: a pair needs two profiles of one GPU count and type.")


@click.command("fit", short_help="Fit a model's times to batch size and gradient size.")
@wanted_options
@store_option
@json_option
def fit_command(store_path: Path | None, as_json: bool, **given: Any) -> None:
    """Fit lines through the measured profiles of MODEL: how its times grow.

    t_comp = α + β·batch: from profiles of MODEL with at least two batch sizes, for each GPU
    count and type. t_comm = α' + β'·MiB: for the same GPU count and type, from the gradient
    sizes of all models. Both are stored for the planner. Estimates are left out.

    \b
    Examples:
      muri-lab fit resnet18
      muri-lab fit resnet18 --gpus 1 --gpu-type a100 --json
    """
    wanted = Wanted(**given)
    with open_store(store_path, existing=True) as store:
        profiles = store.list()
        keys = set(find_all((item.key for item in profiles), wanted))
        fits = _fit_all([item for item in profiles if item.key in keys], profiles)
        now = now_text()
        for name, (unit, line) in fits.items():
            store.put_document(FITS, Document(name, now, {"unit": unit, **asdict(line)}))
    if as_json:
        echo_json({"fits": {name: {"unit": unit, **asdict(line)} for name, (unit, line) in fits.items()}})
        return
    for name, (unit, line) in fits.items():
        print_fit(console(), name, unit, line)


def _fit_all(chosen: list[StageProfile], every: Sequence[StageProfile]) -> Fits:
    """All lines that the profiles determine."""
    fits: Fits = {}
    reasons: list[str] = []
    for key, group in groupby(sorted(chosen, key=_owned_place), key=_owned_place):
        members = list(group)
        first = members[0].key
        try:
            fits[computation_name(first)] = (PER_SAMPLE, fit_computation(members))
        except FitError as error:
            reasons.append(f"{computation_name(first)}: {error}")
        beside = [item for item in every if _place(item) == key[1:] and item.key.serves(first.user)]
        try:
            fits[communication_name(first)] = (PER_MIB, fit_communication(beside))
        except FitError as error:
            if first.gpu_count > 1:
                reasons.append(f"{communication_name(first)}: {error}")
    if not any(unit == PER_SAMPLE for unit, _ in fits.values()):
        raise FitError("\n".join((*reasons, "Measure other batch sizes: muri profile run --batch-size …")))
    for reason in reasons:
        click.echo(f"muri: left out: {reason}", err=True)
    return fits


def _owned_place(item: StageProfile) -> tuple[str, int, str]:
    return (item.key.user, *_place(item))


def _place(item: StageProfile) -> tuple[int, str]:
    return (item.key.gpu_count, item.key.gpu_type)


def print_pairs(console: Console, pairs: Sequence[Interference], now: datetime) -> None:
    """Two lines for each pair, one for each model."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MODEL", overflow="fold", min_width=10)
    add_figures(table, "ALONE", "SHARED", "RATIO", "±%", "SURE%", "AGE")
    table.add_column("FROM", no_wrap=True)
    for pair in pairs:
        came = f"{pair.source}{', turns' if pair.turns else ''}", f"  {pair.rounds} rounds"
        for side, mark, note in ((pair.a, "", came[0]), (pair.b, "+ ", came[1])):
            since = "" if mark else age(pair.measured_at, now)
            table.add_row(Text(mark + _short(side.key)), *_cells(side), since, note)
    console.print(table)
    console.print("Milliseconds per iteration; RATIO ξ: how much longer it takes beside the other.")


def print_candidates(console: Console, candidates: Sequence[Candidate]) -> None:
    """One line for each pair that is worth measuring."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("MODEL", "WITH"):
        table.add_column(name, overflow="fold", min_width=10)
    add_figures(table, "CHANCES", "SURE%")
    for item in candidates:
        sure = "-" if item.confidence is None else f"{item.confidence * 100:.0f}"
        table.add_row(Text(_short(item.a)), Text(_short(item.b)), str(item.chances), sure)
    console.print(table)


def print_fit(console: Console, title: str, unit: str, fit: LinearFit) -> None:
    """The line, and each point beside it."""
    console.print(Text(title, style="bold"))
    per_unit = f"{fit.per_unit_s * 1e3:.4g} ms per {unit}"
    console.print(
        f"  {fit.fixed_s * 1e3:.4g} ms + {per_unit}; R² {fit.r_squared:.3f}, residual {fit.residual_s * 1e3:.2g} ms"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    add_figures(table, f"  {unit.upper()}", "MEASURED MS", "LINE MS", "OFF")
    for point in fit.points:
        line_s = fit.seconds(point.size)
        off = f"{(line_s / point.seconds - 1) * 100:+.1f} %" if point.seconds else "-"
        table.add_row(f"{point.size:g}", milliseconds(point.seconds), milliseconds(line_s), off)
    console.print(table)


def _short(key: ProfileKey) -> str:
    return f"{key.name} b{key.batch_size or '?'} {key.gpu_count}×{key.gpu_type}"


def _cells(side: Side) -> tuple[str, str, str, str, str]:
    spread = "?" if side.spread is None else f"{side.spread * 100:.0f}"
    sure = f"{side.confidence * 100:.0f}"
    return milliseconds(side.solo_s), milliseconds(side.shared_s), f"{side.ratio:.2f}", spread, sure


_WEAK: Final = 0.5  # R² below which most of what slows jobs down has other causes than their use of the GPU


@click.command("slowdown", short_help="Fit how use slows jobs down on a GPU type, from measured pairs.")
@click.argument("gpu_type", metavar="GPU_TYPE")
@click.option("--no-store", is_flag=True, help="Only print the curve.")
@click.option("--forget", is_flag=True, help="Remove the stored curve; plans use the published ones again.")
@store_option
@json_option
def slowdown_command(gpu_type: str, no_store: bool, forget: bool, store_path: Path | None, as_json: bool) -> None:
    """Fit f, how use of the GPU slows jobs down, to the pairs measured on GPU_TYPE.

    The policies horus, horus-f and pab plan with it from the next cycle on, instead of the curves
    that were published for other GPUs. A pair counts once it was measured (`muri-lab pair`, or
    running jobs under muri-hybrid) and both models have measured profiles.

    \b
    Examples:
      muri-lab slowdown a100
      muri-lab slowdown a100 --no-store --json
      muri-lab slowdown a100 --forget
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
            store.put_document(SLOWDOWNS, Document(gpu_type, now_text(), asdict(fit)))
    published = r_squared(published_slowdown(gpu_type), points)
    if as_json:
        echo_json({"gpu_type": gpu_type, **asdict(fit), "r_squared_of_published": published})
        return
    click.echo(_text(gpu_type, fit, published, points))


def _forget(store: ProfileStore, gpu_type: str, as_json: bool) -> None:
    if not store.remove_document(SLOWDOWNS, gpu_type):
        stored = ", ".join(document.name for document in store.documents(SLOWDOWNS)) or "none"
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
        "Measure some: muri-lab pair --next"
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
