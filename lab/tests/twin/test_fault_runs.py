"""Stories with faults: samples of them here; `muri-lab fault-runs` tells as many as there is time for."""

import re
from collections import Counter

import pytest
from click.testing import CliRunner
from mutations import MUTATIONS, mutated

from muri_lab.twin.fault_runs import main, smaller, tell_some
from muri_lab.twin.ordeal import endure
from muri_lab.twin.story import KINDS, tell

PART = 105
PARTS = 20
FIRST_PARTS = 4
MOST_RUNS = 300
RARELY_FOUND = {"others' holds are lifted": 600}
"""From which seed on it is found within `MOST_RUNS`."""
SLOWLY_FOUND = {"others' holds are lifted", "the journal is skipped", "a drain leaves members behind"}


def thorough_if(slow, value):
    return pytest.param(value, marks=pytest.mark.thorough if slow else ())


@pytest.mark.parametrize("part", [thorough_if(part >= FIRST_PARTS, part) for part in range(PARTS)])
def test_no_invariant_breaks(part):
    tally = tell_some(range(1 + part * PART, 1 + (part + 1) * PART))
    assert tally.broken == []
    assert tally.runs == PART
    assert tally.injected.total() > PART


def test_every_kind_of_fault_is_injected():
    injected: Counter[str] = Counter()
    for seed in range(1, 401):
        injected.update(endure(tell(seed)).injected)
        if injected.keys() == set(KINDS):
            return
    raise AssertionError(f"never injected: {sorted(set(KINDS) - injected.keys())}")


def test_the_same_seed_gives_the_same_course():
    def told(seed):
        lines = []
        endure(tell(seed), lines.append)
        # Directories and times of this machine are in some messages.
        return [line for line in lines if "/" not in line]

    for seed in (3, 16, 60):
        assert told(seed) == told(seed)
        assert len(told(seed)) > 10


def found_by(name):
    with mutated(name):
        first = RARELY_FOUND.get(name, 1)
        for seed in range(first, first + MOST_RUNS):
            outcome = endure(tell(seed))
            if outcome.broken:
                return seed, outcome.broken
    return None


@pytest.mark.parametrize("name", [thorough_if(name in SLOWLY_FOUND, name) for name in MUTATIONS])
def test_a_deliberate_bug_is_found(name):
    assert found_by(name) is not None


def test_a_failing_story_is_made_small_and_still_fails():
    with mutated("members get a minute"):
        seed, _ = found_by("members get a minute")
        submissions, faults, why = smaller(tell(seed))
        assert "TIMEOUT" in why
        assert len(submissions) <= len(tell(seed).submissions) / 2
        assert faults == []
        assert endure(tell(seed).only(submissions, faults)).broken == why
    assert endure(tell(seed).only(submissions, faults)).broken == ""


def test_the_command_tells_how_to_replay():
    with mutated("the placeholder forgets the account"):
        done = CliRunner().invoke(main, ["--runs", "3"])
    assert done.exit_code == 1
    broken = re.search(r"^seed (\d+): ", done.output, re.MULTILINE)
    assert broken is not None
    assert f"replay: muri-lab fault-runs --replay {broken[1]} --submissions" in done.output
    replayed = CliRunner().invoke(main, ["--replay", "1", "--submissions", "0", "--faults", ""])
    assert replayed.exit_code == 0
    assert replayed.output.endswith("every invariant holds\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "1"], "are for --replay"),
        (["--replay", "1", "--faults", "99"], "give numbers from 0 to"),
        (["--runs", "0"], "0 is not in the range"),
    ],
)
def test_wrong_options_are_explained(arguments, words):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code
    assert words in done.output + str(done.exception)
