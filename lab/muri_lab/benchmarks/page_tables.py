"""Tables of the pages, made of stored results; benchmarks/pages.py puts them between their marks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from muri_lab.benchmarks import compare_policies_page, demo
from muri_lab.benchmarks.compatibility_page import page_of
from muri_lab.benchmarks.fidelity_workloads import named
from muri_lab.benchmarks.gpu_check import page as gpu_check_page
from muri_lab.benchmarks.page_marks import stored, written

_FIDELITY_SETS: Final = {
    "the first twelve": lambda name: not name.startswith(("fresh", "unseen", "drawn")),
    "`fresh`": lambda name: name.startswith("fresh"),
    "`unseen`": lambda name: name.startswith("unseen"),
    "`drawn`": lambda name: name.startswith("drawn"),
    "all": lambda _: True,
}
"""Which workloads each line of the errors is about, by their names."""

_TRACES: Final = ("philly-like", "storage-heavy", "short-and-crowded", "mixed-appetites")
_PUBLISHED: Final = ("avg_jct_s", "makespan_s", "p99_jct_s")
_BOTH: Final = ("average_jct_s", "makespan_s")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, with numbers to the right of the first column."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fidelity(_: str) -> str:
    """Live runs beside their twins, workload by workload."""
    rows = []
    for row in stored("fidelity")["rows"]:
        name = row["workload"] + (f" ({row['live_runs']} runs)" if row["live_runs"] > 1 else "")
        cells = [cell for figure in _BOTH for cell in (_seconds(row, figure), written(row[f"{figure}_error"], "+z.1%"))]
        workload = named(row["workload"])
        nodes = f"{workload.node_count} × {workload.gpus_per_node}" if workload else ""
        rows.append([name, str(row["jobs"]), nodes, *cells])
    head = [
        "workload",
        "jobs",
        "nodes × GPUs",
        "average JCT live, twins (range)",
        "error",
        "makespan live, twins (range)",
        "error",
    ]
    return table(head, rows)


def _seconds(row: Mapping[str, Any], figure: str) -> str:
    mean, least, most = row["mean_least_most"][figure]
    return f"{row['live_mean_least_most'][figure][0]:.1f}, {mean:.1f} ({least:.1f}–{most:.1f}) s"


def fidelity_errors(_: str) -> str:
    """How far off the twin is, by set of workloads."""
    rows = []
    for title, belongs in _FIDELITY_SETS.items():
        chosen = [row for row in stored("fidelity")["rows"] if belongs(row["workload"])]
        errors = [[abs(row[f"{figure}_error"]) for row in chosen] for figure in _BOTH]
        cells = [f"{written(sum(each) / len(each), '.1%')}, {written(max(each), '.1%')}" for each in errors]
        rows.append([f"{title} ({len(chosen)})" if title != "the first twelve" else title, *cells])
    return table(["errors, in the mean and at worst", "average JCT", "makespan"], rows)


def forty(_: str) -> str:
    """Plain Slurm and Muri, live and in twins."""
    found = stored("forty")
    rows = []
    for side, title in (("plain", "plain Slurm"), ("muri", "Muri")):
        row = found[side]
        cells = [cell for figure in _BOTH for cell in (_seconds(row, figure), written(row[f"{figure}_error"], "+z.1%"))]
        rows.append([f"{title} ({row['live_runs']} run{'s' * (row['live_runs'] > 1)})", *cells])
    ratios = [
        found["plain"][way]["makespan_s"][0] / found["muri"][way]["makespan_s"][0]
        for way in ("live_mean_least_most", "mean_least_most")
    ]
    factor = found["factor"]
    rows.append(
        ["plain ÷ Muri", f"**{factor['live']:.2f}**, {factor['twin']:.2f}", "", f"{ratios[0]:.2f}, {ratios[1]:.2f}", ""]
    )
    return table(["", "average JCT live, twins (range)", "error", "makespan live, twins (range)", "error"], rows)


def synergy_opt(_: str) -> str:
    """TUNE against the optimum, by split of the models."""
    rows = []
    for split, case in stored("synergy_opt").items():
        draws = [draw for name, draw in case["figures"].items() if name.startswith("seed")]
        spans = [
            _span(draws, "tune_s", 1e3), _span(draws, "opt_each_job_s"), _span(draws, "opt_counting_equal_jobs_s"),
        ]  # fmt: skip
        rows.append([split, f"{min(draw['tune_to_bound'] for draw in draws):.3f}", *spans])
    return table(
        ["image/language/speech", "TUNE / bound of OPT, least", "TUNE, ms", "OPT, variables for each job, s",
         "OPT, equal jobs counted, s"],
        rows,
    )  # fmt: skip


def _span(draws: Sequence[Mapping[str, float]], figure: str, unit: float = 1.0) -> str:
    values = [draw[figure] * unit for draw in draws]
    return f"{min(values):.1f}–{max(values):.1f}"


def synergy_reference(_: str) -> str:
    """Synergy's public simulator repeated."""
    rows = []
    for run in stored("synergy_reference")["runs"]:
        jcts = [f"{run['ours'][figure]:,.2f}" for figure in ("avg_jct_h", "p50_jct_h", "p99_jct_h")]
        off = max(map(abs, run["relative_error"].values()))
        times = [f"{run['wall_s']:.1f}", f"{run['cpu_s']:.1f}", f"{run['public_code_wall_s']:.0f}"]
        rows.append([f"`{run['policy']}`", *jcts, "0" if off < 1e-15 else f"{off:.0e}", *times])
    head = ["policy", "average JCT, h", "median", "p99", "deviation", "seconds", "CPU seconds", "public code, s"]
    return table(head, rows)


def _reference(trace: str, policy: str, beside: str = "") -> Mapping[str, Any]:
    """A run of benchmarks/simulator_reference.py."""
    wanted = (trace, policy, beside or policy)
    runs: list[Mapping[str, Any]] = stored("reference")["runs"]
    return next(run for run in runs if (run["trace"], run["policy"], run["beside"]) == wanted)


def models(_: str) -> str:
    """The reference model beside the default one."""
    rows = []
    for policy in ("srtf", "srsf", "tiresias", "antman", "muri-s", "muri-l"):
        run = _reference("trace1", policy)
        reference_s, default_s = run["ours"]["avg_jct_s"], run["default_avg_jct_s"]
        change = written(default_s / reference_s - 1, "+z.1%")
        rows.append([f"`{policy}`", f"{reference_s:,.0f} s", f"{default_s:,.0f} s", change])
    return table(["policy", "reference", "default", ""], rows)


def published(_: str) -> str:
    """How far the reference model is from the public simulator."""
    rows = []
    for policy in ("srtf", "srsf", "tiresias", "antman", "muri-s", "muri-l"):
        runs = [_reference(trace, policy) for trace in ("trace1", "trace3")]
        rows.append([f"`{policy}`", *(", ".join(_off(run, name) for name in _PUBLISHED) for run in runs)])
    return table(["policy", "trace 1", "trace 3"], rows)


def published_jct(_: str) -> str:
    """The reference model's muri-jct beside what the public simulator prints of Muri-S and Muri-L."""
    rows = []
    beside = {"muri-s": "durations known, against the published Muri-S", "muri-l": "unknown, against Muri-L"}
    for other, title in beside.items():
        runs = [_reference(trace, "muri-jct", other) for trace in ("trace1", "trace3")]
        rows.append([title, *(", ".join(_off(run, name) for name in _PUBLISHED[:2]) for run in runs)])
    return table(["average JCT, makespan", "trace 1", "trace 3"], rows)


def _off(run: Mapping[str, Any], figure: str) -> str:
    return written(run["ratio"][figure] - 1, "+z.2%")


TABLES: Final[Mapping[str, Callable[[str], str]]] = {
    "compatibility": lambda _: page_of(stored("compatibility")),
    "demo": lambda _: f"{demo.sentence(stored('demo'))}\n",
    "fidelity": fidelity,
    "fidelity-errors": fidelity_errors,
    "forty": forty,
    "gpu-check": lambda page: gpu_check_page.marked(page, gpu_check_page.stored()),
    "models": models,
    "policies": lambda _: f"\n{compare_policies_page.tables(stored('compare_policies'), _TRACES)}\n",
    "policies-plain": lambda _: compare_policies_page.plain_table(stored("compare_policies_plain"), _TRACES[:3]),
    "published": published,
    "published-jct": published_jct,
    "synergy-opt": synergy_opt,
    "synergy-reference": synergy_reference,
}
"""Functions that make the tables, given the page."""
