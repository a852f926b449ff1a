"""`muri profile pair`."""

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Final

import click

from muri.errors import UsageError
from muri.profiler.commands.options import console, json_option, open_if_any, open_store, store_option
from muri.profiler.errors import NoSuchProfileError
from muri.profiler.fingerprint import of_command
from muri.profiler.interference.expect import expected
from muri.profiler.interference.next_pairs import next_pairs
from muri.profiler.interference.ratios import Interference, known_pairs, put
from muri.profiler.lookup import SELECTOR, Wanted, key_for, selector
from muri.profiler.records import ProfileKey

SECONDS_HELP: Final = "Measure at most so long, once both have warmed up."
STARTUP_HELP: Final = "Seconds that both may take to warm up."


class PairUsageError(UsageError):
    """The command is asked for something that makes no sense."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the two scripts are, how long they may be measured, and whether to keep it."""

    models: tuple[str | None, str | None]
    seconds: float
    startup: float
    no_store: bool


def _request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a measurement, handed over as one `request`."""

    @wraps(command)
    def with_request(
        *, model_a: str | None, model_b: str | None, seconds: float, startup: float, no_store: bool, **others: object
    ) -> None:
        command(request=Request((model_a, model_b), seconds, startup, no_store), **others)

    decorated: Callable[..., None] = with_request
    positive = click.FloatRange(0, min_open=True)
    for decorate in (
        click.option("--no-store", is_flag=True, help="Only print the ratios."),
        click.option("--startup", type=positive, default=120.0, show_default=True, help=STARTUP_HELP),
        click.option("--seconds", type=positive, default=30.0, show_default=True, help=SECONDS_HELP),
        click.option("--model-b", metavar=SELECTOR, help="What B is."),
        click.option("--model-a", metavar=SELECTOR, help="What A is.  [default: its name and a fingerprint]"),
    ):
        decorated = decorate(decorated)
    return decorated


@click.command("pair", short_help="Measure how two scripts slow each other down.")
@click.argument("scripts", nargs=-1, metavar="[A B]")
@_request_options
@click.option("--list", "listed", is_flag=True, help="List all measured pairs.")
@click.option("--next", "upcoming", is_flag=True, help="List the pairs of known models that are worth measuring.")
@click.option("--expect", is_flag=True, help=f"A and B are {SELECTOR}: what was measured of them, else an estimate.")
@store_option
@json_option
def pair_command(
    scripts: tuple[str, ...],
    request: Request,
    listed: bool,
    upcoming: bool,
    expect: bool,
    store_path: Path | None,
    as_json: bool,
) -> None:
    """Measure how two scripts slow each other down, as plain processes on one device.

    A and B are scripts; quote them where they have arguments. Both are started, take turns
    alone and side by side for about half a minute, and are then ended. The ratio ξ of a model
    says how much longer its iteration takes beside the other: 1 is undisturbed.

    \b
    Examples:
      muri profile pair train_a.py train_b.py
      muri profile pair "train.py --lr 0.1" "-m my.training" --seconds 15
      muri profile pair a.py b.py --model-a resnet18:64 --model-b bert:8
      muri profile pair --list
      muri profile pair --expect resnet18:64 bert:8
      muri profile pair --next --json | jq -r '.pairs[0].a.model'
    """
    _check_usage(scripts, [name for name, given in _views(listed, upcoming, expect) if given])
    if expect:
        _expect(scripts, store_path, as_json)
    elif listed:
        _list(_read(store_path)[0], as_json)
    elif upcoming:
        _next(*_read(store_path), as_json)
    else:
        _print_pairs([_measure(scripts, request, store_path)], as_json)


def _views(listed: bool, upcoming: bool, expect: bool) -> tuple[tuple[str, bool], ...]:
    return (("--list", listed), ("--next", upcoming), ("--expect", expect))


def _check_usage(scripts: tuple[str, ...], views: Sequence[str]) -> None:
    if len(views) > 1:
        raise PairUsageError(f"give {' or '.join(views)}, not both")
    if views and views[0] != "--expect":
        if scripts:
            raise PairUsageError(f"{views[0]} takes no scripts")
        return
    if len(scripts) != 2:
        raise PairUsageError(
            f"a pair is two models, not {len(scripts)}: muri profile pair --expect resnet18:64 bert:8"
            if views
            else f"a pair is two scripts, not {len(scripts)}; quote a script that has arguments: "
            'muri profile pair "a.py --lr 0.1" b.py. --list shows what was measured'
        )


def _read(
    store_path: Path | None, *, missing_ok: bool = False
) -> tuple[tuple[Interference, ...], tuple[ProfileKey, ...]]:
    """All pairs and the keys of all profiles; nothing where nothing was ever measured."""
    store = open_if_any(store_path, missing_ok=missing_ok)
    if store is None:
        return (), ()
    with store:
        return known_pairs(store), tuple(item.key for item in store.list())


def _measure(scripts: tuple[str, ...], request: Request, store_path: Path | None) -> Interference:
    from muri.profiler.dryrun.runner import check_command  # -- only when needed
    from muri.profiler.interference.corun import Budget, measure_pair  # -- only when needed

    commands = [_split(script) for script in scripts]
    for command in commands:
        check_command(command)
    key_a, key_b = _keys(commands, request.models, store_path)
    if (key_a.gpu_count, key_a.gpu_type) != (key_b.gpu_count, key_b.gpu_type):
        raise PairUsageError(f"{key_a} and {key_b} cannot share GPUs: say the same GPUS and TYPE for both")
    if not request.no_store:
        open_store(store_path).close()  # before the work: where nothing can be stored, it would be lost

    def tell(text: str) -> None:
        click.echo(f"muri: {text}", err=True)

    budget = Budget(request.seconds, request.startup)
    found = measure_pair(commands[0], commands[1], (key_a, key_b), budget=budget, tell=tell)
    if not request.no_store:
        with open_store(store_path) as store:
            put(store, found)
    return found


def _keys(commands: Iterable[Sequence[str]], models: Iterable[str | None], store_path: Path | None) -> list[ProfileKey]:
    """What each script is: as the user says, else its fingerprint."""
    _, known = _read(store_path, missing_ok=True)
    named = zip(commands, models, strict=True)
    return [key_for(known, selector(known, text) if text else Wanted(of_command(command))) for command, text in named]


def _split(script: str) -> list[str]:
    try:
        return shlex.split(script)
    except ValueError as error:
        raise PairUsageError(f"{script!r} is no command line: {error}") from error


def _expect(models: tuple[str, ...], store_path: Path | None, as_json: bool) -> None:
    with open_store(store_path, read_only=True) as store:
        known = [item.key for item in store.list()]
        key_a, key_b = (key_for(known, selector(known, text)) for text in models)
        found = expected(store, key_a, key_b)
    if found is None:
        unknown = [str(key) for key in (key_a, key_b) if key not in known]
        raise NoSuchProfileError(
            f"nothing is known of {' and of '.join(dict.fromkeys(unknown))}; measure a profile (muri profile run) or "
            "the pair (muri profile pair A B)"
        )
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False))
        return
    sure = "" if found.confidence is None else f", {found.confidence * 100:.0f} % sure"
    for key, ratio in ((key_a, found.ratio_a), (key_b, found.ratio_b)):
        click.echo(f"{key}: {ratio:.2f} times as long ({found.source}{sure})")


def _list(pairs: tuple[Interference, ...], as_json: bool) -> None:
    if pairs or as_json:
        _print_pairs(pairs, as_json)
    else:
        click.echo("No pairs yet: measure one with `muri profile pair A.py B.py`.")


def _print_pairs(pairs: Iterable[Interference], as_json: bool) -> None:
    if as_json:
        document = {"pairs": [item.to_dict() for item in pairs]}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from muri.profiler.interference.render import print_pairs  # -- rich takes a while to load

    print_pairs(console(), tuple(pairs), datetime.now(UTC))


def _next(pairs: tuple[Interference, ...], keys: tuple[ProfileKey, ...], as_json: bool) -> None:
    found = next_pairs(pairs, keys)
    if as_json:
        click.echo(json.dumps({"pairs": [asdict(item) for item in found]}, indent=2, ensure_ascii=False))
    elif found:
        from muri.profiler.interference.render import print_candidates  # -- rich takes a while to load

        print_candidates(console(), found)
    else:
        click.echo("No pair is left to measure: a pair needs two profiles of one GPU count and type.")
