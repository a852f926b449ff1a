"""The text of a table of pair speeds."""

import pytest

from muri.policies.traits import InterferenceError
from muri_lab.interference.pairs_table import parse_interference

HEADER = "job_a,job_b,solo_a_iters_per_s,solo_b_iters_per_s,speed_a_fraction,speed_b_fraction"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: no column job_a, job_b"),
        (["job_a,job_b"], "line 1: no column solo_a_iters_per_s"),
        ([HEADER, "a,b,1,1,fast,0.5"], "line 2, column speed_a_fraction: 'fast' is not a number"),
        ([HEADER, "a,b,1,1,0.5,0.5", "a,c,1,1,0.5,1.2"], "line 3, column speed_b_fraction: 1.2 must be"),
        ([HEADER, "a,b,1,1,nan,0.5"], "line 2, column speed_a_fraction: nan must be finite"),
        ([HEADER, "a,b,0,1,0.5,0.5"], "line 2, column solo_a_iters_per_s: 0 must be finite, above 0$"),
        ([HEADER, "a,,1,1,0.5,0.5"], "line 2, column job_b: there is no value"),
        ([HEADER, "a,b,1,1,0.5"], "line 2, column speed_b_fraction: there is no value"),
        ([HEADER, "a,b,1,1,0.5,0.5", "b,a,1,1,0.4,0.5"], "line 3: b with a has other speeds than on line 2"),
        ([HEADER, 'a,"b'], "line 2: not comma-separated text"),
        ([HEADER, "a,b,1,1,0.5,0.5,7"], "line 2: 6 columns, but there are more values"),
    ],
)
def test_malformed_text_is_refused_with_its_place(lines, message):
    with pytest.raises(InterferenceError, match=message):
        parse_interference(lines)


def test_other_columns_blank_lines_and_any_column_order_are_fine():
    lines = ["gpu," + ",".join(reversed(HEADER.split(","))), "v100,0.5,0.6,1,2,b,a", "", "v100,1,1,1,2,c,a"]
    assert parse_interference(lines).speeds("a", "b") == (0.6, 0.5)


def test_a_pair_may_stand_there_the_other_way_round_and_names_may_have_blanks():
    lines = [HEADER, "A3C,CycleGAN,7.1758,4.4261,0.6358,0.7147", "CycleGAN,A3C,4.4261,7.1758,0.7147,0.6358"]
    table = parse_interference([*lines, "CycleGAN,ResNet-18 (batch size 64),4.4261,24.0932,0.8,0.6"])
    assert table.speeds("A3C", "CycleGAN") == (0.6358, 0.7147)
    assert table.speeds("ResNet-18 (batch size 64)", "CycleGAN") == (0.6, 0.8)
    assert len(table.rows) == 2, "the mirrored row says the same and is kept once"
