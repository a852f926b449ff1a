"""Tables and chart of the comparison of policies, made from its results."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from muri.policies.options import MECHANISMS, ORDERS
from muri.policies.registry import policy_names

ROOT: Final = Path(__file__).parents[3]
CHART: Final = ROOT / "docs" / "images" / "policies.png"
BASE: Final = "fifo"  # The policy that others are compared with

VARIANTS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "synergy": {f"synergy-{way}-{order}": {"mechanism": way, "order": order} for way in MECHANISMS for order in ORDERS},
    "synergy-opt": {f"synergy-opt-{order}": {"order": order} for order in ORDERS},
}
"""Of a policy that is compared with several options: these, by the name of their figures."""

Stored = Mapping[str, Mapping[str, Any]]  # Results by trace, as `bars.keep` stores them


def names() -> tuple[str, ...]:
    """Names of figures: those of the policies, in the registry's order, and of their variants."""
    return tuple(label for policy in policy_names() for label in VARIANTS.get(policy, (policy,)))


def case_of(label: str) -> tuple[str, Mapping[str, str]]:
    """Policy and options that have the figures of this name."""
    found = [(policy, variants[label]) for policy, variants in VARIANTS.items() if label in variants]
    return found[0] if found else (label, {})


def _shown(label: str) -> str:
    policy, options = case_of(label)
    return f"`{policy}`" + (f" {', '.join(options.values())}" if options else "")


def plain_table(stored: Stored, traces: Sequence[str]) -> str:
    """The comparison where nothing but GPUs is limited: a cell has average JCT, 99th percentile and makespan."""
    policies = sorted(_policies(stored, traces), key=lambda policy: policy.startswith("muri-"))
    return _table(traces, ([_plain(stored, trace, policy) for trace in traces] for policy in policies), policies)


def _plain(stored: Stored, trace: str, policy: str) -> str:
    figures = stored[trace]["figures"][policy]
    return f"{_jct(stored, trace, policy, ())}, {figures['p99_jct_h']:.0f} h, {figures['makespan_h']:.0f} h"


def tables(stored: Stored, traces: Sequence[str]) -> str:
    """Average JCT, then what users feel besides, then why figures are missing."""
    policies = _policies(stored, traces)
    notes = list(_notes(stored, traces, policies))
    jct = _table(traces, ([_jct(stored, trace, policy, notes) for trace in traces] for policy in policies), policies)
    rest = _table(traces, ([_rest(stored, trace, policy) for trace in traces] for policy in policies), policies)
    reasons = "".join(f"{number}. {note}\n" for number, note in enumerate(notes, 1))
    return (
        "Average job completion time, and how many times shorter it is than under `fifo`:\n\n"
        f"{jct}\n99th percentile of the job completion times, makespan, and restarts per job:\n\n{rest}"
        + (f"\nWithout figures:\n\n{reasons}" if reasons else "")
    )


def _table(traces: Sequence[str], rows: Iterable[Sequence[str]], policies: Sequence[str]) -> str:
    lines = [("policy", *traces), ("---", *["---:"] * len(traces))]
    lines += [(_shown(policy), *cells) for policy, cells in zip(policies, rows, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _policies(stored: Stored, traces: Sequence[str]) -> list[str]:
    """Those of which anything is stored, in the registry's order."""
    return [policy for policy in names() if any(policy in stored[trace]["figures"] for trace in traces)]


def _found(stored: Stored, trace: str, policy: str) -> Mapping[str, Any] | None:
    """Figures of a run; None when it failed or was not made."""
    figures: Mapping[str, Any] = stored[trace]["figures"].get(policy, {"failed": "not simulated"})
    return None if "failed" in figures else figures


def speedup(stored: Stored, trace: str, policy: str) -> float | None:
    """How many times shorter the average JCT is than under the base."""
    base, own = _found(stored, trace, BASE), _found(stored, trace, policy)
    return None if base is None or own is None else base["avg_jct_h"] / own["avg_jct_h"]


def _jct(stored: Stored, trace: str, policy: str, notes: Sequence[str]) -> str:
    figures = _found(stored, trace, policy)
    if figures is None:
        return f"– [{notes.index(_why(stored, trace, policy)) + 1}]"
    factor = speedup(stored, trace, policy)
    times = "" if factor is None else f" ({factor:.2f} ×)"
    return f"{figures['avg_jct_h']:.2f} h{times}"


def _rest(stored: Stored, trace: str, policy: str) -> str:
    figures = _found(stored, trace, policy)
    if figures is None:
        return "–"
    return f"{figures['p99_jct_h']:.0f} h, {figures['makespan_h']:.0f} h, {figures['restarts_per_job']:.1f}"


def _why(stored: Stored, trace: str, policy: str) -> str:
    return str(stored[trace]["figures"].get(policy, {}).get("failed", "not simulated"))


def _notes(stored: Stored, traces: Sequence[str], policies: Sequence[str]) -> Iterable[str]:
    """Why figures are missing, each reason once."""
    missing = (
        _why(stored, trace, policy) for policy in policies for trace in traces if not _found(stored, trace, policy)
    )
    return dict.fromkeys(missing)


def draw(stored: Stored, traces: Sequence[str]) -> None:
    """Average JCT relative to the base, a row for each policy, a mark for each trace; left of the line is better."""
    import matplotlib as mpl  # only the picture needs it

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator

    policies = _policies(stored, traces)
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.26 * len(policies)), layout="constrained")
    for trace, mark in zip(traces, "osD^vPX", strict=False):
        points = [(1 / factor, row) for row, name in enumerate(policies) if (factor := speedup(stored, trace, name))]
        axis.scatter(*zip(*points, strict=True), marker=mark, s=42, alpha=0.85, label=trace, zorder=3)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_major_locator(LogLocator(base=2, subs=(0.7, 1.0)))
    axis.set_ylim(-1, len(policies))
    axis.set_yticks(range(len(policies)), policies, fontsize=9)
    axis.invert_yaxis()
    axis.grid(axis="both", linewidth=0.4, zorder=0)
    axis.set_xlabel(f"average job completion time relative to {BASE} (log scale; left is better)")
    axis.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(traces), frameon=False)
    CHART.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(CHART, dpi=110)
    plt.close(figure)
