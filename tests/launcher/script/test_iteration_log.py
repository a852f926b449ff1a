"""The log of iteration ends, for who measures a script from outside."""

import time

from muri.launcher.job import stage_clock
from muri.launcher.job.stage_clock import PROPAGATE, StageClock
from muri.launcher.script.script_clock import clock_from_environment, log_iterations
from muri.launcher.script.solo import wants_stages
from muri.profiler.dryrun.messages import ITERATION_LOG_VARIABLE, StampReader


def iterate(clock, count):
    for _ in range(count + 1):  # an iteration ends where the next one begins
        clock.enter(0)
        clock.leave()


def test_each_iteration_is_logged_when_it_ends_and_nothing_waits_for_the_gpu(tmp_path, monkeypatch):
    environment = {ITERATION_LOG_VARIABLE: str(tmp_path / "log")}
    assert wants_stages(environment)
    before_s = time.perf_counter()
    clock = clock_from_environment(environment)
    iterate(clock, 3)
    stamps_s = StampReader(tmp_path / "log").read()
    assert len(stamps_s) == 3
    assert stamps_s == sorted(stamps_s)
    assert before_s - 0.001 <= stamps_s[0] <= stamps_s[-1] <= time.perf_counter() + 0.001
    waits: list[bool] = []
    monkeypatch.setattr(stage_clock, "wait_for_gpu", lambda: waits.append(True))
    clock.enter(PROPAGATE)
    clock.leave()
    assert waits == []


def test_only_the_first_rank_logs(tmp_path):
    clock = StageClock()
    log_iterations(clock, {ITERATION_LOG_VARIABLE: str(tmp_path / "log"), "RANK": "1", "WORLD_SIZE": "2"})
    log_iterations(clock, {})
    assert clock.at_boundary == []
    assert not (tmp_path / "log").exists()


def test_a_script_runs_on_where_nothing_can_be_logged(tmp_path, capsys):
    clock = StageClock()
    log_iterations(clock, {ITERATION_LOG_VARIABLE: str(tmp_path / "missing" / "log")})
    iterate(clock, 2)
    assert clock.iterations == 2
    assert "iterations are not logged" in capsys.readouterr().err
