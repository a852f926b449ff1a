"""Slurm's own tests as a guest: how reports are read and the ways compared."""

import pytest

from sandbox.guest import WAYS, WITHOUT, chances, differences, outcomes, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_116_1" name="test_srun"/>
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
    one, other = "test_105_1::test_x", "test_122_3"
    found = {way.name: {one: ["failed", "passed"], other: ["skipped"]} for way in WAYS}
    found[MARKED][one] = ["error"]
    assert table(found).splitlines()[2:] == [
        "| 105 sbatch | 1 / 0 / 0 / 0 | 1 / 0 / 0 / 0 | 0 / 0 / 0 / 1 |",
        "| 122 job arrays | 0 / 0 / 1 / 0 | 0 / 0 / 1 / 0 | 0 / 0 / 1 / 0 |",
        "| all | 1 / 0 / 1 / 0 | 1 / 0 / 1 / 0 | 0 / 0 / 1 / 1 |",
    ]
