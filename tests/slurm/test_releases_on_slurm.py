"""docs/releases.md tells the truth: each release is asked again."""

import os

import pytest

from sandbox.cluster import SUITES
from sandbox.releases import PAGE, PROBES, SAME_SECOND, answers_on_page, examine_suite
from sandbox.support import Progress


@pytest.mark.parametrize("suite", SUITES)
def test_a_release_can_do_what_the_page_says(suite: str) -> None:
    said = answers_on_page(PAGE.read_text(encoding="utf-8"))[suite]
    found = examine_suite(suite, Progress(), name=f"test-matrix-{os.getpid()}").answers
    questions = set(PROBES) - {SAME_SECOND}
    assert {each: found[each].works for each in questions} == {each: said[each][0] == "✓" for each in questions}
