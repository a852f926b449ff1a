"""Host lists are unfolded; other texts, and those that could fill the memory, are refused."""

import pytest

from muri.slurm_plugin.records.nodes import MOST_NODES, HostListError, names_in


@pytest.mark.parametrize(
    ("host_list", "names"),
    [
        ("", ""),
        ("n1", "n1"),
        ("n[1-3],login", "n1 n2 n3 login"),
        ("gpu[01-02,07]", "gpu01 gpu02 gpu07"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a-b.example.org", "a-b.example.org"),
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
    ],
)  # fmt: skip
def test_what_is_no_list_of_nodes_is_refused(host_list):
    with pytest.raises(HostListError):
        names_in(host_list)
