"""The configuration file: defaults, errors that name the place, and the shipped sample."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from muri.errors import UsageError
from muri.policies.allocation.names import listed
from muri.policies.registry import describe_policies, policy_names
from muri.slurm_plugin.cli.admin import config as config_command
from muri.slurm_plugin.config import Config, ConfigError, load_config, render_config
from muri.slurm_plugin.controller.assemble import policy_of

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


def test_threads_for_all_cannot_be_asked_for(tmp_path):
    assert Config().grouping.isolation == "process"
    with pytest.raises(ConfigError, match=r"isolation: Input should be 'process' or 'auto'.*'thread'"):
        load_config(write(tmp_path, "grouping:\n  isolation: thread\n"))


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
    assert load_config(SAMPLE) == Config(node_python="/usr/lib/muri/python")
    assert render_config(Config(node_python="/usr/lib/muri/python")) in SAMPLE.read_text()


@pytest.mark.parametrize("name", [info.name for info in describe_policies() if not info.simulated_only])
def test_the_sample_goes_with_every_policy(name):
    config = load_config(SAMPLE).model_copy(update={"policy": name})
    assert policy_of(config).name == name


def test_check_refuses_a_policy_that_is_only_simulated(tmp_path):
    done = CliRunner().invoke(config_command, ["check", str(write(tmp_path, "policy: pollux\n"))])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.exit_code == 2
    assert "policy pollux is for comparisons in `muri simulate` only" in str(done.exception)
    assert "muri-jct" in str(done.exception) and "pollux," not in str(done.exception)


def test_check_refuses_an_unknown_policy(tmp_path):
    done = CliRunner().invoke(config_command, ["check", str(write(tmp_path, "policy: muri-x\n"))])
    assert isinstance(done.exception, UsageError)
    assert done.exception.exit_code == 2
    assert all(name in str(done.exception) for name in listed(policy_names()))


def test_check_refuses_an_objective_that_the_policy_does_not_have(tmp_path):
    text = "policy: muri-s\ngrouping:\n  objective: jct\n"
    done = CliRunner().invoke(config_command, ["check", str(write(tmp_path, text))])
    assert isinstance(done.exception, UsageError)
    assert "policy muri-s always has objective efficiency, not jct" in str(done.exception)


def test_a_policy_keeps_its_own_defaults_until_the_file_says_otherwise(tmp_path):
    own = policy_of(load_config(write(tmp_path, "policy: muri-jct\n"))).rules
    assert (own.grouping, own.speed_model) == ("optimal", "fair")
    chosen = policy_of(
        load_config(write(tmp_path, "policy: muri-jct\ngrouping: {method: rounds, speed_model: lockstep}\n"))
    ).rules
    assert (chosen.grouping, chosen.speed_model, chosen.objective) == ("rounds", "lockstep", "jct")


def test_tiresias_takes_its_queues_from_the_file(tmp_path):
    text = "policy: tiresias\ntiresias: {queue_limits_gpu_s: [10, 20, 30], promote_after: .inf}\n"
    rules = policy_of(load_config(write(tmp_path, text))).rules
    assert rules.queue_limits_gpu_s == (10.0, 20.0, 30.0)
    assert rules.promote_after == float("inf")
    with pytest.raises(UsageError, match="must be ascending"):
        policy_of(load_config(write(tmp_path, "tiresias: {queue_limits_gpu_s: [20, 10]}\n")))


@pytest.mark.parametrize(
    ("policy", "priority_type", "name"),
    [
        ("auto", "priority/multifactor", "muri-slurm"),
        ("auto", "priority/basic", "auto"),
        ("auto", "", "auto"),
        ("muri-s", "priority/multifactor", "muri-s"),
    ],
)
def test_slurms_priorities_decide_where_they_mean_something(policy, priority_type, name):
    assert policy_of(Config(policy=policy), priority_type).name == name
