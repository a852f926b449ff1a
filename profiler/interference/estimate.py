"""What two stage profiles say about an unmeasured pair: the ratio ξ by queueing theory. Pure.

Two jobs that share plainly, without taking turns by stage, are a closed network of two customers whose stations are
the four resources; where both want one, each gets half (processor sharing). Alone, job b is at resource r for the
share u_b,r of its time. The arrival theorem (mean value analysis: Reiser and Lavenberg 1980; processor sharing with
any distribution of demands: Baskett et al. 1975) says that this is how often job a meets it there, and each meeting
makes a's use of r twice as long. So

    ξ_a = ξ_b = 1 + Σ_r u_a,r · u_b,r

which is 2 for two jobs that both need one resource all the time, and 1 where they share none. It cannot be less than
max_r (u_a,r + u_b,r), the bound of the best possible interleaving, and it never is.

It takes a resource for used up by one job at a time. Memory bandwidth, caches, and kernels too small to fill a GPU
are beyond it; a measured ratio always comes first.
"""

from typing import Final

from muri.profiler.records import RESOURCES, StageProfile

_CPU: Final = RESOURCES.index("cpu")


def estimated_ratio(a: StageProfile, b: StageProfile, cores: float | None = None) -> float:
    """ξ of two jobs side by side, the same for both; 1 ≤ ξ ≤ 5.

    Args:
        a: Profile of one job.
        b: Profile of the other.
        cores: Cores of the device's node, where known: jobs that need no more than these together don't
            meet at the CPU. Without it, or where a profile does not say how many it uses, the CPU is
            one resource like the others.
    """
    shares = zip(busy_shares(a), busy_shares(b), strict=True)
    free = _CPU if _enough_cores(a, b, cores) else None
    return 1 + sum(share_a * share_b for index, (share_a, share_b) in enumerate(shares) if index != free)


def busy_shares(profile: StageProfile) -> tuple[float, ...]:
    """Share of an iteration in which each resource is used, hidden behind another or not."""
    used_s = profile.detail.busy_s or profile.stage_s
    return tuple(min(1.0, value / profile.iteration_s) for value in used_s)


def _enough_cores(a: StageProfile, b: StageProfile, cores: float | None) -> bool:
    needs = (a.detail.cpu_cores, b.detail.cpu_cores)
    return cores is not None and None not in needs and sum(need or 0.0 for need in needs) <= cores
