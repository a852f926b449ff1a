"""Reports of jobs: the word muri-report in AdminComment, shares of GPU time, sums, and the text of `muri report`."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from muri.commands import run_command
from muri.errors import UsageError
from muri.slurm_plugin.cli.report import as_record, described, report
from muri.slurm_plugin.gateway import accounting
from muri.slurm_plugin.gateway.accounting import NoAccountingError, parse_runs
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import MemberReport
from muri.slurm_plugin.records.usage import (
    Payer,
    Run,
    SharingReport,
    alone_s,
    parse_report,
    split_gpu_time,
    table_of,
    uses_of,
    with_report,
)

FULL = SharingReport(
    pilot=7, gpu_count=2, gpu_s=81.5, alone_s=60.0, basis="iterations", iterations=600, partners=(2, 3),
    stage_s=(0.07, 0.01, 0.01, 0.01), wait_s=(0.0, 0.002, 0.0, 0.0),
)  # fmt: skip


@pytest.mark.parametrize("report", [FULL, SharingReport(7, 1, 12.5), SharingReport(7, 1, 0.0, 3.0, "plan", 0, (9,))])
def test_a_report_comes_back_as_it_was_written(report):
    assert parse_report(with_report("muri:model=m1 site:x", report)) == report


def test_a_report_replaces_what_an_ended_job_needs_no_more():
    state = tags.format_state(tags.MemberState(7, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))
    first = with_report(f"site:a muri:model=m1,batch-size=8 muri-state:{state}", FULL)
    assert first.startswith("site:a muri:model=m1,batch-size=8 muri-report:1,pilot=7,")
    assert not set("\"'`") & set(first)  # sacctmgr would change them
    assert with_report(first, FULL) == first


def test_a_long_list_of_partners_is_cut():
    report = parse_report(with_report("", SharingReport(7, 1, 1.0, partners=tuple(range(10, 40)))))
    assert report.partners == tuple(range(10, 18))


@pytest.mark.parametrize(
    "word",
    [
        "", "muri-report:", "muri-report:2,pilot=7,gpus=1,gpu_s=3", "muri-report:1,gpus=1,gpu_s=3",
        "muri-report:1,pilot=x,gpus=1,gpu_s=3", "muri-report:1,pilot=7,gpus=1,gpu_s=nan",
        "muri-report:1,pilot=7,gpus=1,gpu_s=3,held=1/2,wait=1/2", "muri-report:1,pilot=7,gpus=1,gpu_s=-3",
        "muri-report:1,pilot=7,gpus=1,gpu_s=3,by=iterations",
    ],
)  # fmt: skip
def test_a_damaged_report_is_none(word):
    assert parse_report(word) is None


@pytest.mark.parametrize(("iterations", "known"), [(110, (11.0, "iterations")), (770, (6.0, "plan"))])
def test_iterations_that_a_run_had_no_time_for_are_not_counted(iterations, known):
    measured = MemberReport(0.6, iterations=iterations)
    assert alone_s(10.0, 0.6, 0.1, measured) == known


def test_gpu_time_is_split_among_those_that_run():
    # Alone for 10 s, together for 20 s, then the other alone for 30 s.
    split = split_gpu_time(1, (0, 60), {1: (0, 30), 2: (10, 60)})
    assert split == {1: 20.0, 2: 40.0}


def test_idle_time_goes_to_who_comes_next_and_at_last_to_who_was_last():
    split = split_gpu_time(2, (0, 100), {1: (5, 10), 2: (20, 90)})
    assert split == {1: 2 * 10.0, 2: 2 * 90.0}


def test_a_member_that_never_ran_gets_nothing():
    assert split_gpu_time(1, (0, 10), {1: (0, 10), 2: (12, 15), 3: (4, 4)}) == {1: 10.0, 2: 0.0, 3: 0.0}
    assert split_gpu_time(1, (0, 10), {1: (12, 15)}) == {1: 0.0}


SPANS = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda each: (each[0], each[0] + each[1]))


@given(st.dictionaries(st.integers(1, 9), SPANS, min_size=1, max_size=5), st.integers(1, 8))
def test_no_gpu_second_is_lost_or_given_twice(spans, gpu_count):
    split = split_gpu_time(gpu_count, (0, 100), spans)
    assert sum(split.values()) == pytest.approx(100 * gpu_count)
    assert min(split.values()) > 0


BEGIN_S = 1_795_000_000
ALICE, BOB = Payer("alice", "hep", "normal"), Payer("bob", "astro", "short")
STATE = tags.format_state(tags.MemberState(50, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))


def run_of(job_id, start_s, end_s, *, gpus=0, comment="", payer=ALICE, state="COMPLETED") -> Run:
    start_s, end_s = BEGIN_S + start_s, BEGIN_S + end_s
    names = (payer.user, payer.account, payer.qos, state)
    return Run(job_id, *names, start_s - 90, start_s, end_s, end_s - start_s, gpus, comment)


STAGE_S = {"stage_s": (0.07, 0.01, 0.01, 0.01), "wait_s": (0.0, 0.0025, 0.0, 0.0)}
FIRST = SharingReport(50, 1, 1000.0, 1800.0, "iterations", 18_000, (42,), **STAGE_S)
PILOT = run_of(50, 0, 3600, gpus=1, comment="muri-pilot:abc:41,42")
MEMBERS = [
    run_of(41, 0, 2400, comment=with_report("muri:model=resnet18,batch-size=8", FIRST)),
    run_of(42, 0, 3600, comment=f"muri:model=bert muri-state:{STATE}", state="FAILED"),  # not reported yet
]
ALONE = run_of(43, 100, 460, gpus=4, payer=BOB)
DRY_RUN = run_of(44, 0, 60, gpus=1, comment="muri-dryrun:xyz")
NO_GPU = run_of(45, 0, 60)
WAITS = replace(run_of(46, 0, 0, gpus=2), state="PENDING", start_s=0, end_s=0)
RECORDS = [*MEMBERS, ALONE, DRY_RUN, NO_GPU, WAITS, PILOT]


def test_members_share_their_pilots_gpu_time():
    had = {use.run.job_id: (use.gpu_s, use.group_gpu_count, use.saved_gpu_s) for use in uses_of(RECORDS)}
    assert had == {41: (1200.0, 1, 600.0), 42: (2400.0, 1, None), 43: (1440.0, 4, None), 45: (0.0, 0, None)}


def test_without_the_pilots_record_the_report_tells_the_share():
    (use,) = uses_of(MEMBERS[:1])
    assert (use.gpu_s, use.saved_gpu_s) == (1000.0, 800.0)


def test_a_period_takes_what_ended_in_it():
    sums = table_of(RECORDS, (BEGIN_S + 460, BEGIN_S + 3600))
    assert {payer: (each.jobs, each.billed_gpu_s) for payer, each in sums.items()} == {
        ALICE: (1, 0.0),
        BOB: (1, 1440.0),
    }


def test_a_requeued_job_counts_once_with_the_gpu_time_of_all_its_runs():
    runs = [run_of(60, 0, 100, gpus=1, state="REQUEUED"), run_of(60, 200, 250, gpus=1, state="NODE_FAIL")]
    period = (BEGIN_S, BEGIN_S + 1000)
    sums = table_of([*runs, run_of(60, 300, 500, gpus=1)], period)[ALICE]
    assert (sums.jobs, sums.credited_gpu_s) == (1, 350.0)
    sums = table_of(runs[:1], period)[ALICE]  # it waits again
    assert (sums.jobs, sums.billed_gpu_s) == (0, 100.0)


def test_the_report_of_an_earlier_group_says_nothing_of_this_one():
    (use,) = uses_of([run_of(41, 0, 2400, comment=f"{with_report('', replace(FIRST, pilot=49))} muri-state:{STATE}")])
    assert (use.gpu_s, use.saved_gpu_s) == (0.0, None)


GOLDEN = """\
Job 41 (resnet18) of alice: COMPLETED; account hep, QOS normal.
It shared 1 GPU with job 42 (pilot job 50).

Waited               0:01:30   from its submission to its start
Ran                  0:40:00
Alone, predicted     0:30:00   18,000 iterations × 100.0 ms of its profile
Longer               0:10:00   1.33 times as long as predicted alone
GPU time             0:20:00   its share of the group's, 50% of its run
Saved                0:10:00   GPU time, against running alone

Milliseconds of an iteration in each stage, and waiting for its resource:
                   load   preprocess    propagate  synchronize
held               70.0         10.0         10.0         10.0
waiting             0.0          2.5          0.0          0.0
"""


def test_a_job_that_shared_without_a_time_alone_and_one_that_ran_alone_are_told_apart():
    texts = {use.run.job_id: described(use) for use in uses_of(RECORDS)}
    assert "No report on it was written yet: the saving or cost of sharing is not known." in texts[42]
    assert "It ran alone, on 4 GPUs." in texts[43]


def test_an_estimated_time_alone_is_marked_and_enters_no_sum():
    planned = with_report("muri:model=resnet18", replace(FIRST, basis="plan", alone_s=2400.0))
    records = [replace(MEMBERS[0], admin_comment=planned), *RECORDS[1:]]
    (use,) = (use for use in uses_of(records) if use.run.job_id == 41)
    text = "\n".join(described(use))
    assert "Alone, estimated    ~0:40:00   the time that it ran × its planned speed\n" in text
    assert "Its time alone is an estimate: the saving or cost of sharing is not known." in text
    assert not any(word in text for word in ("times as long", "Saved", "Cost"))
    sums = table_of(records, (BEGIN_S, BEGIN_S + 3601))[ALICE]
    assert (sums.grouped, sums.left_out, sums.alone_gpu_s, sums.saved_gpu_s) == (2, 2, 0.0, 0.0)


@pytest.mark.parametrize("reported", [True, False])
def test_a_job_alone_behind_its_pilot_or_there_before_the_others_shared_nothing(reported):
    alone = with_report("muri:model=bert", replace(FIRST, partners=())) if reported else f"muri-state:{STATE}"
    later = replace(MEMBERS[1], start_s=MEMBERS[0].end_s)
    records = [replace(MEMBERS[0], admin_comment=alone), later, PILOT]
    (use, _) = uses_of(records)
    assert (use.grouped, use.partners, use.saved_gpu_s) == (False, {}, None)
    text = "\n".join(described(use))
    assert "It ran alone, on 1 GPU that others could have joined (pilot job 50)." in text
    assert "0:40:00   all its own" in text
    assert not any(word in text for word in ("shared", "Saved", "Alone", "time alone", "not known"))
    sums = table_of(records, (BEGIN_S, BEGIN_S + 3601))[ALICE]
    assert (sums.jobs, sums.grouped, sums.left_out, sums.saved_gpu_s) == (2, 0, 0, 0.0)


def test_a_member_whose_group_runs_on_is_told_when_its_figures_follow():
    pilot = replace(PILOT, state="RUNNING", end_s=0, elapsed_s=2500)
    partner = replace(MEMBERS[0], state="RUNNING", end_s=0, admin_comment=f"muri-state:{STATE}")
    use = next(each for each in uses_of([partner, MEMBERS[1], pilot]))
    assert (use.partners, use.awaits_report) == ({41: "41"}, True)
    assert described(use, figures_within_min=16) == [
        "Job 42 (bert) of alice: FAILED; account hep, QOS normal.",
        "It shared 1 GPU with job 41 (pilot job 50).",
        "",
        "Waited               0:01:30   from its submission to its start",
        "Ran                  1:00:00",
        "",
        "Not known yet: GPU time, time alone, GPU time saved. Its group (pilot job 50)",
        "still runs; the figures follow within 16 minutes of the job's end.",
    ]
    record = as_record(use)
    assert (record["awaits_report"], record["gpu_s"], record["saved_gpu_s"]) == (True, None, None)
    (told,) = uses_of([partner, replace(MEMBERS[0]), pilot])
    assert (told.awaits_report, told.gpu_s) == (False, 1000.0)


def test_a_partner_that_has_left_the_group_is_known_from_the_report():
    (use,) = uses_of([MEMBERS[0], PILOT])
    assert (use.partners, use.saved_gpu_s) == ({42: "42"}, -1800.0)


def sacct_line(run: Run) -> str:
    tres = f"billing=4,cpu=4,gres/gpu={run.gpu_count},node=1" if run.gpu_count else "billing=1,cpu=1,node=1"
    fields = (run.job_id, run.shown_id, run.user, run.account, run.qos, run.state, run.submit_s,
              run.start_s or "Unknown", run.end_s or "Unknown", run.elapsed_s, tres, run.admin_comment)  # fmt: skip
    return "\x1f".join(map(str, fields))


def test_quotes_that_sacctmgr_changed_are_read_in_muris_words_alone():
    changed = replace(MEMBERS[1], admin_comment=f"site:`x` muri-state:{STATE}".replace('"', "`"))
    (run,) = parse_runs(sacct_line(changed))
    assert run.pilot == 50
    assert run.admin_comment.startswith("site:`x` ")


def test_a_line_break_in_a_comment_costs_the_comments_rest_alone():
    halves = sacct_line(replace(MEMBERS[0], admin_comment="an administrator's\nline break"))
    runs = parse_runs(f"{halves}\n{sacct_line(ALONE)}\n")
    assert [(run.job_id, run.admin_comment) for run in runs] == [(41, "an administrator's"), (43, "")]


@pytest.fixture
def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A sacct that knows RECORDS and writes down how it was called."""
    (tmp_path / "records").write_text("".join(sacct_line(run) + "\n" for run in RECORDS))
    (tmp_path / "bin").mkdir()
    code = (
        f"#!{sys.executable}\nimport json, sys\n"
        f"with open('{tmp_path}/calls', 'a') as log: log.write(json.dumps(sys.argv[1:]) + chr(10))\n"
        f"ids = [w.partition('=')[2].split(',') for w in sys.argv if w.startswith('--jobs=')]\n"
        f"for line in open('{tmp_path}/records'):\n"
        "    if not ids or line.partition(chr(31))[0] in ids[0]: print(line, end='')\n"
    )
    (tmp_path / "bin/sacct").write_text(code)
    (tmp_path / "bin/sacct").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.MonkeyPatch.context() as zone:
        zone.setenv("TZ", "UTC")
        time.tzset()
        yield lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    time.tzset()


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_report_finds_the_pilot_and_the_partners(sacct):
    assert printed("41") == GOLDEN
    assert [call[-1] for call in sacct()] == ["--jobs=41", "--jobs=50", "--jobs=42"]


MONTH = """\
USER   ACCOUNT  QOS     JOBS  GROUPED  BILLED   HAD  ALONE  SAVED
alice  hep      normal     2        2    1.02  1.00   0.50   0.17
bob    astro    short      1        0    0.40  0.40      -      -
total                      3        2    1.42  1.40   0.50   0.17
jobs that ended from 2026-11-01 to before 2026-12-01 00:00; GPU hours
ALONE and SAVED leave out 1 of 2 grouped jobs: no time alone was counted
"""


def test_a_month_as_a_table_of_80_columns(sacct):
    text = printed("--month", "2026-11")
    assert "\n".join(line.rstrip() for line in text.splitlines()) + "\n" == MONTH
    assert {"--starttime=2026-11-01T00:00:00", "--endtime=2026-12-01T00:00:00"} <= set(sacct()[0])


def test_a_month_ends_where_the_next_begins(sacct):
    printed("--month", "2026-12")
    assert {"--starttime=2026-12-01T00:00:00", "--endtime=2027-01-01T00:00:00"} <= set(sacct()[0])


JOBS = """\
 JOB  USER   MODEL     STATE          RAN    ALONE  GPU TIME    SAVED  WITH
37_0  alice  resnet18  COMPLETED  0:40:00  0:30:00   0:20:00  0:10:00  42
  42  alice  bert      FAILED     1:00:00        -   0:40:00        -  37_0
  43  bob    -         COMPLETED  0:06:00        -   0:24:00        -  -
jobs that ended from 2026-11-01 to before 2026-12-01 00:00
"""


def test_a_line_for_each_job_names_tasks_as_slurm_does_and_models_where_there_is_room(sacct, tmp_path, monkeypatch):
    records = [replace(MEMBERS[0], task="37_0"), *RECORDS[1:]]
    (tmp_path / "records").write_text("".join(sacct_line(run) + "\n" for run in records))
    shown = printed("--month", "2026-11", "--jobs")
    assert "\n".join(line.rstrip() for line in shown.splitlines()) + "\n" == JOBS
    assert printed("41").startswith("Job 37_0 (resnet18) of alice: ")
    assert "It shared 1 GPU with job 37_0 (pilot job 50)." in printed("42")
    assert json.loads(printed("41", "--json"))[0]["task"] == "37_0"
    monkeypatch.setenv("COLUMNS", "70")
    assert printed("--month", "2026-11", "--jobs").split("\n")[0].split()[:3] == ["JOB", "USER", "STATE"]


def test_runs_of_one_job_are_counted_and_those_of_other_tasks_are_not(sacct, tmp_path):
    again = replace(ALONE, state="REQUEUED", task="37_1")
    records = [again, replace(ALONE, task="37_1"), replace(ALONE, job_id=44, task="37_2")]
    (tmp_path / "records").write_text("".join(sacct_line(run) + "\n" for run in records))
    (tmp_path / "bin/sacct").write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/records\n")
    heads = [line for line in printed("37").splitlines() if line.startswith(("Run", "Job"))]
    assert [head.split(" of bob")[0] for head in heads] == [
        "Run 1 of 2:", "Job 37_1", "Run 2 of 2:", "Job 37_1", "Job 37_2"
    ]  # fmt: skip


def test_where_no_job_ended_that_is_said(sacct):
    ended = "that had GPUs ended from 2025-11-01 to before 2025-12-01 00:00.\n"
    assert printed("--month", "2025-11", "--user", "bob") == f"No job of bob {ended}"
    assert printed("--month", "2025-11", "--json") == "[]\n"


def test_a_script_that_does_not_call_muri_run_is_named():
    (use,) = uses_of([replace(ALONE, admin_comment="muri:model=m muri-calls:no")])
    assert described(use)[1] == "It ran alone, on 4 GPUs: its batch script does not call `muri run` itself."


def test_a_month_for_programs(sacct):
    records = json.loads(printed("--month", "2026-11", "--json"))
    assert records[0] == {
        "user": "alice", "account": "hep", "qos": "normal", "jobs": 2, "grouped": 2, "left_out": 1,
        "billed_gpu_s": 3660.0, "credited_gpu_s": 3600.0, "alone_gpu_s": 1800.0, "saved_gpu_s": 600.0,
    }  # fmt: skip
    rows = json.loads(printed("--month", "2026-11", "--jobs", "--json"))
    assert [(row["job_id"], row["gpu_s"], row["saved_gpu_s"]) for row in rows] == [
        (41, 1200.0, 600.0), (42, 2400.0, None), (43, 1440.0, None),
    ]  # fmt: skip


def test_who_is_asked_for_reaches_sacct(sacct, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    printed("--user", "bob")
    printed()
    monkeypatch.setattr("os.geteuid", lambda: 1001)
    printed()
    assert [call[-1] for call in sacct()[:2]] == ["--user=bob", "--allusers"]
    assert not {"--allusers", "--user"} & {word.partition("=")[0] for word in sacct()[2]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--month", "2026-13"], "is not a month: write it as 2026-11"),
        (["46"], "job 46 has not run to an end yet (PENDING)"),
        (["50"], "job 50 is one of Muri's own; it held GPUs for 41 and 42: ask for one of them"),
        (["99"], "the accounts have no job 99"),
    ],
)  # fmt: skip
def test_mistakes_are_named(sacct, arguments, message):
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert message in str(caught.value)


@pytest.mark.parametrize("words", ["Slurm accounting storage is disabled", "", None])
def test_where_slurm_keeps_no_accounts_that_is_said(tmp_path, monkeypatch, capsys, words):
    if words is not None:
        (tmp_path / "sacct").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_command(report, ["41"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("muri: cannot read the accounts: ")
    assert ("AccountingStorageType" in said) == bool(words)
    assert "Traceback" not in said


def test_sacctmgr_is_called_once_and_its_words_are_understood(tmp_path, monkeypatch):
    log = tmp_path / "log"
    program = tmp_path / "sacctmgr"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def answers(words: str, code: int) -> None:
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{log}\necho "{words}" >&2\nexit {code}\n')
        program.chmod(0o755)

    answers("", 0)
    accounting.Accounting().set_admin_comment(7, "site:a b muri-report:1,pilot=5")
    assert log.read_text().splitlines() == [
        "--immediate", "modify", "job", "where", "jobid=7", "set", "AdminComment=site:a b muri-report:1,pilot=5",
    ]  # fmt: skip
    answers("sacctmgr: error: Request didn't affect anything", 1)
    with pytest.raises(accounting.NoSuchJobError):
        accounting.Accounting().set_admin_comment(7, "")
    answers("You are not running a supported accounting_storage plugin", 1)
    with pytest.raises(NoAccountingError):
        accounting.Accounting().set_admin_comment(7, "")
