"""What `muri doctor` says of the gate: the licence, its lease, and what a site without it loses."""

import pytest

from muri.slurm_plugin.cli.doctor_checks import Level, judge_gate
from muri.slurm_plugin.config import Config

LICENSES = "LicenseName=matlab Total=2 Used=0\nLicenseName=muri_gate Total=1000000 Used=0 Free=0 Reserved=1000000\n"


@pytest.mark.parametrize(
    ("licenses", "config", "level", "said"),
    [
        (LICENSES, {}, Level.OK, "1200 s after the last cycle"),
        (LICENSES, {"lease_s": 600}, Level.WARNING, "600 s after the last cycle"),
        ("LicenseName=muri_gate_2 Total=1\n", {}, Level.PROBLEM, "start as ordinary jobs"),
        ("", {}, Level.PROBLEM, "start as ordinary jobs"),
        (LICENSES, {"gate": "hold"}, Level.WARNING, "priority 0"),
        ("", {"gate": "hold"}, Level.WARNING, "wait for the watchdog"),
    ],
)
def test_the_gate_is_judged_by_licence_and_lease(licenses, config, level, said):
    finding = judge_gate(licenses, Config(**config))
    assert (finding.level, said in finding.text) == (level, True)
    assert bool(finding.remedy) is (level is not Level.OK)
