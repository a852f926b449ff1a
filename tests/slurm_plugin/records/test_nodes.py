"""Host lists, of which those that could fill the memory are refused, and GPUs that are near each other by gres.conf."""

import time

import pytest

from muri.slurm_plugin.records.nodes import MOST_NODES, HostListError, islands_of, name_count, names_in


@pytest.mark.parametrize(
    ("host_list", "names"),
    [
        ("", ""),
        ("n1", "n1"),
        ("n[1-3],login", "n1 n2 n3 login"),
        ("gpu[01-02,07]", "gpu01 gpu02 gpu07"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a-b.example.org", "a-b.example.org"),
        ("n1[0-2],n2[1,2]x", "n10 n11 n12 n21x n22x"),
    ],
)
def test_names_are_unfolded(host_list, names):
    assert names_in(host_list) == set(names.split())
    assert len(names_in(f"n[1-{MOST_NODES}]")) == MOST_NODES


@pytest.mark.parametrize(
    "host_list",
    [
        "n[1-2000000000]", "n[1-65537]", "n[1-1000]m[1-1000]", ",".join(f"n[{i}-99999{i}]" for i in range(1, 9)),
        "n[1-", "n]1[", "n[3-1]", "n[a-b]", "@all", "@/etc/shadow", "*", "n1\nn2", "n1!n2", "caf\udce9",
        "n[" + "9" * 5000 + "]",
        "n[1-" + "9" * 5000 + "]",
        "n1[-999999]", "n9[1,999999]", "[8-11-x[01-3]",
    ],
)  # fmt: skip
def test_what_is_no_list_of_nodes_is_refused(host_list):
    with pytest.raises(HostListError):
        names_in(host_list)


def test_names_are_counted_without_unfolding_and_a_range_that_runs_backwards_makes_up_for_no_other():
    assert name_count("n[1-3],login,r[1-2]n[01-20]") == 44
    assert name_count("n[1-300000],m[300000-1]") == 300_001
    begun_s = time.process_time()
    assert name_count("n," * 500_000) == 500_000
    assert time.process_time() - begun_s < 20.0, "a quadratic search takes minutes"
    with pytest.raises(ValueError, match="too many"):  # their product would have a million digits
        name_count("[1-999999999999999999]" * 50_000)


PAIRS = """
AutoDetect=off
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia0 Links=-1,4,0,0  # the first pair
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia1 Links=4,-1,0,0
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia3 Links=0,0,4,-1
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia2 \\
    Links=0,0,-1,4
NodeName=n3 Name=gpu File=/dev/nvidia[0-1] Cores=0-15
NodeName=n3 Name=gpu File=/dev/nvidia[2-3] COREs=16-31
NodeName=n4 Name=gpu File=/dev/nvidia[0-3]
NodeName=n1 Name=muri Count=64 Flags=CountOnly
"""


def cube_mesh() -> str:
    """Eight GPUs of which each is linked to the others of its four, and to its image in the other four."""
    lines = []
    for one in range(8):
        near = [-1 if one == other else int(one // 4 == other // 4 or abs(one - other) == 4) for other in range(8)]
        lines.append(f"Name=gpu File=/dev/nvidia{one} Links={','.join(map(str, near))}")
    return "\n".join(lines)


def test_links_make_islands_and_cores_where_there_are_none():
    pairs, sockets = ((0, 1), (2, 3)), ((0, 1), (2, 3))
    assert islands_of([PAIRS]) == {"n1": pairs, "n2": pairs, "n3": sockets}


def test_islands_are_fully_linked_and_a_line_without_a_node_is_for_every_node():
    assert islands_of([cube_mesh()]) == {"": ((0, 1, 2, 3), (4, 5, 6, 7))}


@pytest.mark.parametrize(
    "lines",
    [
        "Name=gpu File=/dev/nvidia0 Links=-1,x\nName=gpu File=/dev/nvidia1 Links=4,-1",
        "Name=gpu File=/dev/nvidia0 Links=-1,4\nName=gpu File=/dev/nvidia1 Links=-1,4",
        "Name=gpu Count=4",
        "NodeName=n[1 Name=gpu File=/dev/nvidia0 Cores=0\nNodeName=n[1 Name=gpu File=/dev/nvidia1 Cores=1",
        "",
    ],
)
def test_what_does_not_tell_is_no_island(lines):
    assert islands_of([lines]) == {}
