"""What is wrong with a call of `muri-lab …`: it is said in a line or two, and nothing has changed."""

import shlex

import pytest
from lab_commands import muri_lab
from profile_builders import make_profile

from muri.profiler.store import ProfileStore


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("predict gpt2", "nothing to estimate gpt2 (batch 64, 1 × a100) from: no profile of it on another number"),
        ("predict gpt2 --batch-size 8", "nothing to estimate gpt2 (batch 8, 1 × a100) from"),
        ("predict gpt2 --gpus 0", "Invalid value for '--gpus'"),
        ("pair job.py", "a pair is two scripts, not 1"),
        ("pair a.py job.py", "there is no script a.py"),
        ('pair "job.py \'x" job.py', "is not a command line"),
        ("pair --list --next", "not both"),
        ("pair --list job.py job.py", "--list takes no scripts"),
        ("pair job.py job.py --model-a x:y", "is not MODEL[:BATCH[:GPUS[:TYPE[:USER]]]]"),
        ("pair job.py job.py --model-a x:1:1:v100 --model-b y:1:1:a100", "cannot share GPUs"),
        ("slowdown gpu --forget --no-store", "--no-store"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(tmp_path, path, capsys, line, said):
    (tmp_path / "job.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with ProfileStore(path) as store:
        store.put_all([make_profile(), make_profile("gpt2", gpu_type="a100"), make_profile("bert", user="alice")])
    before = path.read_bytes()
    code, out, error = muri_lab(capsys, *shlex.split(line))
    assert (code, out) == (2, "")
    assert said in error
    assert "Traceback" not in error
    assert path.read_bytes() == before
