"""Two scripts take turns, in virtual time: who runs when, and what follows from the ends of their iterations."""

import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from muri.clock import Clock
from muri.profiler.dryrun.messages import StampReader
from muri.profiler.records import ProfileKey
from muri_lab.interference import corun
from muri_lab.interference.corun import Budget, PairFailedError, Runner, measure_pair

KEYS = (ProfileKey("a", 8, 1, "gpu"), ProfileKey("b", 8, 1, "gpu"))
STEP_S = 0.001
USUAL = Budget()


class Script(StampReader):
    """Iterates on the machine's clock while it is not stopped."""

    def __init__(self, alone_s, beside_s):
        super().__init__(Path("/nowhere"))
        self.lengths_s = {False: alone_s, True: beside_s}
        self.stopped = False
        self.done = 0.0

    def read(self):
        return self.stamps_s

    def work(self, now_s, *, beside):
        self.done += STEP_S / self.lengths_s[beside]
        if self.done >= 1:
            self.done -= 1
            self.stamps_s.append(now_s)


class Machine(Clock):
    """Two scripts, a clock that goes on while one sleeps, and the turns in which they ran."""

    def __init__(self, *scripts, late_s=0.0):
        self.scripts = scripts
        self.late_s = late_s  # So much later than asked does a sleep end
        self.now_s = 0.0
        self.turns = []

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        running = [script for script in self.scripts if not script.stopped]
        names = "".join(name for name, script in zip("ab", self.scripts, strict=True) if script in running)
        if self.turns[-1:] != [names]:
            self.turns.append(names)
        for _ in range(round((seconds + self.late_s) / STEP_S) or 1):
            self.now_s += STEP_S
            for script in running:
                script.work(self.now_s, beside=len(running) > 1)

    def killpg(self, group, number):
        self.scripts[group].stopped = number == signal.SIGSTOP


@pytest.fixture
def measured(monkeypatch, tmp_path):
    def measure(*scripts, budget=USUAL, late_s=0.0):
        machine = Machine(*scripts, late_s=late_s)

        @contextmanager
        def running(command, folder):
            index = "ab".index(folder.name)
            yield Runner(command, SimpleNamespace(pid=index, poll=lambda: None), folder, scripts[index])

        monkeypatch.setattr(corun, "os", SimpleNamespace(killpg=machine.killpg))
        monkeypatch.setattr(corun, "_running", running)
        (tmp_path / "job.py").touch()
        command = [str(tmp_path / "job.py")]
        return measure_pair(command, command, KEYS, budget=budget, clock=machine), machine

    return measure


def test_each_runs_alone_then_both_until_the_ratios_are_sure(measured):
    found, machine = measured(Script(0.02, 0.06), Script(0.05, 0.075))
    assert machine.turns == ["ab", *["a", "b", "ab"] * 3]
    assert found.rounds == 3
    assert (found.a.solo_s, found.a.shared_s, found.a.ratio) == pytest.approx((0.02, 0.06, 3.0), rel=0.02)
    assert (found.b.solo_s, found.b.shared_s, found.b.ratio) == pytest.approx((0.05, 0.075, 1.5), rel=0.02)
    assert found.a.iterations == pytest.approx(found.b.iterations * 0.075 / 0.06, abs=4)
    assert found.measured_s == pytest.approx(0.9 * 10, rel=0.02)  # three of ten rounds of 30 s


def test_who_gains_beside_the_other_is_not_slowed_down(measured):
    found, _ = measured(Script(0.04, 0.03), Script(0.02, 0.02))
    assert (found.a.ratio, found.b.ratio) == (1.0, pytest.approx(1.0, abs=0.02))


def test_iterations_after_the_end_of_a_turn_do_not_count(measured):
    found, _ = measured(Script(0.02, 0.06), Script(0.05, 0.075), late_s=1.0)
    assert found.rounds == 3
    # 0.85 s of each turn of 1 s count, and the first end of an iteration in it ends none.
    assert (found.a.iterations, found.b.iterations) == pytest.approx((3 * 13, 3 * 10.5), abs=3)


def test_a_budget_for_few_iterations_is_refused_once_they_are_known(measured):
    with pytest.raises(PairFailedError, match="need at least 28 s"):
        measured(Script(0.5, 0.5), Script(0.1, 0.1), budget=Budget(20.0))


def test_a_script_that_never_settles_is_given_up_on(measured):
    with pytest.raises(PairFailedError, match="not steady after 5 s: only 2 iterations"):
        measured(Script(2.0, 2.0), Script(0.1, 0.1), budget=Budget(20.0, startup_s=5.0))
