"""The configuration file: defaults, errors that name the place, and the shipped sample."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from muri.errors import UsageError
from muri.policies.registry import describe_policies, policy_names
from muri.slurm_plugin.cli.admin import config as config_command
from muri.slurm_plugin.config import Config, ConfigError, load_config, render_config
from muri.slurm_plugin.controller.assemble import policy_of

SAMPLE = Path(__file__).resolve().parents[2] / "etc" / "muri.yaml"


def write(tmp_path, text):
    path = tmp_path / "muri.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("grouping: {max_grup_size: 3}", ["grouping.max_grup_size: unknown key; did you mean max_group_size"]),
        ("polcy: fifo\ngrouping: {max_group_size: 9}", ["did you mean policy", "grouping.max_group_size"]),
        ("grouping: {isolation: thread}", ["grouping.isolation: one of process, auto (found 'thread')"]),
        ("gateway: pislurm", ["gateway: one of auto, pyslurm, command (found 'pislurm')"]),
        ("partitions: gpu", ["partitions: a list such as [gpu] (found 'gpu')"]),
        ("gpu_mem_gib: {a: -1}", ["gpu_mem_gib: must be above 0 (found -1)"]),
        ("gpu_mem_gib: 80", ["gpu_mem_gib: types and numbers such as {a100: 80} (found 80)"]),
        ("events: false", ["events: takes keys of its own, such as {enabled: true} (found False)"]),
        ("interval_s: 6m", ["interval_s: seconds, as a number: 360 (found '6m')"]),
        ("metrics_listen: x", ["metrics_listen: must be as its comment says", "127.0.0.1:9810"]),
        ("metrics_listen: '9810'", ["metrics_listen: must be as its comment says"]),
        ("metrics_listen: a:b", ["metrics_listen: must be as its comment says"]),
        ("metrics_file: muri.prom", ["metrics_file: must be as its comment says"]),
        ("metrics_file: /tmp/muri.txt", ["metrics_file: must be as its comment says"]),
        ("policy: auto\ngate: hold\npolicy: fifo", ["the key policy stands in line 1 and again in line 3"]),
        ("grouping:\n  join: true\n  join: false", ["the key join stands in line 2 and again in line 3"]),
        ("profiling: {time_limit_s: 60}", ["1 problem(s)", "profiling.time_limit_s: must be above 60 (found 60)"]),
        ("policy_options: fast", ["policy_options: options and values such as {matching: networkx} (found 'fast')"]),
        ("tuning: {poll_s: 1}", ["tuning: unknown key"]),
        ("- a", []),
        ("a: [", ["in ", "muri.yaml, line 1, column 5"]),
        ("1: 2", ["1: unknown key; valid keys here: policy"]),
        ("a: !!float ''", []),
        pytest.param("[" * 5_000, ["levels deep"], id="deep"),
    ],
)
def test_what_is_no_configuration_is_refused_and_every_problem_is_named(tmp_path, text, told):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert caught.value.exit_code == 2
    assert all(each in str(caught.value) for each in told)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_each_key_has_words_for_what_it_takes(tmp_path):
    """None of them is a list of mappings."""
    lines = [line for line in render_config(Config()).splitlines() if "# " not in line]
    keys = [line.strip().partition(":")[0] for line in lines]
    for number, (line, key) in enumerate(zip(lines, keys, strict=True)):
        indent = line[: len(line) - len(line.lstrip())]
        section = next((each for each in reversed(lines[:number]) if not each.startswith(" ")), "") if indent else ""
        with pytest.raises(ConfigError) as caught:
            load_config(write(tmp_path, f"{section}\n{indent}{key}: [{{a: 1}}]"))
        name = section + key if section else key
        assert f"  {name.replace(':', '.')}: " in str(caught.value)
        assert "[{'a': 1}])" in str(caught.value) or "{'a': 1})" in str(caught.value)
        assert "Input" not in str(caught.value)


def test_what_show_prints_can_be_read_back(tmp_path):
    config = Config(policy="muri-l", partitions=("a", "b"))
    assert load_config(write(tmp_path, render_config(config))) == config


@pytest.mark.parametrize("name", [info.name for info in describe_policies() if info.live != "no"])
def test_the_sample_goes_with_every_policy(name):
    config = load_config(SAMPLE).model_copy(update={"policy": name})
    assert policy_of(config).name == name


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("policy: pollux", ConfigError, ["policy pollux is for comparisons in `muri simulate` only", "muri-jct"]),
        ("policy: muri-x", UsageError, policy_names()),
        (
            "policy: muri-s\npolicy_options: {objective: jct}",
            UsageError,
            ["policy muri-s always has objective efficiency, not jct"],
        ),
        ("policy_options: {mathcing: x}", UsageError, ["unknown option 'mathcing' (did you mean 'matching'?)"]),
        ("policy_options: {join: false}", ConfigError, ["policy_options: join cannot stand there; set grouping.join"]),
    ],
)
def test_check_refuses_what_no_policy_is_or_has(tmp_path, text, kind, told):
    done = CliRunner().invoke(config_command, ["check", str(write(tmp_path, text))])
    assert isinstance(done.exception, kind)
    assert done.exception.exit_code == 2
    assert all(each in str(done.exception) for each in told)


@pytest.mark.parametrize(
    ("text", "method", "speed_model"),
    [("", "optimal", "fair"), ("policy_options: {grouping: rounds, speed_model: lockstep}", "rounds", "lockstep")],
)
def test_a_policy_keeps_its_own_defaults_until_the_file_says_otherwise(tmp_path, text, method, speed_model):
    rules = policy_of(load_config(write(tmp_path, f"policy: muri-jct\n{text}"))).rules
    assert (rules.grouping, rules.speed_model, rules.objective) == (method, speed_model, "jct")


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
