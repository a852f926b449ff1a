"""The configuration file: defaults, errors that name the place, and the shipped sample."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from muri.slurm_plugin.cli import config as config_command
from muri.slurm_plugin.config import Config, ConfigError, load_config, render_config

SAMPLE = Path(__file__).resolve().parents[2] / "etc" / "muri.yaml"


def write(tmp_path, text):
    path = tmp_path / "muri.yaml"
    path.write_text(text)
    return path


def test_an_unknown_key_names_the_nearest_valid_one(tmp_path):
    with pytest.raises(ConfigError, match=r"grouping\.max_grup_size: unknown key; did you mean max_group_size"):
        load_config(write(tmp_path, "grouping:\n  max_grup_size: 3\n"))


def test_every_problem_is_listed(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "polcy: fifo\ngrouping:\n  max_group_size: 9\n"))
    assert "did you mean policy" in str(caught.value)
    assert "grouping.max_group_size" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "7\n"])
def test_a_file_of_another_shape_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_what_show_prints_can_be_read_back(tmp_path):
    config = Config(policy="muri-l", partitions=("a", "b"))
    assert load_config(write(tmp_path, render_config(config))) == config


def test_the_shipped_sample_holds_the_defaults():
    assert load_config(SAMPLE) == Config(node_python="/opt/muri/bin/python")
    assert render_config(Config(node_python="/opt/muri/bin/python")) in SAMPLE.read_text()


def test_check_refuses_an_unknown_policy(tmp_path):
    done = CliRunner().invoke(config_command, ["check", str(write(tmp_path, "policy: muri-x\n"))])
    assert done.exit_code != 0
    assert "muri-s" in str(done.exception)
