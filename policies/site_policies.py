"""Policies that other distributions bring along, by the entry point group `muri.policies`."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from muri.errors import UsageError
from muri.policies.options import PolicyOptions
from muri.policies.types import Policy

GROUP: Final = "muri.policies"

PolicyFactory = Callable[[PolicyOptions], Policy]
"""A policy's class, or any function that makes the policy from options."""


class SitePolicyError(UsageError):
    """A policy that a distribution offers cannot be used."""


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """What a distribution says that it offers; nothing of it is imported yet.

    Attributes:
        name: The policy's name.
        distribution: Name and version of the distribution.
        target: "module:attribute".
        entry_point: How to load it.
    """

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
            raise self._error(f"{type(error).__name__}: {error}") from error
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
        if not (callable(getattr(policy, "plan", None)) and isinstance(getattr(policy, "name", None), str)):
            raise self._error("what it makes has no name and no plan(request)")
        return policy

    def _error(self, problem: str) -> SitePolicyError:
        return SitePolicyError(
            f"policy {self.name!r} of {self.distribution} ({self.target}) cannot be used: {problem}. "
            "Mend or remove that distribution, or choose another policy (muri policies)"
        )


@dataclass(frozen=True, slots=True)
class SitePolicies:
    """What all installed distributions offer.

    Attributes:
        by_name: Policies that can be selected, in order of name.
        problems: Sentences about those that can't, because their name is taken.
    """

    by_name: dict[str, SitePolicy]
    problems: tuple[str, ...] = ()


def find_site_policies(taken: Collection[str]) -> SitePolicies:
    """Read the metadata of the installed distributions.

    Args:
        taken: Names of the built-in policies, which nobody can replace.
    """
    offers: dict[str, list[SitePolicy]] = {}
    for offer in sorted(map(_offer, entry_points(group=GROUP)), key=lambda item: (item.name, item.distribution)):
        known = offers.setdefault(offer.name, [])
        if (offer.distribution, offer.target) not in {(item.distribution, item.target) for item in known}:
            known.append(offer)
    free = {name: same[0] for name, same in offers.items() if name not in taken and len(same) == 1}
    return SitePolicies(free, tuple(_conflict(name, same, taken) for name, same in offers.items() if name not in free))


def _offer(entry_point: EntryPoint) -> SitePolicy:
    owner = entry_point.dist
    distribution = "an unknown distribution" if owner is None else f"{owner.name} {owner.version}"
    return SitePolicy(entry_point.name, distribution, entry_point.value, entry_point)


def _conflict(name: str, same: list[SitePolicy], taken: Collection[str]) -> str:
    owners = " and ".join(item.distribution for item in same)
    if name in taken:
        return f"{owners} offers a policy named {name!r}, which is one of Muri's own; it is ignored, rename it"
    return f"{owners} all offer a policy named {name!r}; none of them can be used, keep one"
