"""The job_submit module, run by each Lua that Slurm is linked with."""

import importlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from option_sources import JOB_SUBMIT_SOURCE

from muri.slurm_plugin.records import comment_tags as tags

NO_VAL = 0xFFFFFFFE
ALICE = 1001
FULL_MARK = "model=resnet18,batch-size=64,duration=3600,checkpoint=1,alone=1,accumulate=8"


class Slurm:
    """The part of slurmctld that job_submit.lua talks to."""

    def __init__(self, lua: Any) -> None:
        self.lua = lua
        self.logged: list[str] = []
        self.told: list[str] = []
        self._log = lua.eval("function(sink) return function(...) sink(string.format(...)) end end")
        lua.globals().slurm = lua.table_from(
            {
                "SUCCESS": 0,
                "ERROR": -1,
                "NO_VAL": NO_VAL,
                "reservations": lua.table_from({"muri_gate": lua.table_from({"end_time": time.time() + 3600})}),
                "log_info": self._log(self.logged.append),
                "log_user": self._log(self.told.append),
            }
        )

    def load(self, folder: Path) -> None:
        """Load job_submit.lua by its absolute path, as slurmctld does."""
        load = self.lua.eval("function(path) return assert(loadfile(path))() end")
        assert load(str(folder / "job_submit.lua")) == 0

    def job(self, mark: str | None = "on", **fields: Any) -> Any:
        job: dict[str, Any] = {"script": "#!/bin/sh\nmuri run a.py\n", "tres_per_node": "gres:gpu:1"}
        job |= {"priority": NO_VAL, "het_job_offset": NO_VAL}
        if mark is not None:
            job["spank_job_env"] = self.lua.table_from({0: f"MURI_JOB={mark}"})
        job.update(fields)
        return self.lua.table_from({name: value for name, value in job.items() if value is not None})

    def submit(self, job: Any, uid: int = ALICE) -> int:
        return self.lua.globals().slurm_job_submit(job, self.lua.table(), uid)

    def modify(self, change: Any, uid: int = ALICE, record: Mapping[str, Any] | None = None) -> int:
        job = self.lua.table_from(record or {})
        return self.lua.globals().slurm_job_modify(change, job, self.lua.table(), uid)


@pytest.fixture(params=["lua51", "lua53", "lua54"])
def slurm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Slurm]:
    monkeypatch.chdir(tmp_path)
    runtime = importlib.import_module(f"lupa.{request.param}").LuaRuntime(unpack_returned_tuples=True)
    world = Slurm(runtime)
    world.load(JOB_SUBMIT_SOURCE)
    yield world
    assert list(tmp_path.iterdir()) == []


def muri(slurm: Slurm) -> Any:
    return slurm.lua.eval('package.loaded["muri"]')


WAITS = "muri: waits for the license muri_gate until Muri starts it; `muri queue` shows how it stands"
HELD = "muri: held until Muri starts it; `muri queue` shows how it stands"
NOBODY = "muri: no controller is running; submitted as an ordinary job"


@pytest.mark.parametrize(
    ("setting", "asked", "gate", "priority", "licenses", "told"),
    [
        ("", None, "licence", NO_VAL, "muri_gate:1", WAITS),
        ("", "", "licence", NO_VAL, "muri_gate:1", WAITS),
        ("", "matlab:2", "licence", NO_VAL, "matlab:2,muri_gate:1", WAITS),
        ('package.loaded["muri"].gate = "hold"', None, "hold", 0, None, HELD),
        ("slurm.reservations = nil", None, "open", NO_VAL, None, NOBODY),
        ("slurm.reservations = {}", None, "open", NO_VAL, None, NOBODY),
        ("slurm.reservations.muri_gate.end_time = os.time() - 1", None, "open", NO_VAL, None, NOBODY),
    ],
)
def test_a_marked_gpu_batch_job_is_tagged_and_kept_as_its_site_does_it(
    slurm: Slurm, setting: str, asked: str | None, gate: str, priority: int, licenses: str | None, told: str
) -> None:
    slurm.lua.execute(setting)
    entries = {0: "_SLURM_SPANK_OPTION_muri_muri=x", 1: f"MURI_JOB={FULL_MARK}"}
    job = slurm.job(spank_job_env=slurm.lua.table_from(entries), licenses=asked)
    assert slurm.submit(job) == 0
    assert job.admin_comment == f"muri:{FULL_MARK} muri-gate:{gate}"
    assert (job.priority, job.licenses) == (priority, licenses)
    assert (slurm.told, slurm.logged) == ([told], [])


@pytest.mark.parametrize("mark", [None, "on"])
@pytest.mark.parametrize(
    ("asked", "licenses"),
    [
        ("muri_gate:1000000", "muri_gate:1"),
        ("muri_gate", "muri_gate:1"),
        ("muri_gate@x:5", "muri_gate:1"),
        ("muri_gate:3;matlab:1,muri_gate", "muri_gate:1;matlab:1"),
        ("matlab:1|muri_gate:5", "matlab:1|muri_gate:1"),
    ],
)
def test_no_user_gets_more_than_one_of_the_gates_license(
    slurm: Slurm, asked: str, licenses: str, mark: str | None
) -> None:
    job, change = slurm.job(mark, licenses=asked), slurm.lua.table_from({"licenses": asked})
    assert (slurm.submit(job), slurm.modify(change)) == (0, 0)
    assert (job.licenses, change.licenses) == (licenses, licenses)
    assert slurm.told[0] == slurm.told[-1] == f"muri: a job has one license muri_gate at most: {licenses}"


@pytest.mark.parametrize(
    ("licenses", "uid"), [("matlab:2;muri_gate:1", ALICE), ("muri_gate_2:5", ALICE), ("muri_gate:5", 0)]
)
def test_other_licenses_and_administrators_are_left_alone(slurm: Slurm, licenses: str, uid: int) -> None:
    job = slurm.job(None, licenses=licenses)
    change = slurm.lua.table_from({"licenses": licenses, "admin_comment": "muri:on", "priority": 7})
    slurm.submit(job, uid)
    slurm.modify(change, uid)
    assert (job.licenses, change.licenses, slurm.told) == (licenses, licenses, [])
    assert (change.admin_comment, change.priority) == ("muri:on", 7)


@given(licenses=st.text(alphabet="muri_gate:1=5,;|@ x", max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_asked_for_the_gate_counts_once_and_the_rest_stays(slurm: Slurm, licenses: str) -> None:
    one_gate = muri(slurm).one_gate
    kept = one_gate(licenses)
    assert one_gate(kept) == kept

    def split(text: str) -> tuple[list[str], list[str]]:
        items = re.split("[,;|]", text)
        gates = [each for each in items if re.match(r"muri_gate([@:=*\s]|$)", each)]
        return gates, [each for each in items if each not in gates]

    assert split(kept) == (["muri_gate:1"] if split(licenses)[0] else [], split(licenses)[1])


def is_kept(job: Any) -> bool:
    return "muri_gate" in (job.licenses or "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "muri:on"),
        ("", "muri:on"),
        ("project=x  ticket:7", "project=x ticket:7 muri:on"),
        ("a muri:model=old,alone=1 b", "a b muri:on"),
        ('muri-state:{"group":1} muri-hold:user note', "note muri:on"),
        ("muri-retry-memory:no note muri-out-of-memory:0.3", "note muri:on"),
        ("murino:1 muriel muri-el", "murino:1 muriel muri-el muri:on"),
    ],
)
def test_other_text_is_kept_and_forged_tokens_are_replaced(slurm: Slurm, before: str | None, after: str) -> None:
    job = slurm.job(admin_comment=before)
    slurm.submit(job)
    assert job.admin_comment == f"{after} muri-script:{muri(slurm).fingerprint(job.script)} muri-gate:licence"


def test_a_job_its_user_holds_is_kept_too_and_behind_muris_own_hold_that_is_remembered(slurm: Slurm) -> None:
    job = slurm.job(priority=0)
    slurm.submit(job)
    assert slurm.told.pop() == "muri: held by --hold; once released it waits until Muri starts it"
    assert (job.priority, job.licenses) == (0, "muri_gate:1")
    muri(slurm).gate = "hold"
    job = slurm.job(priority=0)
    slurm.submit(job)
    fingerprint = muri(slurm).fingerprint(job.script)
    assert job.admin_comment == f"muri:on muri-script:{fingerprint} muri-gate:hold muri-hold:user"
    assert slurm.told == ["muri: held by --hold; once released it starts as an ordinary job"]
    assert job.priority == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tres_per_job", "gres:gpu:2"),
        ("tres_per_node", "gpu"),
        ("tres_per_node", "gres/gpu=1"),
        ("tres_per_node", "gres:craynetwork:1,gres:gpu:1"),
        ("tres_per_socket", "gres:gpu:1"),
        ("tres_per_task", "cpu:4,gres/gpu:a100:1"),
        ("gres", "gpu:1"),
    ],
)
def test_every_way_to_ask_for_gpus_counts(slurm: Slurm, field: str, value: str) -> None:
    job = slurm.job(**{"tres_per_node": None, field: value})
    slurm.submit(job)
    assert is_kept(job)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tres_per_node": None}, "asks for no GPU"),
        ({"tres_per_node": "gres:gpu:0"}, "asks for no GPU"),
        ({"tres_per_node": "gres/gpu_memory:4"}, "asks for no GPU"),
        ({"tres_per_node": "license:gpu:1"}, "asks for no GPU"),
        ({"script": None}, "interactive jobs"),
        ({"script": ""}, "interactive jobs"),
        ({"cron_job": True}, "scrontab"),
        ({"het_job_offset": 0}, "heterogeneous"),
        ({"het_job_offset": 1}, "heterogeneous"),
        ({"mark": "model=x evil:token"}, "malformed"),
        ({"licenses": "matlab:1|maple:1"}, "one of several licenses"),
    ],
)
def test_a_marked_job_that_is_not_for_muri_stays_ordinary(slurm: Slurm, fields: dict[str, Any], why: str) -> None:
    job = slurm.job(**{"admin_comment": "kept", **fields})
    assert slurm.submit(job) == 0
    assert (job.admin_comment, job.priority, is_kept(job)) == ("kept", NO_VAL, False)
    assert len(slurm.told) == 1
    assert slurm.told[0].startswith("muri: submitted as an ordinary job: ")
    assert why in slurm.told[0]


@pytest.mark.parametrize("environment", [None, {}, {0: "OTHER=1"}, {0: "SPANK_MURI_JOB=on"}])
def test_a_job_without_the_mark_is_left_alone(slurm: Slurm, environment: dict[int, str] | None) -> None:
    table = None if environment is None else slurm.lua.table_from(environment)
    job = slurm.job(None, spank_job_env=table, admin_comment="muri:on as typed by root")
    assert slurm.submit(job) == 0
    assert (job.admin_comment, job.priority) == ("muri:on as typed by root", NO_VAL)
    assert (slurm.told, slurm.logged) == ([], [])


def texts_of(slurm: Slurm, texts: str, name: str = "MURI_OPTION", **fields: Any) -> Any:
    """A job whose SPANK plugin left the texts of the option."""
    environment = slurm.lua.table_from({"PATH": "/bin", "SLURM_SPANK_MURI_JOB": "as typed"})
    left = slurm.lua.table_from({0: "OTHER=1", 1: f"{name}={texts}"})
    return slurm.job(None, **{"spank_job_env": left, "environment": environment, **fields})


@pytest.mark.parametrize(
    ("texts", "mark"),
    [
        ("c:", "on"),
        ("s:model=a,alone;e:duration=1h;c:alone=no;c:batch-size=08", "model=a,batch-size=8,duration=3600"),
        ("c:min-speed=.50,checkpoint", "checkpoint=1,min-speed=0.5"),
    ],
)
def test_the_texts_of_an_option_become_the_tag_and_the_mark_of_the_job(slurm: Slurm, texts: str, mark: str) -> None:
    job = texts_of(slurm, texts)
    assert slurm.submit(job) == 0
    assert job.admin_comment.split()[0] == f"muri:{mark}"
    assert (job.environment["SLURM_SPANK_MURI_JOB"], job.environment["PATH"]) == (mark, "/bin")
    interactive = texts_of(slurm, texts, script=None)  # Slurm lets none read or write the environment of such a job
    assert slurm.submit(interactive) == 0
    assert interactive.environment["SLURM_SPANK_MURI_JOB"] == "as typed"


@pytest.mark.parametrize("name", ["MURI_OPTION", "MURI_TESTED"])
@pytest.mark.parametrize("fields", [{}, {"script": None}, {"tres_per_node": None}, {"het_job_offset": 1}])
@pytest.mark.parametrize(
    ("texts", "complaint", "lists"),
    [
        ("c:modle=x", 'muri: --muri=modle=x: unknown key "modle"; did you mean "model"?', True),
        ("c:;e:modle=x", 'muri: SBATCH_MURI=modle=x: unknown key "modle"; did you mean "model"?', True),
        ("s:duration=soon;c:duration=1h", "muri: --muri=duration=soon: duration=soon: not a time", False),
        ("c:alone;c:alone=no", "muri: --muri=alone=no: alone is given twice with different values (yes and no)", False),
    ],
)
def test_a_mistake_in_an_option_submits_nothing_and_its_user_is_told(
    slurm: Slurm, name: str, fields: dict[str, Any], texts: str, complaint: str, lists: bool
) -> None:
    job = texts_of(slurm, texts, name, admin_comment="kept", **fields)
    assert slurm.submit(job) == -1
    assert (job.admin_comment, job.priority, is_kept(job)) == ("kept", NO_VAL, False)
    assert slurm.told[0].startswith(complaint)
    listed = "\n".join(slurm.told[1:])
    assert all((key in listed) == lists for key in ("valid keys", "model=NAME", "duration=TIME", "opportunistic "))
    assert slurm.logged == []


def test_a_job_that_is_only_tested_is_an_ordinary_one(slurm: Slurm) -> None:
    job = texts_of(slurm, "c:model=a", "MURI_TESTED")
    assert slurm.submit(job) == 0
    assert (job.admin_comment, is_kept(job), slurm.told) == (None, False, [])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.text(max_size=60)
    | st.text("sect:;,=model1 \n%\x1b", max_size=40).map("c:".__add__)
    | st.sampled_from(["c:" + "model=a," * 100_000, "x" * 5000, "c:model=%n%s", "c:model=a\nmuri-plan:{}", "c:\0"])
)
def test_no_text_of_a_forged_option_is_repeated_or_harms(slurm: Slurm, texts: str) -> None:
    slurm.told.clear()
    job = texts_of(slurm, texts, admin_comment="before")
    code = slurm.submit(job)
    assert (code == 0) == is_kept(job)
    words = job.admin_comment.split()
    assert words[0] == "before"
    assert all(re.fullmatch(r"muri[a-z-]*:[A-Za-z0-9._+/:=,-]+", word) for word in words[1:])
    assert len([word for word in words if word.startswith("muri:")]) == is_kept(job)
    assert all(re.fullmatch(r"[ -~]{1,4500}", line) for line in slurm.told)
    assert slurm.logged == []


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ("#!/bin/sh\nmuri run train.py\n", True),
        ("#!/bin/sh\nsrun /opt/bin/muri  run -m train\n", True),
        ('#!/bin/sh\n"$HOME/env/bin/muri" run train.py\n', True),
        ("#!/bin/sh\npython train.py\n", False),
        ("#!/bin/sh\n" + "# a long way to go\n" * 5000 + "muri run train.py\n", True),
    ],
)
def test_a_script_that_surely_does_not_call_muri_is_marked(slurm: Slurm, script: str, calls: bool) -> None:
    job = slurm.job(FULL_MARK, script=script)
    assert slurm.submit(job) == 0
    assert ("muri-calls:no" in job.admin_comment.split()) != calls


def test_a_fingerprint_tells_scripts_apart_and_only_them(slurm: Slurm) -> None:
    fingerprint = muri(slurm).fingerprint
    script = "#!/bin/sh\nmuri run train.py\n"
    scripts = [script, script + " ", script.replace("train", "trani"), "", "#", script * 5000, "é" * 100]
    found = [fingerprint(text) for text in scripts]
    assert found == [fingerprint(text) for text in scripts]
    assert len(set(found)) == len(scripts)
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(comment=st.text(max_size=60), mark=st.text(max_size=60))
def test_a_hostile_client_adds_one_token_at_most(slurm: Slurm, comment: str, mark: str) -> None:
    job = slurm.job(mark, admin_comment=comment)
    assert slurm.submit(job) == 0
    if is_kept(job):
        own = [word for word in job.admin_comment.split() if word.startswith("muri:")]
        assert own == [f"muri:{mark}"]
        assert len(mark.split()) == 1
    else:
        assert job.admin_comment == comment


@pytest.mark.parametrize("gate", ["license", "hold"])
@pytest.mark.parametrize("field", ["admin_comment", "licenses"])
def test_a_failure_inside_goes_to_the_log_and_the_job_goes_on_unkept(slurm: Slurm, gate: str, field: str) -> None:
    muri(slurm).gate = gate
    job = slurm.job(None if field == "licenses" else "on", licenses="muri_gate:5" if field == "licenses" else None)
    refuse = slurm.lua.eval(
        """function(job, field) return setmetatable({}, {
             __index = job,
             __newindex = function(_, name, value)
               if name == field then error("cannot set " .. name .. " 100%") end
               job[name] = value
             end}) end"""
    )
    assert slurm.submit(refuse(job, field)) == 0
    assert (job.priority, job.licenses) == (NO_VAL, "muri_gate:5" if field == "licenses" else None)
    assert f"cannot set {field} 100%" in slurm.logged[0]
    assert f"uid {ALICE}" in slurm.logged[0]


@pytest.mark.parametrize("nonsense", ["nil", "42", "{}", "{spank_job_env = 3}", "{spank_job_env = {[0] = {}}}"])
def test_nonsense_never_raises(slurm: Slurm, nonsense: str) -> None:
    assert slurm.submit(slurm.lua.eval(nonsense)) == 0
    assert slurm.modify(slurm.lua.eval(nonsense)) == 0


@pytest.mark.parametrize("lua", ["lua51", "lua54"])
@pytest.mark.parametrize("broken", [None, "this is not Lua", 'error("broken")'])
def test_without_a_working_module_jobs_are_submitted(tmp_path: Path, lua: str, broken: str | None) -> None:
    (tmp_path / "job_submit.lua").write_bytes((JOB_SUBMIT_SOURCE / "job_submit.lua").read_bytes())
    if broken is not None:
        (tmp_path / "muri.lua").write_text(broken)
    world = Slurm(importlib.import_module(f"lupa.{lua}").LuaRuntime())
    world.load(tmp_path)
    job = world.job()
    assert world.submit(job) == 0
    assert job.priority == NO_VAL
    assert "cannot load muri.lua" in world.logged[0]


FACTS = "1.0123456789abcdef.fedcba9876543210.L3Vzci9iaW4vcHl0aG9uMw.NwA4AA"


def facts_kept(slurm: Slurm, text: str, environment: dict[str, str] | None) -> str | None:
    """The facts in the AdminComment of a job whose plugin left a text; None when none were kept."""
    entries = slurm.lua.table_from({0: "MURI_JOB=on", 1: f"MURI_FACTS={text}"})
    job = slurm.job(
        spank_job_env=entries, environment=None if environment is None else slurm.lua.table_from(environment)
    )
    slurm.submit(job)
    words = job.admin_comment.split()
    assert [word for word in words if not word.startswith("muri-facts:")] == [
        "muri:on", next(word for word in words if word.startswith("muri-script:")), "muri-gate:licence",
    ]  # fmt: skip
    return next((word.removeprefix("muri-facts:") for word in words if word.startswith("muri-facts:")), None)


PLAIN = {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("text", "environment", "kept"),
    [
        (FACTS, PLAIN, FACTS),
        (FACTS.replace("NwA4AA", "~"), PLAIN, FACTS.replace("NwA4AA", "~")),
        ("1.0123456789abcdef.fedcba9876543210..", PLAIN, "1.0123456789abcdef.fedcba9876543210.."),
        # As with sbatch --export=NONE: nothing is said of an environment that the job does not get.
        (FACTS, None, "1..fedcba9876543210..NwA4AA"),
        (FACTS, {"SLURM_SUBMIT_DIR": "/home/alice"}, "1..fedcba9876543210..NwA4AA"),
        *((text, PLAIN, None) for text in (
            "", "2" + FACTS[1:], FACTS + ".", FACTS + " muri-state:{}", FACTS + "\nmuri-gate:open", FACTS + "=",
            FACTS.replace("0123456789abcdef", "0123456789ABCDEF"), FACTS.replace("0123456789abcdef", ""),
            FACTS.replace("L3V", "%s%n"), FACTS.replace("NwA4AA", "NwA4A"), FACTS.replace("NwA4AA", "N" * 4096),
            FACTS.replace("NwA4AA", "~~"), FACTS.replace("NwA4AA", "\0"),
        )),
    ],
)  # fmt: skip
def test_facts_in_their_form_are_kept_and_others_cost_the_job_nothing(
    slurm: Slurm, text: str, environment: dict[str, str] | None, kept: str | None
) -> None:
    assert facts_kept(slurm, text, environment) == kept


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(), st.from_regex(r"1\.[0-9a-f]{16}\.[0-9a-f]{16}\.\S{0,9}\.\S{0,9}")))
def test_no_text_of_a_user_makes_another_word_of_muris(slurm: Slurm, text: str) -> None:
    kept = muri(slurm).facts(slurm.lua.table_from({0: f"MURI_FACTS={text}"}), slurm.lua.table_from({"PATH": "/bin"}))
    assert kept is None or re.fullmatch(r"[A-Za-z0-9._~-]{1,4096}", kept)


def noticed(slurm: Slurm, path: Path, *jobs: Any) -> list[str]:
    """What the notice file holds after each submission, "" where there is none."""
    muri(slurm).notice = str(path)
    held = []
    for job in jobs:
        assert slurm.submit(job) == 0
        held.append(path.read_text() if path.is_file() else "")
    return held


@pytest.fixture
def notice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "notice"
    path.write_text("0")
    return path


def test_the_controller_gets_notice_of_jobs_that_wait_for_it_and_the_file_never_grows(
    slurm: Slurm, notice: Path
) -> None:
    others = [slurm.job(None), slurm.job("on", script=None), slurm.job("on", tres_per_node=None)]
    assert noticed(slurm, notice, *others) == ["0"] * 3
    slurm.lua.execute("slurm.reservations = {}")
    assert noticed(slurm, notice, slurm.job()) == ["0"]  # no controller is running
    muri(slurm).gate = "hold"
    assert noticed(slurm, notice, *(slurm.job() for _ in range(20))) == ["1"] * 20


ESTIMATED = tags.with_plan("muri:on", tags.Planned(("it waits",), 0.9, 0.5, estimated=True))
KNOWN = tags.with_plan("muri:on", tags.Planned(('"estimated":true',), 0.9, 0.5))


@pytest.mark.parametrize(
    ("comment", "plan", "told"),
    [
        ("my words muri-measured:{}", ESTIMATED, "1"),
        ("muri-speed:{}", ESTIMATED, "0"),
        ("muri-measured:{}", KNOWN, "0"),
        ("muri-measured:{}", None, "0"),
        (5, ESTIMATED, "0"),
        (None, ESTIMATED, "0"),
    ],
)
def test_the_controller_gets_notice_of_members_whose_estimated_model_has_been_measured(
    slurm: Slurm, notice: Path, comment: Any, plan: str | None, told: str
) -> None:
    muri(slurm).notice = str(notice)
    assert slurm.modify(slurm.lua.table_from({"comment": comment}), record={"admin_comment": plan}) == 0
    assert (notice.read_text(), slurm.logged) == (told, [])


@pytest.mark.parametrize("place", ["nowhere", "in no directory", "a directory", "full", "no path"])
def test_no_submission_fails_for_want_of_a_notice(slurm: Slurm, notice: Path, place: str) -> None:
    notice.unlink()
    if place == "in no directory":
        notice = notice / "deeper"
    elif place == "a directory":
        notice.mkdir()
    elif place == "full":
        notice.symlink_to("/dev/full")
    job = slurm.job(FULL_MARK)
    assert noticed(slurm, notice, job) == [""]
    assert job.admin_comment == f"muri:{FULL_MARK} muri-gate:licence"
    assert (notice.exists(), slurm.logged) == (place in {"a directory", "full"}, [])
    for wrong in (None, 5, slurm.lua.table()):
        muri(slurm).notice = wrong
        assert slurm.submit(slurm.job(FULL_MARK)) == 0
    assert slurm.logged == []
