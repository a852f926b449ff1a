"""Words of the command line that click has no type for."""

import re
from collections.abc import Iterable
from typing import Any, Final

import click
import yaml

from muri.simulator.model import Outage

_OUTAGE: Final = re.compile(r"(\d+):(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(:drain)?", re.ASCII)
_RANGE: Final = re.compile(r"(\d+):(\d+)", re.ASCII)


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them; none may be empty or repeated."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise click.BadParameter(f"{text!r} has an empty name; write for example srtf,muri-s")
    repeated = sorted({name for name in found if found.count(name) > 1})
    if repeated:
        raise click.BadParameter(f"{', '.join(repeated)} is given more than once")
    return found


def seeds(text: str) -> tuple[int, ...]:
    """Whole numbers ≥ 0 with commas between them, each once."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise click.BadParameter(f"{text!r} must be whole numbers ≥ 0, for example 0,1,2")
    found = tuple(int(word) for word in words)
    if len(set(found)) < len(found):
        raise click.BadParameter(f"{text!r} gives a seed more than once")
    return found


def job_range(text: str) -> tuple[int, int]:
    """FIRST:LAST, indices of jobs in the trace; the last one no longer counts."""
    match = _RANGE.fullmatch(text)
    if not match or int(match[1]) >= int(match[2]):
        raise click.BadParameter(f"{text!r} must be FIRST:LAST, job indices with FIRST < LAST, like 100:400")
    return int(match[1]), int(match[2])


def outage(text: str) -> Outage:
    """NODE:START:END[:drain], a node's index and seconds since the trace's start."""
    match = _OUTAGE.fullmatch(text)
    if not match or float(match[2]) >= float(match[3]):
        raise click.BadParameter(
            f"{text!r} must be NODE:START:END or NODE:START:END:drain, with the node's index from 0 and START < END in "
            "seconds, like 3:3600:7200"
        )
    return Outage(int(match[1]), float(match[2]), float(match[3]), drain=match[4] is not None)


def parse_options(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Policy options by policy; those for all of them under "".

    Args:
        words: Each `key=value` or `policy:key=value`; values as YAML writes them.

    Raises:
        click.BadParameter: A word is neither.
    """
    options: dict[str, dict[str, Any]] = {}
    for word in words:
        target, equals, text = word.partition("=")
        policy, _, key = target.rpartition(":")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = None
        if not (equals and key.strip()) or value is None:
            raise click.BadParameter(
                f"{word!r} must be KEY=VALUE or POLICY:KEY=VALUE, like max_group_size=2 or muri-l:max_group_size=2",
                param_hint="--option",
            )
        options.setdefault(policy.strip(), {})[key.strip()] = tuple(value) if isinstance(value, list) else value
    return options


def options_for(policy: str, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The options of one policy: those for all, overridden by its own."""
    return {**options.get("", {}), **options.get(policy, {})}
