"""Policies by name: Muri's own, and those that a site adds."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from inspect import getdoc
from typing import Any, Final, cast

from muri.errors import UsageError
from muri.policies.allocation.names import ALIASES, SYNERGY_NAMES, listed
from muri.policies.options import OptionsError, PolicyOptions
from muri.policies.site_policies import PolicyFactory, SitePolicy, SitePolicyError, find_site_policies
from muri.policies.types import Policy

_SCHEDULERS: Final = "muri.policies.schedulers"
_BUILT_IN: Final = {
    "auto": "muri:Auto",
    "muri-s": "muri:MuriS",
    "muri-l": "muri:MuriL",
    "muri-jct": "muri_jct:MuriJct",
    "muri-hybrid": "muri_hybrid:MuriHybrid",
    "fifo": "fifo:Fifo",
    "sjf": "shortest:Sjf",
    "srtf": "shortest:Srtf",
    "srsf": "shortest:Srsf",
    "las": "attained:Las",
    "2d-las": "attained:TwoDimensionalLas",
    "tiresias": "tiresias:Tiresias",
    "tiresias-gittins": "gittins:TiresiasGittins",
    "themis": "themis:Themis",
    "antman": "antman:AntMan",
    **dict.fromkeys(SYNERGY_NAMES, "synergy:POLICIES"),
    "drf": "static_demands:Drf",
    "tetris": "static_demands:Tetris",
    "sjf-ffs": "sjf_bsbf:SjfFfs",
    "sjf-bsbf": "sjf_bsbf:SjfBsbf",
    "horus": "horus:Horus",
    "horus-f": "horus:HorusFair",
    "obp": "opportunistic:OpportunisticBinPacking",
    "pab": "opportunistic:PutBack",
    "pollux": "pollux:Pollux",
}
"""Module (in `schedulers/`) and class of each, or a table of classes; imported when first asked for. The default
comes first."""


class UnknownPolicyError(UsageError):
    """No policy has the name."""


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """What `muri policies` tells of a policy.

    Attributes:
        name: The name that selects it.
        order: Who goes first; empty when the policy doesn't say.
        shares: Whether jobs may share GPUs; None when the policy doesn't say.
        preempts: Whether a running job may be stopped for another; None when the policy doesn't say.
        summary: One line.
        source: "built-in", or the distribution that it comes from.
        problem: Why it cannot be used; empty when it can.
        simulated_only: Whether only `muri simulate` has it.
    """

    name: str
    order: str = ""
    shares: bool | None = None
    preempts: bool | None = None
    summary: str = ""
    source: str = "built-in"
    problem: str = ""
    simulated_only: bool = False


def policy_names() -> tuple[str, ...]:
    """The names that `get_policy` knows: the default, the other built-in ones, then the site's by name."""
    return (*_BUILT_IN, *find_site_policies(_BUILT_IN).by_name)


def get_policy(name: str, options: PolicyOptions | Mapping[str, Any] | None = None) -> Policy:
    """Make a policy.

    Args:
        name: One of `policy_names`, or short for one (`allocation.names.ALIASES`).
        options: All options; or by name only those that the user chose, on top of the policy's own
            defaults; or None for these.

    Raises:
        UnknownPolicyError: Lists the valid names and the nearest one.
        OptionsError: An option is unknown, has a bad value, or contradicts what the policy is.
        SitePolicyError: The policy comes from another distribution, which is broken.
    """
    name = ALIASES.get(name, name)
    if name in _BUILT_IN:
        factory = _built_in(name)
        return factory(_options_for(name, factory, options))
    offer = find_site_policies(_BUILT_IN).by_name.get(name)
    if offer is None:
        raise _unknown(name)
    return offer.make(_options_for(name, offer.load(), options))


def describe_policies() -> tuple[PolicyInfo, ...]:
    """All policies in the order of `policy_names`; a broken one tells its problem."""
    own = [_describe(name, _built_in(name), "built-in") for name in _BUILT_IN]
    return (*own, *(_describe_offer(offer) for offer in find_site_policies(_BUILT_IN).by_name.values()))


def policy_problems() -> tuple[str, ...]:
    """Sentences about policies of other distributions whose names are already taken."""
    return find_site_policies(_BUILT_IN).problems


def _describe_offer(offer: SitePolicy) -> PolicyInfo:
    try:
        return _describe(offer.name, offer.load(), offer.distribution)
    except SitePolicyError as error:
        return PolicyInfo(offer.name, source=offer.distribution, problem=str(error))


def _describe(name: str, factory: PolicyFactory, source: str) -> PolicyInfo:
    summary = (getdoc(factory) or "").partition("\n")[0]
    simulated_only = getattr(factory, "simulated_only", False)
    told = PolicyInfo(
        name, getattr(factory, "order", ""), summary=summary, source=source, simulated_only=simulated_only
    )
    fixed = getattr(factory, "fixed", None)
    if fixed is None:
        return told
    return replace(told, shares=fixed.get("max_group_size", 2) > 1, preempts=fixed.get("preemption", True))


def _built_in(name: str) -> PolicyFactory:
    module, _, attribute = _BUILT_IN[name].partition(":")
    found = getattr(import_module(f"{_SCHEDULERS}.{module}"), attribute)
    return cast(PolicyFactory, found[name] if isinstance(found, Mapping) else found)


def _options_for(name: str, factory: PolicyFactory, given: PolicyOptions | Mapping[str, Any] | None) -> PolicyOptions:
    if isinstance(given, PolicyOptions):
        return given
    chosen = dict(given or {})
    known = [field.name for field in fields(PolicyOptions)]
    for option, value in chosen.items():
        if option not in known:
            raise OptionsError(f"unknown option {option!r}{_nearest(option, known)}; valid are: {', '.join(known)}")
        always = getattr(factory, "fixed", {}).get(option, value)
        # Group size and preemption are limits, which a policy may stay below; choices it must follow.
        if isinstance(value, str) and value != always:
            raise OptionsError(f"policy {name} always has {option} {always}, not {value}; choose another policy for it")
    return PolicyOptions(**{**getattr(factory, "defaults", {}), **chosen})


def _unknown(name: str) -> UnknownPolicyError:
    names = policy_names()
    near = _nearest(name.lower(), (*names, *ALIASES))
    return UnknownPolicyError(f"unknown policy {name!r}{near}; valid are: {', '.join(listed(names))}")


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
