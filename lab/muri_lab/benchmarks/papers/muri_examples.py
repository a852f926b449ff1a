"""The worked examples of the Muri paper: Table 2 and Figures 1 and 4 to 6, computed by the speed models that plan."""

from typing import Final

import numpy as np

from muri.policies.grouping.solvers import match_weights
from muri.policies.lockstep import Lockstep, Reference
from muri.policies.speed import Evaluation, Fair, Shape, SpeedModel, shape_of
from muri.simulator.traces.models import measured_models
from muri_lab.benchmarks.papers.frame import Experiment, Outcome, Row

NONE_FITTED: Final = "Nothing is fitted."
TABLE_2: Final = {"shufflenet_v2_x1_0": 0.86, "a2c": 0.48, "gpt2": 0.41, "vgg16": 0.25}
"""Throughput in a group of all four on 16 GPUs over that alone."""

TABLE_2_GPUS: Final = 16

MODELS: Final[tuple[tuple[str, SpeedModel], ...]] = (
    ("Eq. 3", Lockstep()),
    ("public simulator", Reference()),
    ("fair turns", Fair()),
)

FIGURE_4: Final = {"A": (2.0, 1.0), "B": (1.0, 2.0), "C": (2.0, 1.0), "D": (1.0, 2.0), "E": (4.0, 2.0), "F": (2.0, 4.0)}
"""Units of time on CPU and GPU; E is A and C fused."""

FIGURE_6: Final = ((1.0, 2.0, 1.0, 1.0), (1.0, 1.0, 2.0, 1.0))  # Units of time on storage, CPU, GPU and network


def table_2(quick: bool) -> Outcome:
    """Speeds of a group of four with a bottleneck each; takes no time."""
    of_name = {model.name: shape_of(model.profile(TABLE_2_GPUS)) for model in measured_models()}
    shapes = [of_name[name] for name in TABLE_2]
    rows: list[Row] = []
    for how, model in MODELS:
        speeds = _together(model, shapes).speed[0].tolist()
        figures = zip(TABLE_2, TABLE_2.values(), speeds, strict=True)
        rows += [Row(f"{name}, {how}", "normalized throughput", "×", theirs, own) for name, theirs, own in figures]
        rows.append(Row(f"all four, {how}", "normalized throughput", "×", 2.00, sum(speeds)))
    return Outcome(
        tuple(rows),
        "The published figures were measured; ours are what speed models predict from the stage times of the paper's "
        "public simulator on 16 GPUs. The published speeds are those of a rotation: divided by their iteration times, "
        "all four jobs advance 0.75 to 0.86 iterations a second. Under Eq. 3 the longest iteration, ShuffleNet's, "
        "bounds the period, and stages that overlap cost nothing. The public simulator's formula makes the period of "
        "four jobs 1.35 times as long, which comes close. Fair turns, Muri's own discipline, do not hold short "
        "iterations to the pace of long ones: all four jobs run at 0.88 of their speed, predicted, not measured.",
    )


def examples(quick: bool) -> Outcome:
    """The examples in Figures 1 and 4 to 6; takes no time."""
    rotation = [_shape(tuple(float(place == resource) for place in range(4))) for resource in range(4)]
    rows = [
        Row(
            "Figure 1: four jobs, a bottleneck each",
            "throughput",
            "×",
            4.0,
            float(_together(Lockstep(), rotation).speed.sum()),
        ),
        *(
            Row(f"Figure 4: {pair}", "γ", "", theirs, _pair_efficiency(pair))
            for pair, theirs in {"A with B": 1.0, "C with D": 1.0, "A with C": 0.75, "E with F": 1.0}.items()
        ),
        *_figure_5(),
        Row("Figure 6: best ordering", "T", "", 5.0, _period_s("best")),
        Row("Figure 6: worst ordering", "T", "", "longer", _period_s("worst")),
    ]
    return Outcome(
        tuple(rows),
        "Stage times are those of the figures where the text gives them; A to D of Figure 4 follow from its words "
        "on E and F. The published T of Figure 6 follows from the text: the ordering “perfectly overlaps two jobs”, so "
        "that T is an iteration of either. Figures 2 (11 / 6.5 = 1.7 ×) and 7 have no stage times in the text.",
    )


def _shape(stage_s: tuple[float, ...]) -> Shape:
    return Shape(stage_s, sum(stage_s))


def _together(model: SpeedModel, shapes: list[Shape]) -> Evaluation:
    return model.evaluate(shapes, np.arange(len(shapes), dtype=np.intp)[None, :])


def _pair_efficiency(pair: str) -> float:
    first, second = pair.split(" with ")
    shapes = [_shape(FIGURE_4[first]), _shape(FIGURE_4[second])]
    return float(_together(Lockstep(), shapes).efficiency[0])


def _figure_5() -> tuple[Row, ...]:
    """The matching of A to D, whose weights are the γ of pairs."""
    names = "ABCD"
    weights = np.zeros((4, 4))
    for one in range(4):
        for other in range(one):
            weights[one, other] = weights[other, one] = _pair_efficiency(f"{names[other]} with {names[one]}")
    pairs = ", ".join(sorted(f"{names[min(pair)]}{names[max(pair)]}" for pair in match_weights(weights).pairs))
    crossed = weights[0, 2] + weights[1, 3]
    return (
        Row("Figure 5: Blossom", "pairs", "", "AB, CD", pairs),
        Row("Figure 5: matching 1", "weight", "", 2.0, float(weights[0, 1] + weights[2, 3])),
        Row("Figure 5: matching 2", "weight", "", "less", float(crossed)),
    )


def _period_s(ordering: str) -> float:
    return float(_together(Lockstep(ordering), [_shape(stage_s) for stage_s in FIGURE_6]).period_s[0])


EXPERIMENTS: Final = (
    Experiment("muri-table2", "Table 2", "Four jobs with a bottleneck each on 16 GPUs", NONE_FITTED, table_2),
    Experiment("muri-examples", "Figures 1 and 4 to 6", "The paper's worked examples", NONE_FITTED, examples),
)
