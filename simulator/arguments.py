"""Words of the command line that click has no type for."""

import re
from collections.abc import Iterable
from typing import Any, Final

import click
import yaml

from muri.simulator.model import Outage

_OUTAGE: Final = re.compile(r"(\d+):(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(:drain)?")


class NameList(click.ParamType):
    """Names with commas between them."""

    name = "NAME[,NAME…]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Split, refusing empty names and repeated ones."""
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(","))
        if not all(names):
            self.fail(f"{value!r} has an empty name; write for example srtf,muri-s", param, ctx)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            self.fail(f"{', '.join(repeated)} is given more than once", param, ctx)
        return names


class SeedList(click.ParamType):
    """Whole numbers with commas between them."""

    name = "SEED[,SEED…]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Split, refusing what is no whole number ≥ 0."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isascii() and word.isdigit() for word in words):
            self.fail(f"{value!r} must be whole numbers ≥ 0, for example 0,1,2", param, ctx)
        seeds = tuple(int(word) for word in words)
        if len(set(seeds)) < len(seeds):
            self.fail(f"{value!r} gives a seed more than once", param, ctx)
        return seeds


class JobRange(click.ParamType):
    """FIRST:LAST, indices of jobs in the trace."""

    name = "FIRST:LAST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Refuse what is no ascending pair of indices."""
        if isinstance(value, tuple):
            return value
        first, _, last = str(value).partition(":")
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()) or int(first) > int(last):
            self.fail(f"{value!r} must be FIRST:LAST, two job indices with FIRST ≤ LAST, like 100:400", param, ctx)
        return int(first), int(last)


class OutageSpec(click.ParamType):
    """NODE:START:END[:drain], a node's index and seconds since the trace's start."""

    name = "NODE:START:END[:drain]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Outage:
        """Refuse what is no time of a node."""
        if isinstance(value, Outage):
            return value
        match = _OUTAGE.fullmatch(str(value))
        if not match or float(match[2]) >= float(match[3]):
            self.fail(
                f"{value!r} must be NODE:START:END or NODE:START:END:drain, with the node's index from 0 and "
                "START < END in seconds, like 3:3600:7200",
                param,
                ctx,
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
