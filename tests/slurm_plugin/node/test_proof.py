"""Whether a pilot job believes that the SPANK plugin opens its GPUs for members."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.node import pilot, proof
from muri.slurm_plugin.node.proof import MISSING, why_missing

JOB = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "9"}
CONTENT = f"uid={os.geteuid()}\ngpus=0,3\n"


def leave(folder: Path, content: str = CONTENT, mode: int = 0o644) -> Path:
    """Leave the plugin's file."""
    path = folder / "n1" / "job-9"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def why(folder: Path) -> str:
    return why_missing(JOB, folder, os.geteuid())


def test_the_plugins_file_is_the_proof(tmp_path: Path) -> None:
    leave(tmp_path)
    assert why(tmp_path) == ""


def test_without_the_file_the_reason_names_node_and_page(tmp_path: Path) -> None:
    said = why(tmp_path)
    assert "SPANK plugin is not loaded by slurmd on node n1" in said
    assert "docs/troubleshooting.md" in said
    assert len(why_missing(JOB)) <= 200  # a fault in a comment is cut there


@pytest.mark.parametrize(
    "content",
    ["", f"uid={os.geteuid()}\n", f"uid={os.geteuid()}\ngpus=\n", f"uid={os.geteuid() + 1}\ngpus=0\n", "\0\xff"],
)
def test_a_file_about_another_job_or_no_gpus_is_none(tmp_path: Path, content: str) -> None:
    leave(tmp_path, content)
    assert "tells of no GPUs of this user's job" in why(tmp_path)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_none(tmp_path: Path, mode: int) -> None:
    leave(tmp_path, mode=mode)
    assert "not a file of root's alone" in why(tmp_path)


def test_a_file_of_another_user_a_link_a_pipe_and_a_folder_are_none(tmp_path: Path) -> None:
    path = leave(tmp_path)
    assert "not a file of root's alone" in why_missing(JOB, tmp_path, os.geteuid() + 1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert why(tmp_path)
    path.unlink()
    os.mkfifo(path)  # to which no process writes
    assert why(tmp_path)
    path.unlink()
    path.mkdir()
    assert why(tmp_path)


def test_a_pilot_of_several_nodes_looks_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    asked = tmp_path / "asked"
    group = GroupSpec(members=(MemberSpec(job_id="1"),), node_count=2, gpus_per_node=4)

    def answer(code: int, said: str) -> str:
        srun.write_text(
            f"#!/bin/sh\necho \"$@\" >{asked}\necho 'srun: error: n2: task 1' >&2\necho '{said}' >&2\nexit {code}\n"
        )
        srun.chmod(0o755)
        return pilot.why_without_grants(group, {"PATH": f"{tmp_path}:/bin:/usr/bin"})

    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert answer(0, "") == ""
    assert answer(MISSING, "it is not loaded on node n2") == "it is not loaded on node n2"
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in asked.read_text()
    assert answer(1, "slurmctld does not answer") == ""  # the runtime's step meets the same, and is tried again


def test_each_node_answers_by_an_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", proof.__name__], capture_output=True, text=True, check=False, env={**os.environ, **JOB}
    )
    assert (done.returncode, "node n1" in done.stderr) == (MISSING, True)
