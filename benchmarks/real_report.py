"""Figures of the benchmark with real jobs: totals, bound, ratios, bars."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from muri.policies.speed.fair import throughput_bound
from muri.policies.speed.model import Shape

BAR_TOTAL = 2.0
BAR_RATIO = 1.15


@dataclass(frozen=True)
class Throughput:
    """Normalized throughput in one way of running the jobs, medians over the rounds.

    Attributes:
        way: "plain", "plain-passive" or a discipline.
        members: Speed of each job, 1 = as fast as alone.
        total: Median of the rounds' sums.
        totals: The sum in each round.
    """

    way: str
    members: Mapping[str, float]
    total: float
    totals: tuple[float, ...]

    @classmethod
    def of(cls, way: str, rounds: Sequence[Mapping[str, float]]) -> "Throughput":
        """Sum up the rounds."""
        members = {job: median(speeds[job] for speeds in rounds) for job in rounds[0]}
        totals = tuple(sum(speeds.values()) for speeds in rounds)
        return cls(way, members, median(totals), totals)


@dataclass(frozen=True)
class Case:
    """The whole result.

    Attributes:
        link: What limits the network.
        solo_iteration_s: Iteration time of each job alone.
        shares: Share of that time in which the job holds storage, CPU, GPU, network.
        throughputs: By way.
    """

    link: str
    solo_iteration_s: Mapping[str, float]
    shares: Mapping[str, Sequence[float]]
    throughputs: Mapping[str, Throughput]

    @property
    def lp_bound(self) -> float:
        """The largest total that the shares measured alone allow."""
        return throughput_bound([Shape(tuple(shares), 1.0) for shares in self.shares.values()])

    @property
    def best(self) -> Throughput | None:
        """The best interleaving."""
        return max(
            (t for t in self.throughputs.values() if not t.way.startswith("plain")), key=lambda t: t.total, default=None
        )

    @property
    def ratio_to_plain(self) -> float | None:
        """The best interleaving's total over that of plain processes at once."""
        plain = self.throughputs.get("plain")
        return self.best.total / plain.total if plain is not None and self.best is not None else None

    def to_json(self) -> dict[str, object]:
        """All figures."""
        best, ratio = self.best, self.ratio_to_plain
        bars = {"total": BAR_TOTAL, "ratio_to_plain": BAR_RATIO}
        met = best is not None and ratio is not None and best.total >= BAR_TOTAL and ratio >= BAR_RATIO
        return {
            "storage": "random reads of 2 MiB, O_DIRECT",
            "network": self.link,
            "sequential_total": 1.0,
            "solo_iteration_s": self.solo_iteration_s,
            "shares": self.shares,
            "lp_bound": self.lp_bound,
            "ways": {way: asdict(throughput) for way, throughput in self.throughputs.items()},
            "ratio_to_plain": ratio,
            "bars": bars,
            "met": met,
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
    if case.ratio_to_plain is not None:
        console.print(f"best interleaving / plain processes at once: {case.ratio_to_plain:.2f} (bar {BAR_RATIO})")
