"""Tables and figures of the SJF-BSBF paper ("wise resource sharing"), on workloads like its own.

A full run of each takes a minute or two of CPU, `sjf-bsbf-fig6a` three. Several in one command share their simulations.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from statistics import fmean
from typing import Final

import numpy as np

from muri.profiler.interference import LinearFit, Point, fit_line
from muri.simulator.traces.models import models_of_pairs
from muri_lab.benchmarks.papers.frame import Curve, Experiment, Outcome, Row
from muri_lab.benchmarks.papers.sjf_bsbf_workload import (
    JOBS,
    POLICIES,
    QUICK_JOBS,
    SEEDS,
    SPLIT,
    Outcomes,
    family_of,
    injected,
    is_large,
    is_small,
    measured,
    on_testbed,
    outcomes,
    pair_lines,
    pair_speeds,
    workload,
)

HOUR_S: Final = 3600.0
SHARING: Final = ("sjf-ffs", "sjf-bsbf")
EXCLUSIVE: Final = ("fifo", "sjf", "tiresias")
LOADS: Final = (0.5, 1.0, 1.5, 2.0)
RATIOS: Final = (1.0, 1.25, 1.5, 1.75, 2.0)
SHORTEST: Final = 0.4  # Share of the jobs, the shortest ones, of which section VI-C speaks

JCT, QUEUEING = "average JCT", "average queueing time"
LOWER = "average JCT below that of {}"
SIZES: Final = {"all jobs": lambda _: True, "large jobs": is_large, "small jobs": is_small}

Published = Mapping[str, tuple[tuple[float, float, float], tuple[float, float, float]]]
"""Hours by policy: average JCT of all, large and small jobs, and their average queueing time."""

TABLE_3: Final[Published] = {
    "fifo": ((2.34, 3.92, 2.13), (1.65, 2.17, 1.58)),
    "sjf": ((1.25, 3.50, 0.94), (0.56, 1.76, 0.39)),
    "tiresias": ((1.51, 3.48, 1.23), (0.81, 1.73, 0.68)),
    "pollux": ((1.04, 1.96, 0.91), (1.00, 1.21, 0.97)),
    "sjf-ffs": ((1.23, 4.29, 0.81), (0.18, 0.98, 0.07)),
    "sjf-bsbf": ((1.01, 3.38, 0.68), (0.14, 0.89, 0.03)),
}
TABLE_4: Final[Published] = {
    "fifo": ((7.52, 10.06, 7.08), (0.73, 4.06, 0.21)),
    "sjf": ((2.55, 7.00, 1.90), (1.87, 5.35, 1.35)),
    "tiresias": ((5.09, 8.25, 4.59), (4.41, 6.60, 4.04)),
    "pollux": ((4.69, 6.03, 4.51), (4.41, 5.03, 4.31)),
    "sjf-ffs": ((1.89, 8.12, 0.99), (0.73, 4.06, 0.21)),
    "sjf-bsbf": ((1.57, 6.13, 0.88), (0.69, 3.62, 0.21)),
}
TABLE_2: Final = {
    "fifo": (2317.0, 662.6),
    "sjf": (2319.0, 609.55),
    "tiresias": (2398.0, 664.73),
    "sjf-ffs": (2176.0, 530.36),
    "sjf-bsbf": (2129.0, 483.16),
}
"""Makespan and average JCT, seconds."""

OTHER_WORKLOAD: Final = (
    "The published workloads are not available: ours have other durations, models (measured on a V100, not on a 2080 "
    "Ti) and arrivals, so the hours are not comparable one by one, only the order of the policies and their ratios."
)


def table_3(quick: bool) -> Outcome:
    """Table III."""
    why = (
        f"{OTHER_WORKLOAD} `fifo` here fills gaps behind a job that does not fit, and waits far less. `sjf-ffs` gains "
        "nothing here: many of these pairs get less done together than one after the other, up to 11 times slower, "
        "and no policy here tests that. Pollux's published queueing time of all jobs, 1.00 of 1.04 hours of JCT, is "
        "hard to believe."
    )
    return Outcome(tuple(_table(JOBS, TABLE_3, quick)), why)


def table_4(quick: bool) -> Outcome:
    """Table IV."""
    why = (
        f"{OTHER_WORKLOAD} The published queueing times of FIFO are those of SJF-FFS once more: a misprint, as its "
        "JCT of 7.52 hours shows. The published time of a plan is for 16 GPUs, ours for 64."
    )
    plan_s = measured("sjf-bsbf", _scaled(2.0, quick), quick).plan_s
    plan = Row("sjf-bsbf", "time of a plan, on average (section V-B4)", "s", "< 0.02", plan_s)
    return Outcome((*_table(2 * JOBS, TABLE_4, quick), plan), why)


def _scaled(load: float, quick: bool) -> int:
    return round(load * (QUICK_JOBS if quick else JOBS))


def _table(jobs: int, published: Published, quick: bool) -> Iterator[Row]:
    found = {policy: measured(policy, _scaled(jobs / JOBS, quick), quick) for policy in POLICIES}
    for place, figure in enumerate((JCT, QUEUEING)):
        for policy in POLICIES:
            for column, (size, counts) in enumerate(SIZES.items()):
                figures = found[policy].figures(counts)
                seconds = figures and (figures.avg_jct_s, figures.queueing_delay_s)[place]
                ours = None if seconds is None else seconds / HOUR_S
                yield Row(f"{policy}, {size}", figure, "h", published[policy][place][column], ours)
    for other in ("tiresias", "pollux", "sjf-ffs"):
        theirs = 100 * (1 - published["sjf-bsbf"][0][0] / published[other][0][0])
        yield Row("sjf-bsbf", LOWER.format(other), "%", theirs, _lower(found["sjf-bsbf"], found[other]))


def _lower(own: Outcomes, other: Outcomes) -> float:
    return 100 * (1 - own.avg_jct_s / other.avg_jct_s)


def table_2(quick: bool) -> Outcome:
    """Table II, simulated."""
    rows = []
    found = {policy: on_testbed(policy, quick) for policy in TABLE_2}
    for policy, (makespan_s, jct_s) in TABLE_2.items():
        rows.append(Row(policy, "makespan", "s", makespan_s, found[policy].makespan_s))
        rows.append(Row(policy, JCT, "s", jct_s, found[policy].avg_jct_s))
    for other in ("tiresias", "sjf-ffs"):
        theirs = 100 * (1 - TABLE_2["sjf-bsbf"][1] / TABLE_2[other][1])
        rows.append(Row("sjf-bsbf", LOWER.format(other), "%", theirs, _lower(found["sjf-bsbf"], found[other])))
    why = (
        "The paper ran 30 jobs on 16 GPUs of four servers; ours are simulated, ten workloads of 30 jobs of the sizes "
        "and iterations that it states. Its arrivals and models are not known, so the seconds cannot be compared, "
        "only the order. A restart of Tiresias costs 30 s here, much for jobs of minutes."
    )
    return Outcome(tuple(rows), why)


def figure_4(quick: bool) -> Outcome:
    """Figure 4, simulated."""
    found = {policy: on_testbed(policy, quick) for policy in TABLE_2}
    rows = []
    for policy, its in found.items():
        published = "nearly 80" if policy == "sjf-bsbf" else "< 70"
        rows.append(Row(policy, "jobs with a JCT of at most 0.75 h", "%", published, _ended_within(its, 0.75 * HOUR_S)))
    rows += _queueing_by_model(found)
    least = 100 * (1 - _queueing_s(found["sjf-bsbf"], "Transformer") / _queueing_s(found["tiresias"], "Transformer"))
    rows.append(Row("sjf-bsbf, BERT or Transformer", "queueing time below that of tiresias", "%", "nearly 44", least))
    why = (
        "Ours are simulated. The published shares within 0.75 hours disagree with Table II: its makespans are at "
        "most 0.67 hours, so that no job can have taken longer. The table of pairs has no BERT; Transformer stands "
        "in for it."
    )
    return Outcome(tuple(rows), why, tuple(_distribution(policy, its) for policy, its in found.items()))


def figure_5(quick: bool) -> Outcome:
    """Figure 5."""
    found = {policy: measured(policy, _scaled(1.0, quick), quick) for policy in POLICIES}
    own = found["sjf-bsbf"]
    shortest = 100 * (1 - _of_shortest(own) / _of_shortest(found["pollux"]))
    rows = [
        Row("sjf-bsbf", "jobs with a JCT below 500 s", "%", "nearly 40", _ended_within(own, 500.0)),
        Row("sjf-bsbf, shortest 40 % of the jobs", LOWER.format("pollux"), "%", 37.0, shortest),
        *_queueing_by_model(found),
    ]
    why = (
        f"{OTHER_WORKLOAD} Fewer of our jobs are that short: half of them need more than half an hour alone. The bars "
        "of queueing time by model are published as a picture only."
    )
    return Outcome(tuple(rows), why, tuple(_distribution(policy, its) for policy, its in found.items()))


def _ended_within(found: Outcomes, seconds: float) -> float:
    times_s = found.jct_s()
    return 100 * bisect_right(times_s, seconds) / len(times_s)


def _of_shortest(found: Outcomes) -> float:
    times_s = found.jct_s()
    return fmean(times_s[: max(1, round(SHORTEST * len(times_s)))])


def _queueing_s(found: Outcomes, family: str) -> float:
    figures = found.figures(lambda record: family_of(record.job.key.model) == family)
    return figures.queueing_delay_s if figures else float("nan")


def _queueing_by_model(found: Mapping[str, Outcomes]) -> Iterator[Row]:
    families = sorted({family_of(record.job.key.model) for its in found.values() for record in its.records})
    for family in families:
        for policy, its in found.items():
            yield Row(f"{policy}, {family}", QUEUEING, "h", None, _queueing_s(its, family) / HOUR_S)


def _distribution(policy: str, found: Outcomes) -> Curve:
    times_s = found.jct_s()
    shares = tuple((number + 1) / len(times_s) for number in range(len(times_s)))
    return Curve(policy, "JCT, hours", "share of the jobs", tuple(time_s / HOUR_S for time_s in times_s), shares)


def figure_6a(quick: bool) -> Outcome:
    """Figure 6a."""
    loads = LOADS[:2] if quick else LOADS
    found = {(policy, load): measured(policy, _scaled(load, quick), quick) for policy in POLICIES for load in loads}
    published = {1.0: TABLE_3, 2.0: TABLE_4}
    rows = [
        Row(f"{policy}, {load:g} × the load", JCT, "h", _all_jobs(published.get(load), policy), its.avg_jct_s / HOUR_S)
        for (policy, load), its in found.items()
    ]
    curves = [
        Curve(
            policy,
            "load, × 240 jobs",
            "average JCT, hours",
            loads,
            tuple(found[policy, load].avg_jct_s / HOUR_S for load in loads),
        )
        for policy in POLICIES
    ]
    why = f"{OTHER_WORKLOAD} Of the other loads the paper has a picture only."
    return Outcome(tuple(rows), why, tuple(curves))


def _all_jobs(published: Published | None, policy: str) -> float | None:
    return None if published is None else published[policy][0][0]


def figure_6b(quick: bool) -> Outcome:
    """Figure 6b."""
    ratios = RATIOS[-2:] if quick else RATIOS
    traces = [workload(_scaled(1.0, quick), seed, quick) for seed in (SEEDS[:1] if quick else SEEDS)]
    found = {(policy, xi): outcomes(policy, traces, injected(xi, quick)) for policy in SHARING for xi in ratios}
    rows = [
        Row(f"{policy}, ξ = {xi:g}", JCT, "h", None, found[policy, xi].avg_jct_s / HOUR_S)
        for policy in SHARING
        for xi in ratios
    ]
    for xi in ratios:
        published = "0" if xi <= 1.25 else "8 to 13"
        ours = _lower(found["sjf-bsbf", xi], found["sjf-ffs", xi])
        rows.append(Row(f"sjf-bsbf, ξ = {xi:g}", LOWER.format("sjf-ffs"), "%", published, ours))
    curves = [
        Curve(
            policy,
            "ξ of every pair",
            "average JCT, hours",
            ratios,
            tuple(found[policy, xi].avg_jct_s / HOUR_S for xi in ratios),
        )
        for policy in SHARING
    ]
    why = (
        "Every pair gets the same ξ in place of its measured one, in plans and in the simulation alike. Up to 1.25 "
        "both policies make nearly the same choices; what is left of a difference comes from the choice of the "
        "partner and of the sub-batch. Where company hurts, the test pays."
    )
    return Outcome(tuple(rows), why, tuple(curves))


def figure_2(quick: bool) -> Outcome:
    """Figure 2: how well Eqs. 3 and 14 predict the throughput of a batch size that they were not fitted to."""
    rows = []
    for family, points in sorted(_batch_points(quick).items()):
        errors = []
        for left_out in points:
            line = fit_line([point for point in points if point is not left_out])
            errors.append(abs(line.seconds(left_out.size) / left_out.seconds - 1))
        rows.append(Row(family, "throughput of a batch size left out: mean error", "%", None, 100 * fmean(errors)))
        whole: LinearFit = fit_line(points)
        misfit = fmean(abs(whole.seconds(point.size) / point.seconds - 1) for point in points)
        rows.append(Row(family, "throughput of all batch sizes: mean misfit", "%", None, 100 * misfit))
    why = (
        "The paper says that its model closely represents the data, without a number. Ours are the configurations of "
        "the table of pairs, on one GPU; so there is no communication in them, and Eq. 7 is Eq. 3. The fit is that "
        "of `muri profile fit`."
    )
    return Outcome(tuple(rows), why)


def _batch_points(quick: bool) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = defaultdict(list)
    for model in models_of_pairs(pair_lines(quick)):
        if model.batch is not None:
            found[family_of(model.name)].append(Point(model.batch.batch_size, model.iteration_s))
    return {family: points for family, points in found.items() if len(points) > 2}


def figure_3(quick: bool) -> Outcome:
    """Figure 3: ξ of models that share a GPU."""
    by_family: dict[str, list[float]] = defaultdict(list)
    every: list[float] = []
    for pair in pair_speeds(quick):
        every += (1 / pair.speed_a, 1 / pair.speed_b)
        sides = (pair.model_a, pair.speed_a), (pair.model_b, pair.speed_b)
        for (name, speed), (other, _) in (sides, sides[::-1]):
            if family_of(other) == "ResNet-18":
                by_family[family_of(name)].append(1 / speed)
    rows = [
        Row("all pairs", "greatest ξ", "", 6.0, max(every)),
        Row("all pairs", "median ξ", "", None, float(np.median(every))),
    ]
    spread = chain.from_iterable(
        (
            Row(f"{family} beside ResNet-18", "least ξ", "", None, min(values)),
            Row(f"{family} beside ResNet-18", "greatest ξ", "", None, max(values)),
        )
        for family, values in sorted(by_family.items())
    )
    why = (
        "Pairs that Gavel's authors measured on a V100, with ResNet-18 (on CIFAR-10) as in the paper, which measured "
        "on 2080 Ti. Its figure is a picture but for the range “up to 6”. Muri measures pairs with `muri profile "
        "pair`."
    )
    return Outcome((*rows, *spread), why)


MEASURED: Final = "Nothing is fitted: the table's ratios as they are."
EXPERIMENTS: Final = (
    Experiment("sjf-bsbf-table2", "Table II", "Makespan and average JCT of 30 jobs on 16 GPUs", SPLIT, table_2),
    Experiment("sjf-bsbf-table3", "Table III", "Large and small jobs, 240 jobs on 64 GPUs", SPLIT, table_3),
    Experiment("sjf-bsbf-table4", "Table IV", "Large and small jobs, 480 jobs on 64 GPUs", SPLIT, table_4),
    Experiment(
        "sjf-bsbf-fig2",
        "Figure 2",
        "Throughput over batch sizes, and the line fitted",
        "Each batch size is predicted by a line that was fitted to the others.",
        figure_2,
    ),
    Experiment("sjf-bsbf-fig3", "Figure 3", "Interference ratios of pairs", MEASURED, figure_3),
    Experiment("sjf-bsbf-fig4", "Figure 4", "JCT and queueing of 30 jobs on 16 GPUs", SPLIT, figure_4),
    Experiment("sjf-bsbf-fig5", "Figure 5", "JCT and queueing of 240 jobs on 64 GPUs", SPLIT, figure_5),
    Experiment("sjf-bsbf-fig6a", "Figure 6a", "Average JCT over the load", SPLIT, figure_6a),
    Experiment("sjf-bsbf-fig6b", "Figure 6b", "Average JCT when every pair has one ξ", SPLIT, figure_6b),
)
