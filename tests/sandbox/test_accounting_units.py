"""The pure parts of accounting in the sandbox: configuration, errors, and how tests read `sacct`."""

from typing import Any

import pytest
from accounting_records import Payer, gpu_seconds, most_gpus_at_once, most_runs_at_once, parse_records

from sandbox import lifecycle
from sandbox.builds import Build, Pyslurm
from sandbox.cluster import SUITES, Shape

SACCT = """\
7|alice|hep|normal|COMPLETED|40|billing=1,cpu=1,gres/gpu=2,mem=2000M,node=1|1000|1040|n1|60
8|alice|astro|small|CANCELLED by 0|10|cpu=1,gres/gpu=1|1040|1050|n[1-2]|60
7|alice|hep|normal|RUNNING|5|cpu=1,gres/gpu:a100=2,gres/gpu=2|1040|Unknown|n1|UNLIMITED
9|bob|hep|normal|PENDING|0||Unknown|Unknown|None assigned|60
10|bob|hep|Unknown|COMPLETED|1|cpu=1|1050|1051|n1|60
"""


def value(text: str, key: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(f"{key}=")]
    return line.partition("=")[2]


@pytest.mark.parametrize(
    ("suite", "auth"), [("forky", "auth/slurm"), ("trixie", "auth/munge"), ("bookworm", "auth/munge")]
)
def test_secrets_are_readable_by_root_alone(suite: str, auth: str, tmp_path: Any) -> None:
    build, pyslurm = Build(SUITES[suite], tmp_path), Pyslurm(None)
    accounted = lifecycle.root_plan("x", SUITES[suite], Shape(accounting=True), build, pyslurm).files
    files = {file.path: file for file in accounted}
    assert files["/etc/slurm/slurmdbd.conf"].mode == 0o600
    assert value(files["/etc/slurm/slurmdbd.conf"].text, "AuthType") == auth
    plain = lifecycle.root_plan("x", SUITES[suite], Shape(), build, pyslurm).files
    assert "/etc/slurm/slurmdbd.conf" not in {file.path for file in plain}


def test_gpu_seconds_are_summed_by_payer_over_all_runs() -> None:
    records = parse_records(SACCT)
    assert [record.state for record in records] == ["COMPLETED", "CANCELLED", "RUNNING", "PENDING", "COMPLETED"]
    assert [record.complete for record in records] == [True, True, False, False, False]
    assert +gpu_seconds(records) == {Payer("hep", "normal"): 90, Payer("astro", "small"): 10}


def test_what_runs_had_at_once_counts_no_run_beside_its_successor() -> None:
    ended = [record for record in parse_records(SACCT) if record.complete]
    assert [(record.start_s, record.end_s, record.nodes) for record in ended] == [
        (1000, 1040, "n1"),
        (1040, 1050, "n[1-2]"),
    ]
    assert most_gpus_at_once(ended) == 2
    assert most_runs_at_once(ended) == 1
    assert most_gpus_at_once([]) == 0
