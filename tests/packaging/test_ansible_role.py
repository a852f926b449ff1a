"""The Ansible role: what Ansible itself says of its syntax, and that it does what the pages say."""

import subprocess
from pathlib import Path

import pytest

from muri.slurm_plugin.cli.doctor_slurm import INCLUDE, LOAD, LOAD_FILTER

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "packaging/ansible/roles/muri/tasks"


@pytest.mark.thorough
def test_ansible_takes_the_role():
    done = subprocess.run([ROOT / "scripts/check-ansible"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_role_does_what_the_pages_and_the_doctor_say():
    wanted = {
        "present.yml": ("install.md", ["Name=muri Count=64 Flags=CountOnly", INCLUDE, LOAD, LOAD_FILTER]),
        "absent.yml": ("removal.md", ["muri drain --forget"]),
    }
    for name, (page, lines) in wanted.items():
        for text in ((TASKS / name).read_text(), (ROOT / "docs" / page).read_text()):
            assert [line for line in lines if line not in text] == []
