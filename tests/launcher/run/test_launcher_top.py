"""`muri top`: its tables, the files that it reads, and its answer when there is no group."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launcher_harness import LOOP, MURI, Launcher
from polling import DEADLINE_S, until
from rich.console import Console

from muri.launcher.run import top
from muri.launcher.run.top import Found, GroupView, NoGroupError, find_groups, read_group, render, sort_members


def member(**changes: Any) -> dict[str, Any]:
    return {
        "state": "running",
        "script": "/home/alice/experiments/train_a_long_name.py",
        "iterations": 1234,
        "iterations_per_s": 20.5,
        "speed": 0.61,
        "predicted_speed": 0.9,
        "solo_iteration_s": 0.03,
        "share": {"load": 0.5, "propagate": 0.25, "wait": 0.25},
        "isolation": "thread",
    } | changes


def status(**members: dict[str, Any]) -> dict[str, Any]:
    return {
        "pid": 17,
        "pilot_job": "4711",
        "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "discipline": "fair",
        "total_speed": 0.61,
        "resources": {"storage": {"holder": "101", "busy": 0.5}, "gpu": {"holder": None, "busy": 0.25}},
        "members": members,
    }


def shown(group: GroupView, sort: str = "job", width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(Found((group,)), sort))
    return console.export_text()


def test_four_members_fit_80_columns() -> None:
    names = {str(10_000_000 + i): member(iterations=10**7) for i in range(4)}
    text = shown(GroupView(Path("s"), status(**names), 0.5))
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if line.startswith("1000000")]
    assert len(rows) == 4
    assert "LLLLLLLLGGGGwwww" in rows[0]
    assert "0.61!" in rows[0]
    assert "storage 50% 101" in text


USE = {
    "node": {"cpu_cores": 12.34, "cpu_count": 64, "mem_gib": 123.4, "disk_mib_per_s": 99999.0, "network_mib_per_s": 1.0,
             "gpus": {"0": {"utilization": 0.74, "mem_gib": 60.0}}},
    "jobs": {"10000000": {"cpu_cores": 1.2, "mem_gib": 3.4, "disk_mib_per_s": 12.0, "gpu_utilization": 0.25,
                          "gpu_mem_gib": 8.1}},
}  # fmt: skip


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the rows by their names; the lower table comes last."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_use_of_members_and_node_fits_80_columns() -> None:
    members = {name: member() for name in ("10000000", "10000001")}
    text = shown(GroupView(Path("s"), status(**members) | {"use": USE}, 0.5))
    assert max(map(len, text.splitlines())) <= 80
    assert rows(text)["10000000"] == ["1.2", "3.4", "12.0", "-", "25%", "8.1"]
    assert rows(text)["10000001"] == ["-"] * 6
    assert rows(text)["node"] == ["12.3/64", "123", "99999", "1.0", "74%", "60.0"]


def test_a_malformed_part_of_the_use_hides_no_other() -> None:
    node = {"cpu_cores": 1.5, "cpu_count": "x", "mem_gib": 10**400, "gpus": {"0": {"utilization": 0.5}, "1": 1}}
    use = {"node": node, "jobs": {"10000000": {"cpu_cores": True, "mem_gib": 3.4}, "10000001": 1}}
    members = {name: member() for name in ("10000000", "10000001")}
    text = rows(shown(GroupView(Path("s"), status(**members) | {"use": use}, 0.5)))
    assert text["10000000"] == ["-", "3.4", *"----"]
    assert text["10000001"] == [*"------"]
    assert text["node"] == ["1.5", *"---", "50%", "-"]


def test_use_is_read_beside_the_status_unless_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "pilot-7.json"
    path.write_text(json.dumps(status()))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    (tmp_path / "pilot-7.use.json").write_text(json.dumps({"updated": now, **USE}))
    assert read_group(path).status["use"]["node"]["cpu_count"] == 64
    (tmp_path / "pilot-7.use.json").write_text(json.dumps({"updated": "2020-01-01T00:00:00Z", **USE}))
    assert "use" not in read_group(path).status
    (tmp_path / "pilot-7.use.json").write_text("{")
    assert "use" not in read_group(path).status


def test_members_that_never_attached_are_shown_as_sharing_plainly(tmp_path: Path) -> None:
    path = tmp_path / "pilot-7.json"
    waiting = member(state="waiting", script="", share={}, speed=None, iterations=0, iterations_per_s=None)
    path.write_text(json.dumps(status(**{"1": member(), "2": waiting, "3": waiting})))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    plain = ["1", "2", "4", "../5", 6, None, ["7"]]
    jobs = {"4": {"cpu_cores": 1.0, "gpu_utilization": 0.5}}
    use = {"node": USE["node"], "jobs": jobs, "plain": plain}
    (tmp_path / "pilot-7.use.json").write_text(json.dumps({"updated": now, **use}))
    view = read_group(path)
    states = {name: each["state"] for name, each in view.status["members"].items()}
    assert states == {"1": "running", "2": "plain", "3": "waiting", "4": "plain"}
    assert "plain" in shown(view)
    assert rows(shown(view))["4"] == ["1.0", *"---", "50%", "-"]
    for odd in ({"plain": 3}, {"plain": {"1": 2}}, []):
        (tmp_path / "pilot-7.use.json").write_text(json.dumps({"updated": now, **odd} if odd else odd))
        assert read_group(path).status["members"]["2"]["state"] == "waiting"


def test_promise_is_shown_beside_what_was_measured() -> None:
    members = {"1": member(promised_speed=0.8, promise_broken=True), "2": member(promised_speed=0.5), "3": member()}
    cells = rows(shown(GroupView(Path("s"), status(**members), 0)))
    assert [cells[name][-1] for name in "123"] == ["0.80!", "0.50", "-"]
    assert cells["1"][-3:-1] == ["0.61!", "0.90"]


def test_states_are_told() -> None:
    members = {
        "1": member(state="ended", exit_code=3, share={}, speed=None, iterations_per_s=None),
        "2": member(isolation="process"),
        "3": member(state="waiting", script="", share={}, speed=None, iterations_per_s=None),
        "5": member(solo_iteration_s=None, predicted_speed=None),
        "6": member(paused=True, isolation="process"),
        "7": member(state="ended", exit_code=None, share={}, speed=None, iterations_per_s=None),
    }
    fault = {"fault": {"cause": "CUDA error: launch failed", "culprits": ["4"]}}
    text = shown(GroupView(Path("s"), status(**members) | fault, 99))
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    told = {"1": "exit 3", "2": "process", "3": "waiting", "5": "~0.61", "6": "paused", "7": "ended"}
    assert [name for name, word in told.items() if word not in lines[name]] == []
    assert "Error of the GPU: CUDA error" in text
    assert "has not written for 99 s" in text


def test_sorting() -> None:
    members = {
        "9": member(speed=0.5, iterations=1, share={"wait": 0.1}),
        "10": member(speed=None, iterations=3, share={}),
        "8": member(speed=0.2, iterations=2, share={"wait": 0.9}),
    }
    orders = {by: [name for name, _ in sort_members(members, by)] for by in ("job", "speed", "iterations", "wait")}
    assert orders.pop("iterations") == ["10", "8", "9"]
    assert list(orders.values()) == [["8", "9", "10"]] * 3


def test_root_looks_only_into_directories_that_belong_to_their_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make directories of other users")
    for uid, mode, owner in ((1001, 0o700, 1001), (1002, 0o755, 1002), (1003, 0o700, 1001)):
        folder = tmp_path / str(uid)
        folder.mkdir()
        (folder / f"pilot-{uid}.json").write_text(json.dumps(status(**{str(uid): member()})))
        os.chown(folder, owner, owner)
        folder.chmod(mode)
    (tmp_path / "1004").symlink_to(tmp_path / "1001")
    assert [p.name for p in tmp_path.iterdir() if top._belongs_to_its_user(p)] == ["1001"]


def test_neither_links_nor_pipes_of_users_are_followed(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.json"
    real.write_text(json.dumps(status(**{"7": member()})))
    (tmp_path / "pilot-7.json").symlink_to(real)
    os.mkfifo(tmp_path / "pilot-8.json")
    with pytest.raises(NoGroupError):
        find_groups({"MURI_RUN_DIR": str(tmp_path)})
    (tmp_path / "pilot-7.json").unlink()
    real.rename(tmp_path / "pilot-7.json")
    assert len(find_groups({"MURI_RUN_DIR": str(tmp_path)}).groups) == 1


@pytest.mark.parametrize("changes", [
    {"discipline": ["x"], "members": {"1": [1, 2]}, "updated": 5, "pid": -1},
    {"members": {"1": member(speed=10**400)}},
    {"members": {"1": member(speed="fast")}},
    {"members": {"1": member(share={"load": 1.0, "wait": float("inf")})}},
    {"members": {"1": member(share={"load": 1e12, "wait": -1e12 + 0.001})}},
    {"members": {"1": member(share={"load": -1e12, "wait": 1e12 + 1})}},
    {"members": {str(number): member() for number in range(1000)}},
    {"total_speed": "1"}, {"total_speed": float("nan")}, {"resources": [1]}, {"disciplines": [1, 2]},
    {"anything": 1e400}, {"resources": {"gpu": {"busy": "x"}}}, {"updated": "9999-12-31T23:59:59-23:59"},
    {"node": "x" * 100_000},
    {"use": {"node": {"mem_gib": 10**400, "gpus": {"0": {"utilization": 10**400}}}}},
    {"use": 3}, {"use": {"node": 3}}, {"use": {"node": {"gpus": {"0": 1}, "cpu_count": "x"}, "jobs": []}},
    "[" * 100_000, '{"discipline":"x","members":{"1":' + "[" * 100_000 + "}}", "1", "[]", "null",
], ids=range(24))  # fmt: skip
def test_what_a_users_file_holds_hides_no_other_group(tmp_path: Path, changes: Any, monkeypatch, capsys) -> None:
    for name, text in (("9", changes), ("7", {"members": {"4242": member()}})):
        (tmp_path / f"pilot-{name}.json").write_text(text if isinstance(text, str) else json.dumps(status() | text))
    monkeypatch.setenv("MURI_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    for options in (["--once"], ["--json"]):
        top.top(options, standalone_mode=False)
        told = capsys.readouterr()
        assert "4242" in told.out
        shown = told.out.count("Group of pilot job") > 1 or told.out.count('"file"') > 1
        assert shown or "pilot-9.json is not a status file of a runtime" in " ".join((told.out + told.err).split())
    json.loads(told.out, parse_constant=pytest.fail)


def test_many_files_of_a_user_are_not_all_read(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"pilot-{number}.json").write_text(json.dumps(status()))
    found = {group.path for group in find_groups({"MURI_RUN_DIR": str(tmp_path)}).groups}
    assert found == {tmp_path / f"pilot-{number}.json" for number in range(68, 100)}


def test_no_group_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "pilot-7.json").write_text("half a fi")
    (tmp_path / "pilot-7.trace.json").write_text("[]")
    with pytest.raises(NoGroupError, match=r"srun --overlap --pty --jobid=GROUP muri top"):
        find_groups({"MURI_RUN_DIR": str(tmp_path)})


def test_status_that_a_killed_pilot_left_behind_is_no_group(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    long_ago = {"updated": "2026-01-01T00:00:00Z"}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", tmp_path / "pilot-2.json"]) as hanging:
        # The system shows a command line a moment after the program has been started.
        until(Path(f"/proc/{hanging.pid}/cmdline").read_bytes, "a command line")
        for pilot, changes in (
            (1, long_ago | {"pid": gone.pid}),
            (2, long_ago | {"pid": hanging.pid}),
            (3, {"pid": gone.pid}),  # its pilot job is about to say why it died
            (4, long_ago | {"pid": "me"}),
            (5, long_ago | {"pid": os.getpid()}),  # another process has its number by now
        ):
            (tmp_path / f"pilot-{pilot}.json").write_text(json.dumps(status(**{"101": member()}) | changes))
        try:
            groups = find_groups({"MURI_RUN_DIR": str(tmp_path)}).groups
        finally:
            hanging.kill()
    assert [(group.path.name, group.stale) for group in groups] == [("pilot-2.json", True), ("pilot-3.json", False)]


def test_shows_a_real_group_plainly_as_json_and_live(launcher: Launcher) -> None:
    launcher.status_path = launcher.run_dir / "pilot-4711.json"
    launcher.threads("101", "102", options=("--solo-iteration-s", "101=0.005"))
    launcher.member("101", launcher.script(LOOP), 100_000)
    until(lambda: launcher.status()["members"]["101"]["speed"], "a speed")
    plain = subprocess.check_output([*MURI, "top"], env=launcher.environment, text=True)
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b" not in plain
    assert "train.py" in plain
    (group,) = json.loads(subprocess.check_output([*MURI, "top", "--json"], env=launcher.environment))
    assert group["file"] == str(launcher.status_path)
    assert group["members"]["101"]["iterations"] > 0
    assert group["stale"] is False
    text, code = in_a_terminal([*MURI, "top"], launcher.environment)
    assert "101" in text
    assert code == 0


def in_a_terminal(command: list[str], environment: dict[str, str]) -> tuple[str, int]:
    """Run in a pseudo-terminal until something was drawn, then press q."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        process = subprocess.Popen(
            command, env=environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        text = b""
        while b"total speed" not in text:  # an OSError tells that the command has ended before
            text += terminal.read(65536)
        terminal.write(b"q")
        return text.decode(errors="replace"), process.wait(timeout=DEADLINE_S)
