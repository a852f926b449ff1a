"""The files of etc/ for a site: they follow the configuration's defaults and call commands that exist."""

import configparser
import re
import shlex
from pathlib import Path

import pytest

from muri.cli import cli
from muri.slurm_plugin.cli.admin import controller
from muri.slurm_plugin.config import Config, render_config

ETC = Path(__file__).resolve().parents[2] / "etc"
SERVICES = ("muri-controller.service", "muri-watchdog.service")
CRON = [line for line in (ETC / "cron.d-muri").read_text().splitlines() if not line.startswith("#")]


def unit(name):
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ETC / "systemd" / name)
    return parser


def minutes(name):
    return int(re.fullmatch(r"(\d+)min", unit(name)["Timer"]["OnUnitActiveSec"]).group(1))


def test_the_sample_configuration_is_the_model_under_a_heading():
    lines = (ETC / "muri.yaml").read_text().splitlines(keepends=True)
    assert all(line.startswith("#") for line in lines[:2])
    assert "".join(lines[2:]) == render_config(Config(node_python="/opt/muri/bin/python"))


@pytest.mark.parametrize(
    "line", [*(unit(name)["Service"]["ExecStart"] for name in SERVICES), *(" ".join(line.split()[6:]) for line in CRON)]
)
def test_units_and_cron_call_commands_that_exist(line):
    program, *arguments = shlex.split(line.split("2>")[0].split(">>")[0])
    if program == "/opt/muri/bin/muri-controller":
        parsed = controller.make_context("muri-controller", arguments)
        assert parsed.params["once"]
        return
    assert program == "/opt/muri/bin/muri"
    command = cli.get_command(cli.make_context("muri", arguments[:1]), arguments[0])
    assert command.make_context(arguments[0], arguments[1:]).params["stale_s"] == 1800


def test_timers_and_cron_agree_with_the_default_interval():
    assert minutes("muri-controller.timer") * 60 == Config().interval_s
    periods = [int(re.match(r"\*/(\d+) ", line).group(1)) for line in CRON]
    assert periods == [minutes("muri-controller.timer"), minutes("muri-watchdog.timer")]
