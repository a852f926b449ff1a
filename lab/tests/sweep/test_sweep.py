"""Sweeps: the same answer however many processes, in the order of the runs, and no worker left behind."""

import multiprocessing
from dataclasses import replace

import pytest
from polling import until
from sweep_builders import CLUSTER, runs, small_trace

from muri.errors import MuriError
from muri.simulator.metrics import Outcome, document_of, summarize
from muri.simulator.model import Cluster, SimulationError
from muri.simulator.run import SweepError, sweep
from muri_lab.sweep.on_slurm import sweep_on_slurm

WALL_CLOCK = {"wall_s", "decision_mean_s", "decision_p99_s"}


def wait_for_the_end_of_all_workers() -> None:
    # The pool's own thread joins the workers too. Where it has reaped one but not yet noted that, a join here returns
    # at once and the dead worker still counts as started.
    until(lambda: not multiprocessing.active_children(), "the end of all workers", 30)


def figures(outcome: Outcome) -> dict[str, object]:
    return {name: value for name, value in outcome.metrics.as_json().items() if name not in WALL_CLOCK}


def test_processes_give_what_one_process_gives_in_the_order_of_the_runs() -> None:
    # The longest first, so that it ends last.
    wanted = runs(("muri-s", "fifo"), [small_trace("long", 30), small_trace("short", 5)])
    seen: dict[int, float] = {}
    alone, together = sweep(wanted), sweep(wanted, 2, seen.__setitem__)
    assert seen == dict.fromkeys(range(len(wanted)), 1.0)
    assert [one.run for one in together] == wanted
    assert [one.result.records for one in together] == [one.result.records for one in alone]
    assert [one.result.samples for one in together] == [one.result.samples for one in alone]
    assert list(map(figures, together)) == list(map(figures, alone))


@pytest.mark.parametrize("processes", [1, 2])
def test_refusal_of_one_run_is_that_of_the_sweep(processes: int) -> None:
    wanted = runs()
    wanted[1] = replace(wanted[1], cluster=Cluster(1, 1))
    with pytest.raises(SimulationError, match=f"^{wanted[1].name}: .* GPUs, but the cluster has 1"):
        sweep(wanted, processes)
    wait_for_the_end_of_all_workers()


def test_a_fault_of_the_simulator_tells_in_which_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("muri.simulator.run.run_one", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        sweep(runs(("fifo", "srtf")))
    assert caught.value.__notes__ == ["in the simulation of small, fifo, seed 0"]


def test_killed_worker_is_an_error_that_says_what_to_do() -> None:
    def kill_one(index: int, share: float) -> None:
        for child in multiprocessing.active_children()[:1]:  # none is left when the pool tells of its end
            child.kill()

    long = small_trace(jobs=2000)
    with pytest.raises(SweepError, match="fewer --jobs"):
        sweep(runs(("muri-s", "muri-l"), [long]), 2, kill_one)
    wait_for_the_end_of_all_workers()


def test_interrupt_ends_the_workers() -> None:
    def interrupt(index: int, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(runs(("muri-s", "muri-l"), [small_trace(jobs=2000)]), 2, interrupt)
    wait_for_the_end_of_all_workers()


def test_seeds_are_averaged_and_told_apart() -> None:
    base = runs(("muri-s",))[0]
    wanted = [
        replace(base, settings=replace(base.settings, profile_noise=1.0, seed=seed), cluster=CLUSTER) for seed in (3, 4)
    ]
    document = document_of(summarize(sweep(wanted)))["policies"]["muri-s"]
    each = [document["seeds"][seed]["avg_jct_s"] for seed in ("3", "4")]
    assert each[0] != each[1]
    assert document["avg_jct_s"] == pytest.approx(sum(each) / 2)
    assert document["jobs"] == 40


@pytest.mark.parametrize(
    ("word", "message"), [("partition", "KEY=VALUE"), ("=x", "KEY=VALUE"), ("exclude=[", "is not a valid value")]
)
def test_slurm_options_that_are_none(word: str, message: str) -> None:
    with pytest.raises(MuriError, match=message):
        sweep_on_slurm(runs(), 1, (word,), None, lambda index, share: None)
