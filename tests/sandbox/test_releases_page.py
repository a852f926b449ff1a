"""docs/releases.md is what `bin/muri-sandbox matrix` writes: a column for each release, and nothing is lost by it."""

import datetime
import json
from pathlib import Path

import pytest

from sandbox import cli, guest
from sandbox.cluster import SUITES
from sandbox.releases import PROBES
from sandbox.releases_page import PAGE, TESTS, Answer, Release, outcome_of_tests, page, releases_on, with_column
from sandbox.support import UsageError

DAY = datetime.date(2026, 1, 2)
WORKS, FAILS = Answer(True, "by a | way"), Answer(False, "refused")


def release(suite: str, version: str, *answers: Answer | None, tried: datetime.date = DAY) -> Release:
    given = {question: answer for question, answer in zip(("q", TESTS), answers, strict=False) if answer}
    return Release(suite, version, tried, given)


FORKY, SOURCE = release("forky", "26.05.5", Answer(True), WORKS), release("source-25.11.7", "25.11.7", FAILS)
OLD = release("bookworm", "22.05.8", WORKS)


def test_a_page_has_the_newest_release_first_and_reads_back() -> None:
    text = page([OLD, SOURCE, FORKY], ["q", TESTS], "| group |")
    assert "|  | 26.05.5 (forky) | 25.11.7 | 22.05.8 (bookworm) |" in text
    assert "| tried on | 2026-01-02 | 2026-01-02 | 2026-01-02 |" in text
    assert f"| q | ✓ | –[^1] | ✓[^2] |\n| {TESTS} | ✓[^2] |  |  |" in text
    assert "[^1]: refused\n[^2]: by a | way" in text
    assert releases_on(text) == [FORKY, SOURCE, OLD]


def test_a_new_column_takes_the_place_of_the_same_release() -> None:
    later = release("source-25.11.10", "25.11.10", Answer(True), tried=datetime.date(2026, 3, 4))
    assert with_column([FORKY, SOURCE], later) == [FORKY, later]
    assert with_column([FORKY, SOURCE], release("source-26.05.3", "26.05.3")) == [
        FORKY, SOURCE, release("source-26.05.3", "26.05.3")]  # fmt: skip
    again = with_column([FORKY], release("forky", "26.05.6", FAILS))
    assert again == [release("forky", "26.05.6", FAILS, WORKS)]  # the tests' answer stays


def test_the_tests_answer_is_what_pytest_reported(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    cases = '<testcase name="a"/><testcase name="b"><skipped/></testcase>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert outcome_of_tests(report) == Answer(True, "1 passed, 1 skipped")
    cases += '<testcase name="d"><error/></testcase><testcase name="c"><failure/></testcase>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert outcome_of_tests(report) == Answer(False, "1 passed, 1 skipped, 2 failed: c, d")
    report.write_text("no report")
    with pytest.raises(UsageError, match=r"--tests .*junit.xml is not a report"):
        outcome_of_tests(report)
    with pytest.raises(UsageError, match="name that with --suite"):
        cli._matrix(cli._parser().parse_args(["matrix", "--tests", str(report)]))


def test_the_page_in_the_documentation_answers_every_question_for_every_suite() -> None:
    text = PAGE.read_text(encoding="utf-8")
    columns = releases_on(text)
    assert {column.suite for column in columns} >= set(SUITES)
    assert all(set(column.answers) - {TESTS} == set(PROBES) for column in columns)
    slurms_tests = guest.report(json.loads(guest.RESULT.read_text(encoding="utf-8")))
    assert page(columns, [TESTS, *PROBES], slurms_tests) == text
