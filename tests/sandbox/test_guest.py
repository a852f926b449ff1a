"""Slurm's own tests as a guest: how reports are read and the ways compared."""

import json
from pathlib import Path

import pytest

from sandbox.guest import (
    CAUSES,
    RESULT,
    WAYS,
    WITHOUT,
    cause,
    chances,
    differences,
    modules_of,
    outcomes,
    report,
    table,
)
from sandbox.support import UsageError

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_116_1.Test_class" name="test_srun"/>
<testcase classname="tests.test_116_1" name="test_late"/>
<testcase classname="tests.test_116_1" name="test_late"><error message="teardown"/></testcase>
<testcase classname="tests.test_116_1" name="test_wrong[a.b]"><properties/><failure message="x"/></testcase>
<testcase classname="" name="tests.test_147_1"><skipped type="pytest.skip"/></testcase>
</testsuite></testsuites>"""

BESIDE, MARKED = (way.name for way in WAYS[1:])


def test_a_report_tells_the_worst_of_each_test() -> None:
    assert outcomes(REPORT) == {
        "test_116_1::test_srun": "passed",
        "test_116_1::test_late": "error",
        "test_116_1::test_wrong[a.b]": "failed",
        "test_147_1": "skipped",
    }


@pytest.mark.parametrize(
    ("without", "beside", "marked", "differs", "by_chance"),
    [
        (["passed"], ["passed"], ["passed"], False, False),
        (["failed"], ["passed"], ["failed"], False, False),
        (["passed"], ["failed", "failed", "failed"], ["passed"], True, False),
        (["passed", "failed"], ["passed"], ["error", "skipped"], True, True),
        (["passed"], ["failed", "passed", "passed"], ["passed"], False, True),
        (["passed"], [], ["passed"], True, False),
    ],
)
def test_a_test_differs_that_never_passes_with_muri(
    without: list[str], beside: list[str], marked: list[str], differs: bool, by_chance: bool
) -> None:
    test = "test_105_1::test_x"
    found = {WITHOUT.name: {test: without}, BESIDE: {test: beside}, MARKED: {test: marked}}
    found[BESIDE] = {test: beside} if beside else {}
    assert differences(found) == [test] * differs
    assert chances(found) == [test] * by_chance


def test_the_table_counts_each_group_by_the_best_outcome() -> None:
    one, other = "test_105_1::test_x", "test28.3"
    found = {way.name: {one: ["failed", "passed"], other: ["skipped"]} for way in WAYS}
    found[MARKED][one] = ["error"]
    assert table(found).splitlines()[2:] == [
        "| 28 job arrays | 0 / 0 / 1 / 0 | 0 / 0 / 1 / 0 | 0 / 0 / 1 / 0 |",
        "| 105 sbatch | 1 / 0 / 0 / 0 | 1 / 0 / 0 / 0 | 0 / 0 / 0 / 1 |",
        "| all | 1 / 0 / 1 / 0 | 1 / 0 / 1 / 0 | 0 / 0 / 1 / 1 |",
    ]


def test_a_difference_is_told_with_its_cause() -> None:
    known, new = f"{min(CAUSES)}[a]", "test_105_1::test_x"
    found = {way.name: {test: ["failed" if way.muri else "passed"] for test in (known, new)} for way in WAYS}
    released = {way.name: 3 * way.marked for way in WAYS}
    told = report({"slurm": "25.05.8", "date": "2026-01-02", "released": released, "replaced": [], "found": found})
    assert "0 jobs waited for Muri, all marked 3" in told
    assert f"Only without Muri: 1 `{new}` (cause unknown), 1 of `test_123_3` ({cause(known)})." in told


def test_groups_name_files_of_both_kinds(tmp_path: Path) -> None:
    for name in (
        "expect/test17.1",
        "expect/test17.1.prog.c",
        "python/tests/test_116_33.py",
        "python/tests/test_117_1.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert modules_of(tmp_path, ["17", "116"]) == (["test17.1"], ["test_116_33"])
    assert modules_of(tmp_path, ["117_1"]) == ([], ["test_117_1"])
    with pytest.raises(UsageError, match="no such tests"):
        modules_of(tmp_path, ["11"])


def test_the_stored_run_has_a_cause_for_each_difference() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))["found"]
    assert all(map(cause, differences(found)))
