"""The generator: what was asked for comes out, the same for the same seed; the shipped examples are its work."""

import shlex
from pathlib import Path

import pytest

from muri.cli import cli, run_command
from muri.simulator.traces.generator import Durations, Recipe, generate
from muri.simulator.traces.models import models_of_pairs, synergy_sensitivity
from muri.simulator.traces.read import overview_of, read_trace
from muri.simulator.traces.rows import TraceError

MURI = "from muri.cli import main; main()"
REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples" / "traces"


def example_commands() -> list[list[str]]:
    """The commands that the examples' README shows."""
    lines = (EXAMPLES / "README.md").read_text(encoding="utf-8").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("muri trace generate")]


@pytest.mark.parametrize("command", example_commands(), ids=lambda command: Path(command[-1]).stem)
def test_the_shipped_examples_are_what_their_commands_make(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / Path(command[-1]).name
    assert run_command(cli, [*command[:-1], str(output)]) == 0
    assert output.read_bytes() == (REPOSITORY / command[-1]).read_bytes()


def test_a_shipped_example_has_all_that_policies_ask_of_jobs() -> None:
    jobs = read_trace(EXAMPLES / "mixed-appetites.csv").jobs
    assert all(synergy_sensitivity(job.key.model) for job in jobs)
    for job in jobs:
        assert job.batch is not None
        assert job.batch.iteration_s() == pytest.approx(job.profile.iteration_s)
        assert job.batch.mem_gib() == pytest.approx(job.profile.gpu_mem_gib)
        assert (job.batch.communicate_s > 0) == (job.gpu_count > 1)
        assert job.profile.synchronize_s == job.batch.communicate_s
    assert len({job.gpu_share for job in jobs}) > 5


def test_every_shipped_example_has_its_command() -> None:
    assert {Path(command[-1]).name for command in example_commands()} == {path.name for path in EXAMPLES.glob("*.csv")}
    assert all(200 <= len(read_trace(path).jobs) <= 500 for path in EXAMPLES.glob("*.csv"))


@pytest.mark.parametrize("load", [0.3, 0.9, 2.0])
def test_the_load_is_met(load: float) -> None:
    overview = overview_of(generate(Recipe(jobs=500, gpus=64, load=load, seed=5)))
    assert overview.load(64) == pytest.approx(load, rel=1e-4)


def test_mixes_are_met_within_chance() -> None:
    recipe = Recipe(jobs=8000, gpus=64, seed=6, gpu_mix={1: 3, 4: 1}, bottlenecks={"storage": 1, "network": 1})
    overview = overview_of(generate(recipe))
    assert set(overview.by_gpu_count) == {1, 4}
    assert overview.by_gpu_count[4].jobs == pytest.approx(2000, abs=5 * (8000 * 0.25 * 0.75) ** 0.5)
    assert set(overview.by_bottleneck) == {"storage", "network"}
    assert overview.by_bottleneck["network"].jobs == pytest.approx(4000, abs=5 * 2000**0.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"jobs": 0}, "jobs is 0; it must be at least 1"),
        ({"load": 0.0}, "load is 0.0; it must be more than 0"),
        ({"load": float("nan")}, "load is nan"),
        ({"opportunistic": 1.5}, "it must be from 0 to 1"),
        ({"bottlenecks": {"disk": 1.0}}, "unknown bottleneck disk; choose among storage, cpu, gpu, network"),
        ({"bottlenecks": {"gpu": 0.0}}, "the bottleneck mix needs weights"),
        ({"gpu_mix": {16: 1.0}}, "jobs with 16 GPUs can't run on 8"),
        ({"durations": Durations(100, 50, 1, 1000)}, "0 ≤ floor < median ≤ longest must hold"),
        ({"durations": Durations(1, 50, -1, 1000)}, "sigma is -1"),
    ],
)
def test_what_no_trace_can_be_like_is_refused(wrong: dict[str, object], said: str) -> None:
    recipe: dict[str, object] = {"jobs": 5, "gpus": 8, **wrong}
    with pytest.raises(TraceError) as caught:
        Recipe(**recipe)  # type: ignore[arg-type]
    assert said in str(caught.value)


PAIRS = """job_a,job_b,solo_a_iters_per_s,solo_b_iters_per_s,speed_a_fraction,speed_b_fraction
Net (batch size 10),Net (batch size 20),10,5,0.6,0.7
Net (batch size 10),Other,10,2,0.5,0.5
"""


def test_models_of_a_table_of_pairs():
    ten, twenty, other = models_of_pairs(PAIRS.splitlines())
    assert (ten.name, ten.iteration_s, twenty.iteration_s) == ("Net (batch size 10)", 0.1, 0.2)
    assert twenty.batch.iteration_s() == pytest.approx(0.2)
    assert twenty.batch.compute_fixed_s == pytest.approx(0, abs=1e-9)
    assert (ten.gpu_mem_gib, twenty.gpu_mem_gib) == pytest.approx((6.25, 11.0))
    assert (other.batch, other.iteration_s, other.gpu_mem_gib) == (None, 0.5, 4.0)
    assert other.profile(4).stage_s == (0.0, 0.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("solo_b_iters_per_s", "rate", "no column solo_b_iters_per_s"),
        ("10,5,", "10,0,", "line 2: Net .batch size 20. alone makes '0' iterations"),
        ("10,5,", "10,100,", "Net trains larger batches in less time"),
    ],
)
def test_tables_of_pairs_that_say_nothing_of_models_are_refused(old, new, message):
    with pytest.raises(TraceError, match=message):
        models_of_pairs(PAIRS.replace(old, new).splitlines())


def test_the_command_trains_the_models_of_a_table(tmp_path: Path) -> None:
    table, made = tmp_path / "pairs.csv", tmp_path / "t.csv"
    table.write_text(PAIRS)
    command = ["trace", "generate", "--jobs", "30", "--gpus", "8", "--pairs", str(table), "-o", str(made)]
    assert run_command(cli, command) == 0
    batches = {job.key.model: job.batch for job in read_trace(made).jobs}
    assert batches == {model.name: model.batch for model in models_of_pairs(PAIRS.splitlines())}
