"""Groups whose members share without turns: of whom it may be planned, and how a group says that it is one. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Final, Literal

from muri.policies.speed.measured import InterferenceTable, PairSpeed
from muri.policies.types import PlanRequest, Policy
from muri.profiler.interference.ratios import Interference
from muri.profiler.records import ProfileKey
from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import StartGroup
from muri.slurm_plugin.config import Grouping

Mode = Literal["interleave", "plain"]
"""How members of a group share their GPU, as in `Group.mode`."""

MODE_PREFIX: Final = "muri-mode:"
"""In a host's AdminComment: plain where its members share without turns. It stands in Slurm, as `tags` explains."""

_Pairs = Mapping[tuple[ProfileKey, ProfileKey], tuple[float, float]]


def mode_of(admin_comment: str) -> Mode:
    """Return how the members of a host with that AdminComment share."""
    return "plain" if tags.token(admin_comment, MODE_PREFIX) == "plain" else "interleave"


def with_mode(admin_comment: str, mode: Mode) -> str:
    """Return a new host's AdminComment with the way in which its members share."""
    return tags.with_token(admin_comment, MODE_PREFIX, "plain") if mode == "plain" else admin_comment


def runtime_options(action: StartGroup, grouping: Grouping) -> list[str]:
    """Return how a group's runtime is told to let members share.

    Pairs are measured as separate processes, so members that share plainly are that too, unless their scripts ask for
    threads.
    """
    plain = action.mode == "plain"
    discipline, isolation = ("plain", "process") if plain else (grouping.discipline, grouping.isolation)
    return ["--discipline", discipline, "--isolation", isolation]


def with_measured_pairs(request: PlanRequest, policy: Policy, measured: Sequence[Interference]) -> PlanRequest:
    """Return the request with the speeds of measured pairs, for a policy whose groups may share without turns.

    Estimates are left out: whether turns help is just what they can't tell.

    Args:
        request: Jobs that wait and run.
        policy: Who will be asked.
        measured: What the profile store has of pairs.
    """
    if not getattr(policy, "plain_groups", False):
        return request
    everybody = chain(request.jobs, *(unit.members for unit in request.running))
    keys = {job.profile.key for job in everybody if job.profile is not None and job.gpu_count == 1}
    rows = _rows(keys, measured)
    return replace(request, interference=InterferenceTable(rows) if rows else None)


def _rows(keys: set[ProfileKey], measured: Sequence[Interference]) -> tuple[PairSpeed, ...]:
    """Pairs of models of which every two keys were measured, each model with its least speed.

    A table tells models apart by name alone: a batch size that nobody measured must not pass for one that was.
    """
    family: dict[str, list[ProfileKey]] = defaultdict(list)
    for key in sorted(keys):
        family[key.model].append(key)
    speeds = {pair: speed for item in measured for pair, speed in _both_ways(item).items() if keys.issuperset(pair)}
    names = sorted({(a.model, b.model) for a, b in speeds if a.model <= b.model})
    rows = (_row(family[first], family[second], speeds) for first, second in names)
    return tuple(row for row in rows if row is not None)


def _both_ways(item: Interference) -> _Pairs:
    """A pair's speeds in either order."""
    a, b = item.a, item.b
    return {(b.key, a.key): (1 / b.ratio, 1 / a.ratio), (a.key, b.key): (1 / a.ratio, 1 / b.ratio)}


def _row(first: Sequence[ProfileKey], second: Sequence[ProfileKey], speeds: _Pairs) -> PairSpeed | None:
    found = [speeds.get(pair) for pair in product(first, second)]
    known = [pair for pair in found if pair is not None]
    if len(known) < len(found):
        return None
    return PairSpeed(first[0].model, second[0].model, min(a for a, _ in known), min(b for _, b in known))
