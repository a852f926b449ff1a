"""The Ansible role: what Ansible itself says of its syntax, and that it calls the commands of the pages."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "packaging/ansible/roles/muri/tasks"


@pytest.mark.thorough
def test_ansible_takes_the_role():
    done = subprocess.run([ROOT / "scripts/check-ansible"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_role_calls_the_commands_of_the_pages():
    assert "muri setup --apply" in (TASKS / "present.yml").read_text()
    assert "muri setup --remove" in (TASKS / "absent.yml").read_text()
