"""Wrong calls of `muri profile …`: a line or two names the mistake, and nothing has changed."""

import pytest
from profile_commands import assert_mistake, muri


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("list --gpu-type h100", "no profile of GPU type 'h100'; there are: a100, gpu"),
        ("list --model resnet19", "did you mean resnet18"),
        ("show resnet81", "no profile of model 'resnet81'; did you mean resnet18?\n"),
        ("show resnet18 --batch-size 3", "no such profile of 'resnet18'. There are:"),
        ("import gone.json", "No such file or directory"),
        ("import binary", "not UTF-8 text"),
        ("set gpt2", "Missing argument 'FIGURE=VALUE...'"),
        ("set gpt2 load=1", "figures are load_ms, preprocess_ms"),
        ("set gpt2 load_ms=much", "load_ms must be a number, not 'much'"),
        ("set gpt2 load_ms=600", "correct the iteration too"),
        ("set gpt2 load_ms=-1", "must be ≥ 0"),
        ("publish bart --yes", "did you mean bert?"),
        ("publish gpt2 --yes", "every profile of 'gpt2' is published already"),
        ("run --sweep", "Missing argument"),
        ("run --no-pin job.py", "need --sweep"),
        ("run --sweep --max-cpus 4096 -- job.py", "4096 CPUs were asked for; this process may use 1 to"),
        ("run --sweep --memory batch-mib=1 -- job.py", "dataset or dataset-gib, dataset or storage-mib-per-s"),
        ("run --sweep --memory disk=1 -- job.py", "'disk=1' says nothing of memory"),
        ("publish resnet18 --withdraw --user alice", "--user says whose"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(path, capsys, line, said):
    assert_mistake(path, capsys, muri, line, said)
