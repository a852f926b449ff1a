"""Figures of the benchmark with real jobs: totals, bound, ratios, bars."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table

from muri.policies.speed import Shape
from muri_lab.benchmarks.bounds import throughput_bound

BAR_RATIO = 1.1
BAR_AUTO = 0.97
BY_USER = ("plain", "plain-passive", "plain-one-thread")  # Ways of running the jobs without Muri

Changes = list[tuple[float, str, str]]  # Changes of the discipline: seconds after the begin, which one, and why


@dataclass(frozen=True)
class Throughput:
    """Normalized throughput in one way of running the jobs, medians over the rounds."""

    way: str  # One of `BY_USER`, or Muri's: a discipline
    members: Mapping[str, float]  # Speed of each job, 1 = as fast as alone
    total: float  # Median of the rounds' sums
    totals: tuple[float, ...]  # The sum in each round

    @classmethod
    def of(cls, way: str, rounds: Sequence[Mapping[str, float]]) -> "Throughput":
        """Sum up the rounds."""
        members = {job: median(speeds[job] for speeds in rounds) for job in rounds[0]}
        totals = tuple(sum(speeds.values()) for speeds in rounds)
        return cls(way, members, median(totals), totals)


@dataclass(frozen=True)
class Case:
    """The whole result."""

    link: str  # What limits the network
    solo_iteration_s: Mapping[str, float]  # Iteration time of each job alone
    shares: Mapping[str, Sequence[float]]  # Share of that time in which the job holds storage, CPU, GPU, network
    throughputs: dict[str, Throughput]  # By way
    cores: Mapping[str, float] = field(default_factory=dict)  # kept busy by each job alone
    auto_changes: Changes = field(default_factory=list)  # What `auto` did in its long run

    @property
    def lp_bound(self) -> float:
        """The largest total that the shares measured alone allow."""
        return throughput_bound([Shape(tuple(shares), 1.0) for shares in self.shares.values()])

    @property
    def core_bound(self) -> float | None:
        """The same, where the cores do the GPU's work as well: no order of stages makes them faster."""
        if not self.cores:
            return None
        count = os.cpu_count() or 1
        used = {job: (shares[0], self.cores[job] / count, shares[3]) for job, shares in self.shares.items()}
        return throughput_bound([Shape(each, 1.0) for each in used.values()])

    @property
    def best(self) -> Throughput | None:
        """The best of Muri's ways."""
        ways = (each for each in self.throughputs.values() if each.way not in BY_USER)
        return max(ways, key=lambda each: each.total, default=None)

    @property
    def best_by_user(self) -> Throughput | None:
        """The best way without Muri."""
        ways = (each for each in self.throughputs.values() if each.way in BY_USER)
        return max(ways, key=lambda each: each.total, default=None)

    @property
    def ratio(self) -> float | None:
        """The total of Muri's best way over that of the best without it."""
        best, by_user = self.best, self.best_by_user
        return best.total / by_user.total if best is not None and by_user is not None else None

    @property
    def auto_ratio(self) -> float | None:
        """The worst total of `auto` over that of the best single discipline of the same isolation."""
        found = []
        for name, each in self.throughputs.items():
            isolation, _, discipline = each.way.rpartition(":")
            others = [one for one in self.throughputs.values() if one.way != each.way]
            singles = [one.total for one in others if one.way.startswith(isolation + ":")]
            if name != each.way and discipline == "auto" and singles:
                found.append(each.total / max(singles))
        return min(found, default=None)

    def to_json(self) -> dict[str, object]:
        """All figures."""
        return {
            "storage": "random reads of 2 MiB, O_DIRECT",
            "network": self.link,
            "sequential_total": 1.0,
            "solo_iteration_s": self.solo_iteration_s,
            "shares": self.shares,
            "lp_bound": self.lp_bound,
            "cores": dict(self.cores),
            "core_bound": self.core_bound,
            "ways": {way: asdict(throughput) for way, throughput in self.throughputs.items()},
            "ratio": self.ratio,
            "auto_ratio": self.auto_ratio,
            "auto_changes": self.auto_changes,
        }


def print_report(case: Case) -> None:
    """Print the figures for people."""
    console = Console(highlight=False, width=80)
    console.print(f"storage: random reads of 2 MiB with O_DIRECT; network: {case.link}")
    table = Table(box=None, title="Normalized throughput (1 = alone)", title_justify="left")
    table.add_column("way")
    for job in case.solo_iteration_s:
        table.add_column(job, justify="right")
    for name in ("total", "rounds"):
        table.add_column(name, justify="right")
    table.add_row("alone, ms", *(f"{seconds * 1e3:.0f}" for seconds in case.solo_iteration_s.values()), "", "")
    table.add_row("sequential", *["0.25"] * len(case.solo_iteration_s), "1.00", "")
    for way, throughput in case.throughputs.items():
        speeds = (f"{speed:.2f}" for speed in throughput.members.values())
        totals = " ".join(f"{total:.2f}" for total in throughput.totals)
        table.add_row(way, *speeds, f"{throughput.total:.2f}", totals)
    console.print(table)
    console.print(f"LP bound {case.lp_bound:.2f}")
    if case.core_bound is not None:
        console.print(f"bound where these cores are the GPU, too: {case.core_bound:.2f}")
    if case.ratio is not None:
        console.print(f"Muri's best way / the best without Muri: {case.ratio:.2f} (bar {BAR_RATIO})")
    if case.auto_ratio is not None:
        for at_s, discipline, reason in case.auto_changes:
            console.print(f"auto, after {at_s:.0f} s: {discipline}: {reason}")
        console.print(f"auto in its long run / best single discipline: {case.auto_ratio:.2f} (bar {BAR_AUTO})")
