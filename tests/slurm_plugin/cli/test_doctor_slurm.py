"""What `muri doctor` says of Slurm: its settings, the jobs that it tried with, and names in muri.yaml."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, make_job, make_node

from muri.cli import cli, run_command
from muri.slurm_plugin.cli import doctor_slurm
from muri.slurm_plugin.cli.doctor_slurm import (
    LOAD,
    LOAD_FILTER,
    Level,
    examine_steps,
    examine_submission,
    judge_events,
    judge_gate,
    judge_job_files,
    judge_job_submit,
    judge_prologs,
    judge_removal,
    judge_select,
    judge_sharing,
    judge_slurmds,
    names_in,
    plugin_files,
    site_scripts,
    wrong_python,
)
from muri.slurm_plugin.config import Allocation, Config, Pilot, Profiling
from muri.slurm_plugin.gateway.base import GatewayError, GatewayUnavailableError
from muri.slurm_plugin.records.cluster import JobChange
from muri.slurm_plugin.records.limits import PartitionLimits, SiteLimits, TriedForm

LICENSES = "LicenseName=matlab Total=2 Used=0\nLicenseName=muri_gate Total=1000000 Used=0 Free=0 Reserved=1000000\n"
HOSTS = {"SlurmctldHost[0]": "head(10.0.0.1)", "SlurmctldHost[1]": "spare.example.org"}
LINEAR, CONS_TRES = "select/linear", "select/cons_tres"
ONLY_CPUS, NEITHER = Allocation(memory="off"), Allocation(cpus="off", memory="off")


@pytest.mark.parametrize(
    ("judge", "given", "level", "said"),
    [
        (judge_gate, (LICENSES, Config()), Level.OK, "1200 s after the last cycle"),
        (judge_gate, (LICENSES, Config(lease_s=600)), Level.WARNING, "600 s after the last cycle"),
        (judge_gate, ("LicenseName=muri_gate_2 Total=1\n", Config()), Level.PROBLEM, "start as ordinary jobs"),
        (judge_gate, ("", Config()), Level.PROBLEM, "start as ordinary jobs"),
        (judge_gate, (LICENSES, Config(gate="hold")), Level.WARNING, "priority 0"),
        (judge_gate, ("", Config(gate="hold")), Level.WARNING, "wait for the watchdog"),
        (judge_job_submit, ("muri:on muri-gate:licence", Config()), Level.OK, "kept waiting by license"),
        (judge_job_submit, ("muri:on muri-gate:hold", Config(gate="hold")), Level.OK, "kept waiting by hold"),
        (judge_job_submit, ("muri:on muri-gate:open", Config()), Level.WARNING, "no controller is running"),
        (judge_job_submit, ("muri:on muri-gate:hold", Config()), Level.PROBLEM, "by hold, muri.yaml by license"),
        (judge_job_submit, ("site=x", Config()), Level.PROBLEM, "not tagged"),
        (judge_removal, ((), ()), Level.WARNING, "not tried yet"),
    ],
)
def test_each_finding_has_its_level_and_says_what_to_do(judge, given, level, said):
    finding = judge(*given)
    assert (finding.level, said in finding.text) == (level, True)
    assert bool(finding.remedy) is (level is not Level.OK)
    assert finding.lines == ((LOAD,) if "not tagged" in said else ())


@pytest.mark.parametrize(
    ("kind", "parameters", "allocation", "level", "said"),
    [
        (CONS_TRES, "CR_CORE_MEMORY", Allocation(), Level.OK, "CR_CORE_MEMORY"),
        (CONS_TRES, "CR_CPU,CR_CORE_DEFAULT_DIST_BLOCK", Allocation(), Level.WARNING, "does not count memory"),
        (CONS_TRES, "CR_MEMORY", Allocation(), Level.WARNING, "does not count CPUs"),
        (LINEAR, "", Allocation(), Level.WARNING, "whole nodes (select/linear with no parameters)"),
        # What may not be changed need not be counted.
        (CONS_TRES, "CR_CORE", ONLY_CPUS, Level.OK, "CR_CORE"),
        (LINEAR, "", NEITHER, None, ""),
        ("", "", Allocation(), None, ""),
    ],
)
def test_what_slurm_does_not_count_is_named(kind, parameters, allocation, level, said):
    settings = {"SelectType": kind, "SelectTypeParameters": parameters}
    findings = [*judge_select(settings, Config(allocation=allocation))]
    assert [finding.level for finding in findings] == ([level] if level else [])
    for finding in findings:
        assert said in finding.text
        assert bool(finding.remedy) == (level is Level.WARNING)


PARTITIONS = "".join(
    f"PartitionName={name} AllowGroups=ALL Exclusive=NO OverSubscribe={value} OverTimeLimit=NONE State=UP\n"
    for name, value in {"gpu": "YES:8", "old": "YES:4", "no": "NO", "none": "NO", "whole": "EXCLUSIVE"}.items()
)


@pytest.mark.parametrize(
    ("served", "group_size", "said"),
    [
        (["gpu"], 4, {"up to 8 on one: gpu": Level.OK}),
        (["old"], 4, {"old: a pilot job and 3 more share a CPU (OverSubscribe=YES:4)": Level.WARNING}),
        (["old"], 3, {"up to 4 on one: old": Level.OK}),
        (["no", "none", "gpu"], 4, {"no, none: no two jobs share a CPU": Level.WARNING, ": gpu": Level.OK}),
        ([], 2, {"no, none: no two": Level.WARNING, "up to 4 on one: old": Level.OK, "up to 8 on one: gpu": Level.OK}),
        (["no"], 1, {}),
        (["whole"], 4, {}),
    ],
)
def test_partitions_whose_jobs_share_too_few_cpus_are_named(served, group_size, said):
    config = Config(partitions=served, grouping={"max_group_size": group_size})
    findings = [*judge_sharing(PARTITIONS, config)]
    assert [finding.level for finding in findings] == [*said.values()]
    for finding, words in zip(findings, said, strict=True):
        assert words in finding.text
        assert finding.remedy.startswith("OverSubscribe=YES:8") is (finding.level is Level.WARNING)


NODES = "".join(
    f"NodeName={name} OS=Linux 6 #1 Gres={gres} State=IDLE BootTime=90 SlurmdStartTime={start} LastBusyTime=1\n"
    for name, gres, start in [("n1", "gpu:2", 100), ("n2", "gpu:a100:2(S:0)", 102), ("n3", "gpu:2", "Unknown"),
                              ("login", "(null)", 100)]
)  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "changed_s", "level", "said"),
    [
        (NODES, 100.9, Level.OK, "each slurmd"),  # Slurm tells whole seconds
        (NODES, 101.5, Level.WARNING, "slurmd on n1 has not"),
        (NODES, 200.0, Level.WARNING, "slurmd on n[1-2] has not"),
        ("NodeName=login Gres=(null) SlurmdStartTime=100 \n", 200.0, None, ""),
    ],
)
def test_slurmds_that_have_not_read_the_plugin_are_named(nodes, changed_s, level, said):
    findings = [*judge_slurmds(nodes, changed_s)]
    assert [finding.level for finding in findings] == ([level] if level else [])
    for finding in findings:
        assert said in finding.text
        assert ("scontrol reconfigure" in finding.remedy) is (level is Level.WARNING)


@pytest.mark.parametrize(
    ("conf", "found"),
    [
        ("optional {0}/muri_spank.so x=1\n", {"plugstack.conf", "muri_spank.so"}),
        ("required pyxis.so\n  include {0}/conf.d/*.conf\n", {"plugstack.conf", "muri.conf", "muri_spank.so"}),
        ("include {0}/conf.d/nosuch.conf\n# optional {0}/muri_spank.so\n", set()),
        ("required pyxis.so\n", set()),
    ],
)
def test_the_files_that_tell_slurmd_of_the_plugin_are_found(tmp_path, conf, found):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "muri_spank.so").touch()
    (tmp_path / "conf.d/muri.conf").write_text(f"optional {tmp_path}/muri_spank.so\noptional /nosuch/muri.so\n")
    (tmp_path / "conf.d/pyxis.conf").write_text("required pyxis.so\n")
    plugstack = tmp_path / "plugstack.conf"
    plugstack.write_text(conf.format(tmp_path))
    assert {path.name for path in plugin_files(plugstack)} == found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"JobContainerType": "job_container/tmpfs"}, ["JobContainerType=job_container/tmpfs"]),
        ({"NamespaceType": "namespace/linux"}, ["NamespaceType=namespace/linux"]),
        ({"JobContainerType": "job_container/none"}, []),
        ({}, []),
    ],
)
def test_jobs_with_a_tmp_of_their_own_are_named(settings, said):
    texts = [finding.text for finding in judge_job_files(settings)]
    assert len(texts) == len(said)
    assert all(words in text for words, text in zip(said, texts, strict=True))


RUN_PARTS = """\
num=$(squeue -h -u "$SLURM_JOB_USER" -w "$HOSTNAME" -t running | wc -l)
for script in {0}/epilog.d/*; do "$script"; done
"""
ON_ALL_GPUS = """\
for i in $(nvidia-smi pmon -c 1 | awk '{print $2}'); do
    kill -9 "$i"
done
"""


@pytest.mark.parametrize(
    ("flags", "prolog", "epilog", "said"),
    [
        ("Alloc,Contain", "nvidia-smi -c DEFAULT\nnvidia-smi -pm 1\n", "# pkill -u x\npkill -QUIT -x mps\n", []),
        ("Alloc,Contain,RunInJob", "", "", ["no SPANK prolog"]),
        ("(null)", "", 'pkill -KILL -u "$SLURM_JOB_USER"\n', ["kills a user's processes"]),
        ("(null)", "", "killall -9 --user $SLURM_JOB_USER\n", ["kills a user's processes"]),
        ("(null)", "", "kill -9 $(pgrep -u $SLURM_JOB_UID)\n", ["kills a user's processes"]),
        ("(null)", "", "loginctl terminate-user $SLURM_JOB_USER\n", ["kills a user's processes"]),
        ("(null)", "", "squeue -u x | grep -q . || pkill -u x\n", []),
        ("(null)", "", ON_ALL_GPUS, ["kills what uses GPUs"]),
        ("(null)", "", "nvidia-smi --query-compute-apps=pid --format=csv,noheader | xargs kill\n", ["kills what uses"]),
        ("(null)", "", "echo quit | nvidia-cuda-mps-control\n", ["kills what uses GPUs"]),
        ("(null)", "", "fuser -k /dev/nvidia[0-9]*\n", ["kills what uses GPUs"]),
        ("(null)", "", '[ -n "$SLURM_JOB_GPUS" ] || exit 0\n' + ON_ALL_GPUS, []),
        ("(null)", 'nvidia-smi -i "$g" -c EXCLUSIVE_PROCESS\n', "", ["lets one process use a GPU"]),
        ("(null)", "nvidia-smi --compute-mode=3\n", "", ["lets one process use a GPU"]),
    ],
)
def test_what_a_site_does_around_jobs_is_named_where_it_harms_partners(flags, prolog, epilog, said):
    found = [*judge_prologs({"PrologFlags": flags}, {Path("/p"): prolog}, {Path("/e"): epilog})]
    assert len(found) == len(said)
    assert all(words in finding.text and finding.remedy for finding, words in zip(found, said, strict=True))


@pytest.mark.parametrize(("key", "named"), [("Epilog", "{0}/epilog.sh"), ("Epilog[0]", "epilog.*h")])
def test_an_epilog_is_read_with_the_files_that_it_names(tmp_path, key, named):
    (tmp_path / "epilog.d").mkdir()
    (tmp_path / "epilog.sh").write_text(f"{tmp_path}/run-parts {tmp_path}/epilog.d /bin/sh {tmp_path}/nosuch\n")
    (tmp_path / "run-parts").write_text(RUN_PARTS.replace("{0}", str(tmp_path)))
    (tmp_path / "epilog.d/40-user").write_text("killall -9 -u $SLURM_JOB_USER\n")
    (tmp_path / "epilog.d/50-gpu").write_text(ON_ALL_GPUS)
    settings = {"SLURM_CONF": f"{tmp_path}/slurm.conf", key: named.format(tmp_path), "EpilogMsgTime": "2000 usec"}
    texts = site_scripts(settings, "Epilog")
    assert {path.name for path in texts} == {"epilog.sh", "run-parts", "40-user", "50-gpu"}
    (found,) = judge_prologs(settings, site_scripts(settings, "Prolog"), texts)
    assert "50-gpu kills what uses GPUs" in found.text


@pytest.mark.parametrize(
    ("change", "config", "level", "said"),
    [
        ({}, {}, Level.OK, "within seconds"),
        ({"is_watched": False}, {"events": {"enabled": False}}, Level.OK, "off: jobs wait for the timer, up to 360 s"),
        ({"is_watched": False}, {}, Level.WARNING, "jobs wait for the timer, up to 360 s"),
        ({"host": "other"}, {}, Level.WARNING, "slurmctld runs on head or spare and gives no notice here"),
        ({"hosts": {}}, {}, Level.WARNING, "slurmctld runs on another machine"),
        ({}, {"events": {"notice_file": "/"}}, Level.WARNING, "/ is not a file of user"),
        ({}, {"events": {"notice_file": "/nope"}}, Level.WARNING, "/nope is not a file of user"),
        ({"uid": 123456}, {}, Level.WARNING, "notice is not a file of user 123456"),
    ],
)
def test_what_is_left_to_the_timer_is_a_warning_with_a_remedy(tmp_path, change, config, level, said):
    path = tmp_path / "notice"
    path.touch()
    facts = {"is_watched": True, "host": "head", "hosts": HOSTS, "uid": os.geteuid(), **change}
    settings = {**facts["hosts"], "SlurmUser": f"slurm({facts['uid']})"}
    events = {"notice_file": path} | config.get("events", {})
    finding = judge_events(Config(events=events), settings, facts["host"], is_watched=facts["is_watched"])
    assert (finding.level, said in finding.text, bool(finding.remedy)) == (level, True, level is Level.WARNING)


MACHINES = (make_node("n1"), make_node("n2"), make_node("login", gpu_count=0))


class Commands:
    """One of Slurm's commands, with its answer."""

    def __init__(self, program: str, answer: str | Exception) -> None:
        self._program, self._answer = program, answer

    def run(self, action: str, arguments: Sequence[str]) -> str:
        assert arguments[0] == self._program
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def output(self, action: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
        assert "MURI_PILOT" in variables
        return self.run(action, arguments)


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        ("  --muri[=KEY=VALUE,...]  interleave", Level.OK),
        ("  --mem=MB", Level.PROBLEM),
        (GatewayError("plugstack.conf cannot be read"), Level.PROBLEM),
        (GatewayUnavailableError("no sbatch"), None),
    ],
)
def test_whether_sbatch_knows_the_option(answer, level) -> None:
    assert [finding.level for finding in examine_submission(Commands("sbatch", answer))] == ([level] if level else [])


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        (GatewayError("srun: error: lua: muri: the step asks for more GPUs than its job has, 1"), Level.OK),
        (GatewayError("Invalid job id specified"), Level.WARNING),
        (GatewayUnavailableError("no srun"), None),
    ],
)
def test_whether_srun_fits_members_steps(answer, level) -> None:
    findings = [*examine_steps(Commands("srun", answer))]
    assert [finding.level for finding in findings] == ([level] if level else [])
    assert [finding.lines for finding in findings if finding.remedy] == [(LOAD_FILTER,)] * (level is Level.WARNING)


def test_gpus_that_can_be_taken_away_in_some_form_are_enough() -> None:
    forms = (TriedForm("--gres=gpu:N", "gres/gpu:0"), TriedForm("--gpus=N", why="Slurm accepts it and keeps the GPU"))
    finding = judge_removal(forms, MACHINES)
    assert finding.level is Level.OK
    assert finding.text == "can be taken away where asked for by --gres=gpu:N; jobs with --gpus=N run alone"


def test_where_no_group_can_form_that_is_a_problem_and_what_to_do_is_said() -> None:
    finding = judge_removal(
        (TriedForm("--gpus=N", why="a"), TriedForm("--gres=gpu:N", why="the GPU is kept")), MACHINES
    )
    assert finding.level is Level.PROBLEM
    assert "no group can form" in finding.text
    assert "the GPU is kept" in finding.text
    assert finding.lines[0] == "GresTypes=gpu,muri"
    assert finding.lines[-1] == "NodeName=n[1-2] Name=muri Count=64 Flags=CountOnly"


NODES = [make_node("n1", partitions=("gpu",), gpu_type="a100"), make_node("n2", partitions=("cpu",), gpu_count=0)]


@pytest.fixture
def slurm(monkeypatch):
    fake = FakeSlurm([], NODES)
    monkeypatch.setattr(doctor_slurm, "open_gateway", lambda kind: fake)
    return fake


@pytest.mark.parametrize("layers", [1, 8])
@pytest.mark.parametrize("refused", ["", "Invalid generic resource (gres) specification"])
def test_the_doctor_tries_a_group_as_it_would_start(slurm, monkeypatch, layers, refused):
    asked: list[tuple[str, ...]] = []
    changes: list[JobChange] = []

    def submit(_commands: object, *options: str) -> int:
        asked.append(options)
        slurm.jobs[len(asked)] = make_job(len(asked), partition="gpu", mem_per_node_mib=2000)
        return len(asked)

    def modify(job_id: int, change: JobChange) -> None:
        changes.append(change)
        if refused:
            raise GatewayError(refused)
        FakeSlurm._modify(slurm, job_id, change)

    monkeypatch.setattr(doctor_slurm, "submit_probe", submit)
    monkeypatch.setattr(doctor_slurm, "cancelled_afterwards", lambda _, job_id: nullcontext(job_id))
    monkeypatch.setattr(slurm, "_modify", modify)
    slurm.limits = SiteLimits((PartitionLimits("gpu", oversubscribe=layers),))
    snapshot = slurm.snapshot()
    told = doctor_slurm._why_refused("gpu", NODES[0], snapshot, snapshot.gpu_removal, slurm, Commands("sbatch", ""))
    assert told == (f"Slurm refuses a member's changes: {refused}" if refused else "")
    sharing = ["--oversubscribe"] if layers > 1 else []
    assert asked[1] == ("--gres=gpu:1", "--partition=gpu", "--cpus-per-task=1", "--mem=512M", *sharing)
    assert (changes[0].cpu_count, changes[0].mem_per_node_mib, changes[0].oversubscribe) == (
        None,
        None,
        layers > 1 or None,
    )


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (Config(partitions=("gpu", "empty"), gpu_mem_gib={"a100": 80}), ()),
        (Config(partitions=("gpuu",)), ("partitions: Slurm has no partition gpuu; did you mean gpu? it has cpu, ",)),
        (Config(profiling=Profiling(partition="dry")), ("profiling.partition: Slurm has no partition dry; it has ",)),
        (Config(gpu_mem_gib={"a100": 80, "h100": 80}), ("gpu_mem_gib: Slurm has no type of GPUs h100; ",)),
        (Config(pilot=Pilot(qos="normal")), ()),
        (Config(pilot=Pilot(qos="nope")), ("pilot.qos: Slurm has no QOS nope; it has muri-",)),
    ],
)
def test_a_name_that_slurm_lacks_is_a_problem_with_those_that_it_has(slurm, config, wrong):
    taken = replace(slurm.snapshot(), limits=SiteLimits((PartitionLimits("empty"),)))
    found = names_in(config, taken, Commands("sacctmgr", "normal\nmuri-pilots\n"))
    assert len(found.wrong) == len(wrong)
    assert all(told.startswith(begin) for told, begin in zip(found.wrong, wrong, strict=True))


def test_without_slurmdbd_it_says_that_it_could_not_look(slurm):
    accounts = Commands("sacctmgr", GatewayUnavailableError("cannot read the QOS: no slurmdbd"))
    found = names_in(Config(pilot=Pilot(qos="nope")), slurm.snapshot(), accounts)
    assert found == ((), ("pilot.qos: cannot read the QOS: no slurmdbd",))


def test_a_python_that_is_not_there_is_a_problem(tmp_path):
    assert not [*wrong_python(Config(node_python=sys.executable))]
    (told,) = wrong_python(Config(node_python="/nope"))
    assert told.startswith("node_python: /nope is not a program on this machine")


def test_check_exits_with_2_where_slurm_answers(slurm, tmp_path, capsys):
    (tmp_path / "muri.yaml").write_text("partitions: [gpuu]\nnode_python: /nope\n")
    assert run_command(cli, ["config", "check", str(tmp_path / "muri.yaml")]) == 2
    told = capsys.readouterr().err
    assert "has 2 problem(s):\n  node_python: " in told
    assert "  partitions: " in told


def test_check_says_that_it_could_not_look_where_slurm_is_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "muri.yaml").write_text("partitions: [gpu]\n")
    assert run_command(cli, ["config", "check", str(tmp_path / "muri.yaml")]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path}/muri.yaml: fine\nnot checked here: whether Slurm has the partitions")
    assert "scontrol" in told


def test_the_doctor_counts_them_as_problems(slurm, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor_slurm, "open_gateway", lambda *_: slurm)
    monkeypatch.setenv("PATH", "/nowhere")
    config = tmp_path / "muri.yaml"
    config.write_text(f"partitions: [gpuu]\nnode_python: /nope\nstate_dir: {tmp_path}\n")
    assert run_command(cli, ["doctor", "--config", str(config)]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "muri.yaml's names" in line]
    assert [line.split()[0] for line in told] == ["PROBLEM", "PROBLEM"]
