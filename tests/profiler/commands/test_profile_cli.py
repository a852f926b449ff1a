"""The commands `muri profile …`, through click and through the error handling of `muri`."""

import json

import pytest
from profile_builders import make_profile
from profile_commands import invoke, muri

from muri.profiler.commands import profile
from muri.profiler.exchange import to_json
from muri.profiler.store import ProfileStore

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def filled(path):
    profiles = (
        make_profile("resnet18", batch_size=64),
        make_profile("resnet18", batch_size=128, gpu_count=2, gpu_type="a100"),
        make_profile("gpt2", batch_size=0),
    )
    with ProfileStore(path) as store:
        store.put_all(profiles)
    return path


def models(path):
    with ProfileStore(path, read_only=True) as store:
        return [item.key.model for item in store.list()]


def test_list_before_the_first_measurement(path):
    none = invoke("list").output
    assert none.startswith(f"There is no profile store {path} on this machine. The controller keeps one where it runs")
    with ProfileStore(path):
        assert invoke("list").output.startswith(f"No profiles in {path} yet: a model is measured while its first job")
    assert json.loads(invoke("list", "--json").output)["profiles"] == []


def test_show_of_several_lists_the_choices(filled, capsys):
    code, _, error = muri(capsys, "show", "resnet18")
    assert code == 2
    assert "resnet18 --batch-size 64 --gpus 1 --gpu-type gpu" in error
    assert "resnet18 --batch-size 128 --gpus 2 --gpu-type a100" in error
    for narrow in (("--batch-size", 128), ("--gpus", 2), ("--gpu-type", "a100")):
        code, output, _ = muri(capsys, "show", "resnet18", *narrow)
        assert code == 0
        assert "batch 128" in output


def test_rm_asks_first(filled):
    refused = invoke("rm", "gpt2", input="n\n")
    assert refused.exit_code == 1
    assert "gpt2" in models(filled)
    assert invoke("rm", "gpt2", input="y\n").exit_code == 0
    assert "gpt2" not in models(filled)


def test_rm_with_yes_removes_one_or_all_that_match(filled, capsys):
    code, _, error = muri(capsys, "rm", "resnet18", "--yes")
    assert code == 2
    assert "2 profiles are of 'resnet18'" in error
    assert muri(capsys, "rm", "resnet18", "--gpus", 2, "--yes")[0] == 0
    assert models(filled) == ["gpt2", "resnet18"]
    assert muri(capsys, "rm", "resnet18", "--all-matching", "-y")[0] == 0
    assert models(filled) == ["gpt2"]


def test_export_and_import_move_everything(filled, tmp_path):
    target = tmp_path / "out.json"
    target.write_text(invoke("export").output)
    assert invoke("import", target).output == "0 added, 3 replaced\n"
    done = invoke("import", "-", "--store", tmp_path / "new.db", input=target.read_text())
    assert done.output == "3 added, 0 replaced\n"
    with ProfileStore(tmp_path / "new.db", read_only=True) as store:
        assert {item.source for item in store.list()} == {"import"}


def test_a_bad_import_stores_nothing(path, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text(to_json([make_profile("a"), make_profile("b")]).replace("0.3", '"quick"', 1))
    code, _, error = muri(capsys, "import", bad)
    assert code == 2
    assert (
        "bad.json: profiles[0]: profile of a (batch 64, 1 × gpu): propagate time is 'quick'; it must be a number"
        in error
    )
    assert not path.exists()


def test_a_damaged_store_says_what_to_do(path, capsys):
    path.write_bytes(b"damaged" * 1000)
    for command in (("list",), ("show", "m"), ("rm", "m", "-y"), ("export",)):
        code, output, error = muri(capsys, *command)
        assert (code, output) == (1, "")
        assert f"muri doctor --store {path} --set-aside" in error
    assert path.read_bytes() == b"damaged" * 1000


@pytest.mark.parametrize(
    "command",
    [("list",), ("show", "m"), ("rm", "m", "-y"), ("export",), ("set", "m", "load_ms=90"),
     ("publish", "m", "-y")],
)  # fmt: skip
def test_a_missing_store_is_named_and_not_made(tmp_path, capsys, command):
    code, _, error = muri(capsys, *command, "--store", "gone.db")
    assert code == 1
    assert error.startswith("muri: there is no profile store at ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", profile.list_commands(None))
def test_help_teaches_by_example(command):
    output = invoke(command, "--help").output
    assert f"muri profile {command}" in output.split("Examples:")[1]
    assert max(len(line) for line in output.splitlines()) <= 80
