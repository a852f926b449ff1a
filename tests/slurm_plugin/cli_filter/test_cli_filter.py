"""The cli_filter module, run by each Lua that Slurm is linked with."""

import importlib
from typing import Any

import pytest
from option_sources import CLI_FILTER_SOURCE

MEMBER = {"MURI_PILOT": "7", "SLURM_JOB_ID": "9", "SLURM_JOB_GPUS": "2,5", "SLURM_JOB_NUM_NODES": "1"}
#: As Slurm's table shows options that were not given.
NOT_GIVEN = {
    **dict.fromkeys(("ntasks-per-gpu", "ntasks-per-tres", "ntasks-per-node"), "-2"),
    "cpus-per-gpu": "0",
    "ntasks": "1",
    "nodes": "1",
}


class Slurm:
    """The part of srun that cli_filter.lua talks to."""

    def __init__(self, lua: Any) -> None:
        self.lua = lua
        self.errors: list[str] = []
        self.logged: list[str] = []
        log = lua.eval("function(sink) return function(...) sink(string.format(...)) end end")
        lua.globals().slurm = lua.table_from(
            {"SUCCESS": 0, "ERROR": -1, "log_error": log(self.errors.append), "log_info": log(self.logged.append)}
        )

    def load(self) -> None:
        assert self.lua.eval("function(path) return assert(loadfile(path))() end")(
            str(CLI_FILTER_SOURCE / "cli_filter.lua")
        ) == 0  # fmt: skip

    def submit(self, **given: str) -> tuple[int, dict[str, str]]:
        """Start a step with these options; the exit of the filter, and the options that are different then."""
        before = {"type": "srun", "jobid": "9", **NOT_GIVEN, **{name.replace("_", "-"): given[name] for name in given}}
        options = self.lua.table_from(before)
        result = self.lua.globals().slurm_cli_pre_submit(options, 0)
        return result, {name: value for name, value in options.items() if before.get(name) != value}


@pytest.fixture(params=["lua51", "lua53", "lua54"])
def slurm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for name, value in MEMBER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    world = Slurm(importlib.import_module(f"lupa.{request.param}").LuaRuntime(unpack_returned_tuples=True))
    world.load()
    return world


EACH = {"export": "ALL,MURI_STEP_GPUS=per-task:1"}
ZERO = {name: {name: "0"} for name in ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")}
NO_GRES, NO_BIND = {"gres": "none"}, {"gpu-bind": "none"}


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"ntasks": "2", "cpus_per_task": "4", "mem": "1G", "exact": "set", "gres": "gres/fast:1"}, {}),
        ({"gres": "gres/gpu:2"}, NO_GRES),
        ({"gres": "gpu"}, NO_GRES | EACH),
        ({"gres": "gres:gpu:tesla:1", "ntasks": "2"}, NO_GRES),
        ({"gres": "gres/fast:1,gres/gpu:2,gres/gpu_memory:4"}, {"gres": "gres/fast:1,gres/gpu_memory:4"}),
        ({"gpus": "2"}, ZERO["gpus"]),
        ({"gpus": "tesla:1"}, ZERO["gpus"] | EACH),
        ({"gpus": "1", "ntasks": "2"}, ZERO["gpus"]),
        ({"gpus_per_node": "2"}, ZERO["gpus-per-node"]),
        ({"gpus_per_socket": "1"}, ZERO["gpus-per-socket"]),
        ({"gpus_per_task": "1", "ntasks": "2"}, ZERO["gpus-per-task"] | EACH),
        ({"gpus_per_task": "2"}, ZERO["gpus-per-task"]),
        ({"gpu_bind": "closest"}, NO_BIND),
        ({"gpus_per_task": "1", "gpu_bind": "none", "ntasks": "2"}, ZERO["gpus-per-task"]),
        ({"tres_bind": "gres/gpu:closest"}, NO_BIND),
        ({"gpus": "2", "ntasks": "2", "gpu_bind": "per_task:1"}, ZERO["gpus"] | NO_BIND | EACH),
        ({"gpus": "2", "ntasks": "2", "gpu_bind": "verbose,single:1"}, ZERO["gpus"] | NO_BIND | EACH),
        ({"gpus": "2", "ntasks": "4", "gpu_bind": "single:2"}, ZERO["gpus"] | NO_BIND),
        ({"ntasks": "2", "tres_bind": "gres/gpu:per_task:1+gres/x:none"}, NO_BIND | EACH),
        ({"gpus": "1", "ntasks_per_node": "2"}, ZERO["gpus"]),
        ({"gpus_per_task": "1", "ntasks_per_node": "2"}, ZERO["gpus-per-task"] | EACH),
        # More tasks than parts: they share.
        ({"ntasks": "3", "gpu_bind": "per_task:1"}, NO_BIND),
        ({"tres_per_task": "cpu=2,gres/gpu=1", "ntasks": "2"}, {"tres-per-task": "cpu=2"} | EACH),
        ({"tres_per_task": "gres/gpu:2"}, {"tres-per-task": ""}),
        ({"tres_per_task": "cpu=2"}, {}),
        ({"mem_per_gpu": "700M"}, {"mem-per-gpu": "0", "mem": "1400M"}),
        ({"mem_per_gpu": "1G", "gpus": "1"}, {"mem-per-gpu": "0", "mem": "1G"} | ZERO["gpus"] | EACH),
        ({"gpus": "1", "export": "ALL,A=b"}, ZERO["gpus"] | {"export": "ALL,A=b,MURI_STEP_GPUS=per-task:1"}),
        ({"export": "PATH,A=b"}, {}),
        ({"export": "None"}, {}),
        # The component before has a share.
        ({"export": "ALL,MURI_STEP_GPUS=per-task:1", "gpus": "2"}, ZERO["gpus"] | {"export": "ALL"}),
        ({"export": "MURI_STEP_GPUS=per-task:1"}, {"export": "NONE"}),
        ({"gpus": "1", "export": "NONE"}, ZERO["gpus"] | {"export": "MURI_STEP_GPUS=per-task:1"}),
    ],
)
def test_the_request_for_gpus_goes_and_the_rest_stays(
    slurm: Slurm, given: dict[str, str], changed: dict[str, str]
) -> None:
    assert slurm.submit(**given) == (0, changed)
    assert (slurm.errors, slurm.logged) == ([], [])


MORE = "muri: the step asks for more GPUs than its job has, 2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gres": "gpu:tesla:3"}, MORE),
        ({"gpus": "3"}, MORE),
        ({"gpus": "a:1,b:2"}, MORE),
        ({"gpus_per_node": "3"}, MORE),
        ({"gpus_per_task": "3"}, MORE),
        ({"gpus_per_task": "1", "ntasks": "3"}, MORE),
        ({"tres_per_task": "gres/gpu=2", "ntasks": "2"}, MORE),
        ({"cpus_per_gpu": "2"}, "cannot have --cpus-per-gpu; write --cpus-per-task=N"),
        ({"ntasks_per_gpu": "1"}, "cannot have --ntasks-per-gpu; write --ntasks=N"),
    ],
)
def test_what_a_member_cannot_have_is_refused(slurm: Slurm, given: dict[str, str], said: str) -> None:
    assert slurm.submit(**given) == (-1, {})
    assert len(slurm.errors) == 1
    assert said in slurm.errors[0]


def test_on_two_nodes_the_step_may_have_what_both_have(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert slurm.submit(nodes="2-2", gpus_per_node="1") == (0, ZERO["gpus-per-node"])
    two = {"nodes": "2", "ntasks": "4"}
    assert slurm.submit(**two, gpus="4") == (0, ZERO["gpus"])
    assert slurm.submit(**two, gpus_per_task="1") == (0, ZERO["gpus-per-task"] | EACH)
    assert slurm.submit(**two, gpus="5") == (-1, {})
    assert slurm.errors == [f"{MORE} on each of 2 nodes"]


@pytest.mark.parametrize(
    ("held", "asked", "result"), [("0-1,4", "3", 0), ("0-1,4", "4", -1), ("all of them", "9", 0), ("", "9", 0)]
)
def test_a_member_has_what_slurm_says_of_its_job(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, held: str, asked: str, result: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_GPUS", held)
    assert slurm.submit(gpus=asked)[0] == result


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({"MURI_PILOT": None}, {}),
        ({"MURI_PILOT": ""}, {}),
        ({"SLURM_JOB_ID": None}, {}),
        ({}, {"jobid": "10"}),
        ({}, {"type": "sbatch"}),
        ({}, {"type": "salloc"}),
    ],
)
def test_nothing_else_is_touched(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], given: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    assert slurm.submit(gpus="9", gres="gres/gpu:9", gpu_bind="closest", cpus_per_gpu="3", **given) == (0, {})
    assert (slurm.errors, slurm.logged) == ([], [])


def test_the_sites_own_functions_run_first_and_their_refusal_stands(slurm: Slurm) -> None:
    slurm.lua.execute(
        "function slurm_cli_setup_defaults() return 'own' end\n"
        "function slurm_cli_pre_submit(options) options.seen = options.gpus return options.result end"
    )
    slurm.load()
    assert slurm.submit(gpus="2", result="7") == ("7", {"seen": "2"})
    assert slurm.submit(gpus="2") == (0, {"seen": "2", "gpus": "0"})
    assert slurm.lua.globals().slurm_cli_setup_defaults() == "own"
    assert slurm.lua.globals().slurm_cli_post_submit() == 0


def test_an_error_leaves_the_decision_to_slurm(slurm: Slurm) -> None:
    slurm.lua.execute("os.getenv = function() error('broken') end")
    assert slurm.submit(gpus="2") == (0, {})
    assert len(slurm.logged) == 1
    assert "broken; the request is left as it is" in slurm.logged[0]
