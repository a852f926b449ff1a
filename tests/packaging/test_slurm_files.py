"""What the pages and the Ansible role write into Slurm's files: once, and out again byte for byte."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from muri.slurm_plugin.cli.doctor_slurm import INCLUDE, LOAD, LOAD_FILTER

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "packaging/ansible/roles/muri/tasks"
BEFORE = {
    "slurm.conf": "ClusterName=c\nGresTypes=gpu\nLicenses=matlab:2\nJobSubmitPlugins=lua\n"
    "NodeName=n[1-2] CPUs=4 Gres=gpu:tesla:2 State=UNKNOWN\nNodeName=c1 CPUs=4\n",
    "gres.conf": "AutoDetect=off\nNodeName=n[1-2] Name=gpu File=/dev/null\n",
    "plugstack.conf": "include /etc/slurm/plugstack.conf.d/*.conf\n",
    "job_submit.lua": "function slurm_job_submit()\n  return slurm.SUCCESS\nend\n\nreturn slurm.SUCCESS\n",
}
AFTER = {
    "slurm.conf": "ClusterName=c\nGresTypes=gpu,muri\nLicenses=matlab:2,muri_gate:1000000\nJobSubmitPlugins=lua\n"
    "NodeName=n[1-2] CPUs=4 Gres=gpu:tesla:2,muri:64 State=UNKNOWN\nNodeName=c1 CPUs=4\n",
    "gres.conf": BEFORE["gres.conf"] + "NodeName=n[1-2] Name=muri Count=64 Flags=CountOnly\n",
    "plugstack.conf": f"{BEFORE['plugstack.conf']}{INCLUDE}\n",
    "job_submit.lua": BEFORE["job_submit.lua"].replace("\n\nreturn", f"\n\n{LOAD}\nreturn"),
}
_OWN_FILTER = "function slurm_cli_pre_submit()\n  return slurm.SUCCESS\nend\n\nreturn slurm.SUCCESS\n"
_MADE_FILTER = "-- made for muri\n" + "".join(
    f"function slurm_cli_{name}() return slurm.SUCCESS end\n"
    for name in ("setup_defaults", "pre_submit", "post_submit")
)
FILTERS = [
    # What slurm.conf and cli_filter.lua say before and after.
    ("", None, "CliFilterPlugins=lua # muri\n", f"{_MADE_FILTER}{LOAD_FILTER}\nreturn slurm.SUCCESS\n"),
    ("CliFilterPlugins=user_defaults\n", None, "CliFilterPlugins=user_defaults,lua # muri\n",
     f"{_MADE_FILTER}{LOAD_FILTER}\nreturn slurm.SUCCESS\n"),
    ("CliFilterPlugins=lua,syslog\n", _OWN_FILTER, "CliFilterPlugins=lua,syslog\n",
     _OWN_FILTER.replace("\n\nreturn", f"\n\n{LOAD_FILTER}\nreturn")),
]  # fmt: skip
"""A site without filters, with others, and with one of its own in Lua."""


def files_before(filters: tuple[str, str | None, str, str]) -> dict[str, str]:
    own = {"cli_filter.lua": filters[1]} if filters[1] else {}
    return BEFORE | {"slurm.conf": BEFORE["slurm.conf"] + filters[0]} | own


def files_after(filters: tuple[str, str | None, str, str]) -> dict[str, str]:
    return AFTER | {"slurm.conf": AFTER["slurm.conf"] + filters[2], "cli_filter.lua": filters[3]}


_MARKED = "{0} begin muri: added by `muri setup --apply`, taken out by `muri setup --remove`\n{1}{0} end muri\n"
_LOADED = """\
do
  local muri = loadfile("/usr/share/muri/job_submit/job_submit.lua")
  if muri then
    pcall(muri)
  end
end
"""
BY_SETUP = {
    "slurm.conf": re.sub(
        "(?m)^(.*)(,muri\\S*)", r'# muri setup added "\2" to line 1 below this one\n\1\2', AFTER["slurm.conf"]
    ),
    "gres.conf": BEFORE["gres.conf"] + _MARKED.format("#", AFTER["gres.conf"].splitlines(keepends=True)[-1]),
    "plugstack.conf": BEFORE["plugstack.conf"] + _MARKED.format("#", f"{INCLUDE}\n"),
    "job_submit.lua": BEFORE["job_submit.lua"].replace("\n\nreturn", f"\n\n{_MARKED.format('--', _LOADED)}return"),
}
"""As `muri setup --apply` of 0.2 left them."""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in {".conf", ".lua"}}


def follow(page: str, folder: Path) -> None:
    """Run a page's commands for /etc/slurm on a folder of the test."""
    text = (ROOT / "docs" / page).read_text()
    blocks = [
        each
        for each in re.findall(r"^```sh [^\n]+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if "/etc/slurm" in each
    ]
    assert blocks
    for block in blocks:
        subprocess.run(["sh", "-ec", block.replace("/etc/slurm", str(folder))], check=True)


@pytest.mark.parametrize("filters", FILTERS)
def test_what_the_pages_add_they_take_out_again(tmp_path: Path, filters: tuple[str, str | None, str, str]) -> None:
    write(tmp_path, files_before(filters))
    for _ in range(2):  # a second time nothing changes
        follow("install.md", tmp_path)
        assert held(tmp_path) == files_after(filters)
    follow("removal.md", tmp_path)
    assert held(tmp_path) == files_before(filters)


def test_a_filter_that_the_site_uses_meanwhile_stays(tmp_path: Path) -> None:
    write(tmp_path, BEFORE)
    follow("install.md", tmp_path)
    conf = tmp_path / "slurm.conf"
    conf.write_text(conf.read_text().replace("lua # muri", "lua"))
    follow("removal.md", tmp_path)
    assert held(tmp_path)["cli_filter.lua"] == f"{_MADE_FILTER}return slurm.SUCCESS\n"


def test_the_pages_take_out_what_setup_of_the_last_release_added(tmp_path: Path) -> None:
    write(tmp_path, BY_SETUP)
    follow("removal.md", tmp_path)
    assert held(tmp_path) == BEFORE


def play(folder: Path, names: slice, tasks: Path) -> None:
    """Let Ansible run some tasks of the role on this machine."""
    listed = yaml.safe_load(tasks.read_text())
    places = [task["name"] for task in listed]
    chosen = listed[places.index(names.start) : places.index(names.stop)]
    facts = {"muri_slurm_dir": str(folder), "muri_own_slurm_files": True, "muri_is_controller": True,
             "muri_there": {"stat": {"exists": True}}}  # fmt: skip
    handler = {"name": "Let Slurm read its files", "ansible.builtin.debug": {"msg": ""}}
    book = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": facts, "tasks": chosen,
            "handlers": [handler]}  # fmt: skip
    path = folder / "book.yml"
    path.write_text(yaml.safe_dump([book], sort_keys=False))
    tool = sorted((Path.home() / ".cache/muri").glob("ansible-core-*/bin/ansible-playbook"))[-1]
    done = subprocess.run([tool, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("filters", [*FILTERS, None])
def test_the_role_does_the_same(tmp_path: Path, filters: tuple[str, str | None, str, str] | None) -> None:
    subprocess.run([ROOT / "scripts/check-ansible"], capture_output=True, check=True)
    write(tmp_path, files_before(filters) if filters else BY_SETUP)
    added = slice("Which nodes have GPUs, by Slurm's files", "The partitions that Muri serves")
    taken = slice("Slurm's files without Muri", "Slurm reads its files before the plugin goes")
    if filters:
        for _ in range(2):
            play(tmp_path, added, ROLE / "present.yml")
            assert held(tmp_path) == files_after(filters)
    play(tmp_path, taken, ROLE / "absent.yml")
    assert held(tmp_path) == (files_before(filters) if filters else BEFORE)
    shutil.rmtree(tmp_path)
