"""The files of etc/ for a site: they follow the configuration's defaults and call commands that exist."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
from option_sources import JOB_SUBMIT_SOURCE, SPANK_SOURCE

from muri.cli import cli
from muri.files import SITE_RUN_DIR
from muri.slurm_plugin.cli.admin import controller
from muri.slurm_plugin.config import Config, render_config

ETC = Path(__file__).resolve().parents[2] / "etc"
SERVICES = ("muri-controller.service", "muri-controller-events.service", "muri-watchdog.service")
CRON = [line for line in (ETC / "cron.d-muri").read_text().splitlines() if not line.startswith("#")]


def unit(name):
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read(ETC / "systemd" / name)
    return parser


def minutes(name):
    return int(re.fullmatch(r"(\d+)min", unit(name)["Timer"]["OnUnitActiveSec"]).group(1))


def test_the_sample_configuration_is_the_model_under_a_heading():
    lines = (ETC / "muri.yaml").read_text().splitlines(keepends=True)
    assert all(line.startswith("#") for line in lines[:2])
    assert "".join(lines[2:]) == render_config(Config(node_python="/usr/lib/muri/python"))


@pytest.mark.parametrize(
    "line", [*(unit(name)["Service"]["ExecStart"] for name in SERVICES), *(" ".join(line.split()[6:]) for line in CRON)]
)
def test_units_and_cron_call_commands_that_exist(line):
    program, *arguments = shlex.split(line.split("2>")[0].split(">>")[0])
    if program == "/usr/sbin/muri-controller":
        parsed = controller.make_context("muri-controller", arguments)
        assert parsed.params["once"] is not parsed.params["events"]
        return
    assert program == "/usr/bin/muri"
    command = cli.get_command(cli.make_context("muri", arguments[:1]), arguments[0])
    assert command.make_context(arguments[0], arguments[1:]).params["stale_s"] == 1800


def test_what_the_services_may_write_is_what_the_configuration_names():
    services = {name: unit(name)["Service"] for name in SERVICES}
    config = Config()
    for service in services.values():
        assert f"/var/lib/{service['StateDirectory']}" == str(config.state_dir)
        assert (service["StateDirectoryMode"], service["ProtectSystem"]) == ("0700", "strict")
        assert {"CapabilityBoundingSet", "SystemCallFilter", "MemoryMax"} <= {*service}
    controller_unit = services["muri-controller.service"]
    assert controller_unit["OOMPolicy"] == "continue"
    runtime = [f"/run/{name}" for name in controller_unit["RuntimeDirectory"].split()]
    assert runtime == [str(SITE_RUN_DIR), str(config.status_dir)]
    assert controller_unit["RuntimeDirectoryPreserve"] == "yes"  # a oneshot service ends after each cycle


def test_the_parent_of_the_run_directories_is_the_same_everywhere():
    kind, path, *rights = (ETC / "tmpfiles.d" / "muri.conf").read_text().splitlines()[-1].split()
    assert (kind, Path(path), rights) == ("d", SITE_RUN_DIR, ["0755", "root", "root", "-"])
    assert Path(unit("run-muri.mount")["Mount"]["Where"]) == SITE_RUN_DIR
    assert unit("run-muri.mount")["Unit"]["Wants"] == "run-muri-node.mount"  # users' files take no room of root's notes
    assert Path(unit("run-muri-node.mount")["Mount"]["Where"]) == SITE_RUN_DIR / "node"
    header = (SPANK_SOURCE / "muri.h").read_text()
    assert re.search(r'#define MURI_RUN_PARENT "(.*)"', header)[1] == str(SITE_RUN_DIR.parent)


def test_timers_and_cron_agree_with_the_default_interval():
    assert minutes("muri-controller.timer") * 60 == Config().interval_s
    periods = [int(re.match(r"\*/(\d+) ", line).group(1)) for line in CRON]
    assert periods == [minutes("muri-controller.timer"), 10, minutes("muri-watchdog.timer")]


def test_cycles_on_events_have_the_rights_of_the_timers_and_their_file_its_place():
    once, events = (dict(unit(name)["Service"]) for name in SERVICES[:2])
    for service, own in ((once, {"Type", "TimeoutStartSec"}), (events, {"Type", "Restart", "RestartSec"})):
        for key in own:
            del service[key]
    assert {**once, "ExecStart": ""} == {**events, "ExecStart": ""}
    assert unit(SERVICES[1])["Service"]["Restart"] == "always"
    notice = Config().events.notice_file
    assert notice.parent == SITE_RUN_DIR
    lua = (JOB_SUBMIT_SOURCE / "muri.lua").read_text()
    assert re.search(r'^M\.notice = "(.*)"$', lua, re.MULTILINE)[1] == str(notice)
