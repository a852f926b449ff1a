"""Policies by name: Muri's own, and those of other distributions (the entry point group `muri.policies`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import getdoc
from typing import Any, Final, Literal, cast

from muri.errors import UsageError
from muri.policies.options import MECHANISMS, ORDERS, OptionsError, PolicyOptions
from muri.policies.types import Policy
from muri.pythons import THE_LAB
from muri.text import nearest

PolicyFactory = Callable[[PolicyOptions], Policy]  # A policy's class, or any function that makes it from options
# Module (in `muri.policies`) and class of each; imported when first asked for, so that no command loads the solvers of
# policies that it doesn't use. The default comes first.
_BUILT_IN: Final = {
    "auto": "schedulers:Auto",
    "muri-s": "schedulers:MuriS",
    "muri-l": "schedulers:MuriL",
    "muri-jct": "schedulers:MuriJct",
    "muri-slurm": "schedulers:MuriSlurm",
    "fifo": "schedulers:Fifo",
    "sjf": "schedulers:Sjf",
    "srtf": "schedulers:Srtf",
    "srsf": "schedulers:Srsf",
    "2d-las": "schedulers:TwoDimensionalLas",
    "tiresias": "schedulers:Tiresias",
    "synergy": "siblings.synergy:Synergy",
    "sjf-bsbf": "siblings.sjf_bsbf:SjfBsbf",
    "horus": "siblings.horus:Horus",
    "horus-f": "siblings.horus:HorusFair",
}

# Policies of the distribution muri-lab.
_IN_THE_LAB: Final = (
    *("muri-hybrid", "las", "themis", "tiresias-gittins", "antman", "pollux", "sjf-ffs"),
    *("synergy-opt", "drf", "tetris", "obp", "pab"),
)

# Names that policies had before 0.3, and what to choose instead.
_REMOVED: Final = {
    **{f"synergy-{way}": f"choose synergy with the option mechanism={way}" for way in MECHANISMS},
    **{
        f"synergy-{way}-{order}": f"choose synergy with the options mechanism={way} and order={order}"
        for way in MECHANISMS
        for order in ORDERS
    },
    **{f"synergy-opt-{order}": f"choose synergy-opt with the option order={order}" for order in ORDERS},
}

GROUP: Final = "muri.policies"
Live = Literal["yes", "partly", "no", ""]


class UnknownPolicyError(UsageError):
    """No policy has the name."""


class SitePolicyError(UsageError):
    """A policy that a distribution offers cannot be used."""


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """A policy as `muri policies` lists it; an attribute is None or empty where the policy doesn't say.

    Attributes:
        order: Who goes first.
        shares: Whether jobs may share GPUs.
        preempts: Whether a running job may be stopped for another.
        summary: One line.
        source: "built-in", or its distribution.
        problem: Why it cannot be used; empty when it can.
        live: Whether Slurm can carry out its plans.
        live_limit: What Slurm cannot do of them, a sentence.
    """

    name: str
    order: str = ""
    shares: bool | None = None
    preempts: bool | None = None
    summary: str = ""
    source: str = "built-in"
    problem: str = ""
    live: Live = ""
    live_limit: str = ""


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """A policy that a distribution offers, not imported yet; `target` is "module:attribute"."""

    name: str
    distribution: str
    target: str
    entry_point: EntryPoint

    def load(self) -> PolicyFactory:
        """Import the policy.

        Raises:
            SitePolicyError: Names the distribution and what went wrong.
        """
        try:
            factory = self.entry_point.load()
        except Exception as error:  # whatever a site's module raises while it is imported
            problem = f"{type(error).__name__}: {error}"
            if isinstance(error, ImportError) and (error.name or "").startswith("muri."):
                problem += "; QueuePolicy is in muri.policies.schedulers, PriorityKey in muri.policies.types"
            raise self._error(problem) from error
        if not callable(factory):
            raise self._error(f"it is a {type(factory).__name__}, not a class or function")
        return cast(PolicyFactory, factory)

    def make(self, options: PolicyOptions) -> Policy:
        """Import the policy and make it.

        Raises:
            SitePolicyError: Names the distribution and what went wrong.
        """
        factory = self.load()
        try:
            policy = factory(options)
        except Exception as error:  # as above; Muri's own errors are among them, and keep their text
            raise self._error(f"{type(error).__name__}: {error}") from error
        if not isinstance(policy, Policy):
            raise self._error(f"it makes a {type(policy).__name__}, which does not inherit muri.policies.types.Policy")
        if not hasattr(policy, "name"):
            raise self._error(f"the class {type(policy).__name__} has no name")
        return policy

    def _error(self, problem: str) -> SitePolicyError:
        return SitePolicyError(
            f"policy {self.name!r} of {self.distribution} ({self.target}) cannot be used: {problem}. "
            "Mend or remove that distribution, or choose another policy (muri policies)"
        )


def policy_names() -> tuple[str, ...]:
    """The names that `get_policy` knows: the default, the other built-in ones, then the site's by name."""
    return (*_BUILT_IN, *_find_site_policies()[0])


def get_policy(name: str, options: PolicyOptions | Mapping[str, Any] | None = None) -> Policy:
    """Make a policy.

    Args:
        name: One of `policy_names`.
        options: All options; or by name only those that the user chose, on top of the policy's own
            defaults; or None for these.

    Raises:
        UnknownPolicyError: Lists the valid names and the nearest one.
        OptionsError: An option is unknown, has a bad value, or contradicts what the policy is.
        SitePolicyError: The policy comes from another distribution, which is broken.
    """
    if name in _BUILT_IN:
        factory = _built_in(name)
        return factory(_options_for(name, factory, options))
    offer = _find_site_policies()[0].get(name)
    if offer is None:
        raise _unknown(name)
    return offer.make(_options_for(name, offer.load(), options))


def describe_policies() -> tuple[PolicyInfo, ...]:
    """All policies in the order of `policy_names`; a broken one with its problem."""
    own = [_describe(name, _built_in(name), get_policy(name), "built-in") for name in _BUILT_IN]
    return (*own, *(_describe_offer(offer) for offer in _find_site_policies()[0].values()))


def policy_problems() -> tuple[str, ...]:
    """Sentences about policies of other distributions whose names are already taken."""
    return _find_site_policies()[1]


def _find_site_policies() -> tuple[dict[str, SitePolicy], tuple[str, ...]]:
    """Return the policies of installed distributions by name, and sentences about those whose names are taken."""
    offers: dict[str, list[SitePolicy]] = {}
    for offer in sorted(map(_offer, entry_points(group=GROUP)), key=lambda item: (item.name, item.distribution)):
        known = offers.setdefault(offer.name, [])
        if (offer.distribution, offer.target) not in {(item.distribution, item.target) for item in known}:
            known.append(offer)
    free = {name: same[0] for name, same in offers.items() if name not in _BUILT_IN and len(same) == 1}
    return free, tuple(_conflict(name, same) for name, same in offers.items() if name not in free)


def _describe_offer(offer: SitePolicy) -> PolicyInfo:
    try:
        factory = offer.load()
        policy = offer.make(_options_for(offer.name, factory, None))
    except SitePolicyError as error:
        return PolicyInfo(offer.name, source=offer.distribution, problem=str(error))
    return _describe(offer.name, factory, policy, offer.distribution)


def _describe(name: str, factory: PolicyFactory, policy: Policy, source: str) -> PolicyInfo:
    # A policy's class tells its order and its fixed options; a function that makes policies may have neither.
    fixed = getattr(factory, "fixed", None)
    live, limit = _live(policy)
    return PolicyInfo(
        name,
        order=getattr(factory, "order", ""),
        shares=None if fixed is None else fixed.get("max_group_size", 2) > 1,
        preempts=None if fixed is None else fixed.get("preemption", True),
        summary=" ".join((getdoc(factory) or "").partition("\n\n")[0].split()),
        source=source,
        live=live,
        live_limit=limit,
    )


def _live(policy: Policy) -> tuple[Live, str]:
    """Whether Slurm can carry out a policy's plans, and the limits."""
    if policy.elastic:
        return "no", "Slurm cannot change the number of a running job's GPUs; only `muri simulate` has it."
    if policy.supports_packing:
        return "partly", (
            "A job joins one running job, on just the same GPUs of one node; a job on several needs a task for each."
        )
    return "yes", ""


def _built_in(name: str) -> PolicyFactory:
    module, _, attribute = _BUILT_IN[name].partition(":")
    return cast(PolicyFactory, getattr(import_module(f"muri.policies.{module}"), attribute))


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
    if name in _REMOVED:
        return UnknownPolicyError(
            f"policy name {name!r} was removed in 0.3: {_REMOVED[name]} (in muri.yaml below `synergy:`, in "
            "`muri simulate` by --option)"
        )
    if name in _IN_THE_LAB:
        return UnknownPolicyError(f"policy {name!r} is in Muri's lab: {THE_LAB}")
    names = policy_names()
    return UnknownPolicyError(f"unknown policy {name!r}{_nearest(name.lower(), names)}; valid are: {', '.join(names)}")


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = nearest(name, valid)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _offer(entry_point: EntryPoint) -> SitePolicy:
    owner = entry_point.dist
    distribution = "an unknown distribution" if owner is None else f"{owner.name} {owner.version}"
    return SitePolicy(entry_point.name, distribution, entry_point.value, entry_point)


def _conflict(name: str, same: list[SitePolicy]) -> str:
    owners = " and ".join(item.distribution for item in same)
    if name in _BUILT_IN:
        return f"{owners} offers a policy named {name!r}, which is one of Muri's own; it is ignored, rename it"
    return f"{owners} all offer a policy named {name!r}; none of them can be used, keep one"
