"""Wrong calls of `muri-lab …`: a line or two names the mistake, and nothing has changed."""

import pytest
from profile_commands import assert_mistake, muri_lab


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
def test_a_mistake_is_named_and_changes_nothing(path, capsys, line, said):
    assert_mistake(path, capsys, muri_lab, line, said)
