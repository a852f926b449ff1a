"""Importers of clusters' logs, on small files in the published formats (the rows are made up)."""

import json
from pathlib import Path
from typing import Any

import pytest

from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.model import TraceJob
from muri.simulator.traces.formats import assignment_of
from muri.simulator.traces.log_formats import SACCT_COLUMNS, elements
from muri.simulator.traces.models import measured_models
from muri.simulator.traces.read import read_trace, read_with_notes
from muri.simulator.traces.rows import TraceError

HELIOS_HEADER = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"


def helios_row(job_id: int, gpus: int, submit: str, run_s: int, state: str = "COMPLETED") -> str:
    return f"{job_id},uAbc,vcX,{gpus},{4 * gpus},1,{state},{submit},{submit},{submit},{run_s},0\n"


def attempt(start: str | None, end: str | None, gpus: int) -> dict[str, Any]:
    detail = [{"ip": "m1", "gpus": [f"gpu{number}" for number in range(gpus)]}] if gpus else []
    return {"start_time": start, "end_time": end, "detail": detail}


def philly_job(number: int, submitted: str, *attempts: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": f"application_1506638472019_{number}",
        "attempts": list(attempts),
        "submitted_time": submitted,
        "user": "ce2f4c",
    }


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def ran(job: TraceJob) -> float | None:
    """The listed duration, after a check that the iterations amount to it."""
    assert job.listed_duration_s is not None
    assert abs(job.service_s - job.listed_duration_s) <= max(job.profile.iteration_s, job.listed_duration_s * 1e-9)
    return job.listed_duration_s


def test_philly_sums_a_jobs_attempts_and_takes_its_largest_gpu_count(tmp_path: Path) -> None:
    log = [
        philly_job(
            2,
            "2017-10-07 02:00:00",
            attempt("2017-10-07 02:10:00", "2017-10-07 02:20:00", 4),
            attempt(None, "2017-10-07 02:25:00", 4),
            attempt("2017-10-07 03:00:00", "2017-10-07 04:00:00", 8),
        ),
        philly_job(1, "2017-10-07 01:30:00", attempt("2017-10-07 01:31:00", "2017-10-07 01:41:00", 1)),
    ]
    reading = read_with_notes(write(tmp_path, "cluster_job_log", json.dumps(log, indent=4)))
    assert reading.format == "philly"
    early, late = reading.trace.jobs
    assert (early.job_id, early.submit_s, early.gpu_count, ran(early)) == (0, 0.0, 1, 600.0)
    assert (late.job_id, late.submit_s, late.gpu_count, ran(late)) == (1, 1800.0, 8, 600.0 + 3600.0)
    assert late.user == "ce2f4c"


def test_philly_leaves_out_what_never_ran_has_no_gpus_or_had_not_ended(tmp_path: Path) -> None:
    day = "2017-10-07"
    log = [
        philly_job(1, f"{day} 01:00:00"),
        philly_job(2, f"{day} 01:00:00", attempt(f"{day} 01:00:00", f"{day} 02:00:00", 0)),
        philly_job(3, f"{day} 01:00:00", attempt(f"{day} 01:00:00", "None", 1)),
        philly_job(4, f"{day} 01:00:00", attempt(f"{day} 01:00:00", f"{day} 02:00:00", 1)),
    ]
    reading = read_with_notes(write(tmp_path, "log.json", json.dumps(log)))
    assert len(reading.trace.jobs) == 1
    assert reading.left_out == {"never ran": 1, "had no GPUs": 1, "had not ended": 1}
    assert reading.trace.skipped_rows == 0


def test_philly_names_the_line_and_key_of_a_bad_job(tmp_path: Path) -> None:
    day = "2017-10-07"
    good = philly_job(1, f"{day} 01:00:00", attempt(f"{day} 01:00:00", f"{day} 02:00:00", 1))
    backwards = philly_job(2, f"{day} 01:00:00", attempt(f"{day} 03:00:00", f"{day} 02:00:00", 1))
    nameless = {key: value for key, value in good.items() if key != "jobid"}
    path = write(tmp_path, "log.json", "[" + ",\n".join(map(json.dumps, [good, backwards, nameless, good, 5])) + "]")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert "4 bad rows of 5" in text
    assert f"{path}:2: column end_time: 2017-10-07 02:00:00 is before the attempt's start" in text
    assert f"{path}:3: column jobid: is missing" in text
    assert f"{path}:4: column job_id: application_1506638472019_1 is also the id of the job in line 1" in text
    assert f"{path}:5: a job in {{ … }} is expected" in text


def test_the_elements_of_a_json_array_come_with_their_lines() -> None:
    values = [{"a": [1, 2.5, "x,]\n"]}, [], "]", 17, None, {"b": {"c": "\\"}}]
    text = " \n" + json.dumps(values, indent=1) + "\n"
    found = list(elements("t", text))
    assert [value for _, value in found] == values
    lines = text.splitlines()
    assert all(lines[line - 1].lstrip()[0] in '{["1n' for line, _ in found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}', "t:1: not valid JSON: a list of jobs"),
        ('[{"a": 1},\n{"a": }]', "t:2: not valid JSON: Expecting value"),
        ('[{"a": 1}\n{"b": 2}]', "t:2: not valid JSON: '{' where , or ] belongs"),
        ('[{"a": 1},', "t:1: not valid JSON: Expecting value"),
        ('[{"a": 1}', "t:1: not valid JSON: the list ends too early"),
        ("[1,\n" + "[" * 100_000, "t:2: not valid JSON: this is not a job"),
        ("[" + "9" * 5000 + "]", "t:1: not valid JSON: this is not a job"),
    ],
)
def test_broken_json_is_an_error_with_its_line(text: str, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(elements("t", text))
    assert said in str(caught.value)


def test_helios_keeps_slurms_ids_and_cpus(tmp_path: Path) -> None:
    text = (
        HELIOS_HEADER
        + helios_row(1425512, 4, "2020-06-09 18:41:27", 249, "FAILED")
        + helios_row(1425511, 1, "2020-06-09 18:41:01", 36848)
        + helios_row(1425513, 0, "2020-06-09 18:41:28", 60)
        + helios_row(1425514, 2, "2020-06-09 18:41:28", 0, "CANCELLED")
        + "1425515,uAbc,vcX,2,8,1,CANCELLED,2020-06-09 18:41:28,,,,0\n"
    )
    reading = read_with_notes(write(tmp_path, "cluster_log.csv", text))
    assert reading.format == "helios"
    assert [(job.job_id, job.submit_s, job.gpu_count, job.cpu_count) for job in reading.trace.jobs] == [
        (1425511, 0.0, 1, 4.0),
        (1425512, 26.0, 4, 16.0),
    ]
    assert [ran(job) for job in reading.trace.jobs] == [36848.0, 249.0]
    assert reading.left_out == {"had no GPUs": 1, "never ran": 2}


def pai_tables(tmp_path: Path, tasks: str, jobs: str) -> Path:
    write(tmp_path, "pai_job_table.csv", jobs)
    return write(tmp_path, "pai_task_table.csv", tasks)


PAI_JOBS = (
    "jobA,inst1,alice,Terminated,100.0,900.0\n"
    "jobB,inst2,bob,Failed,50.0,400.0\n"
    "jobC,inst3,bob,Running,60.0,\n"
    "jobD,inst4,bob,Terminated,70.0,80.0\n"
)
PAI_TASKS = (
    "jobA,ps,1.0,Terminated,150.0,900.0,600.0,29.296875,,\n"
    "jobA,worker,3.0,Terminated,200.0,800.0,400.0,10.0,50.0,V100\n"
    "jobA,evaluator,1.0,Terminated,180.0,700.0,400.0,10.0,25.0,V100\n"
    "jobB,tensorflow,1.0,Failed,60.0,400.0,600.0,29.296875,100.0,MISC\n"
    "jobC,tensorflow,1.0,Running,60.0,,600.0,29.296875,100.0,MISC\n"
    "jobD,worker,2.0,Terminated,70.0,80.0,600.0,29.296875,,MISC\n"
)


def test_pai_joins_a_jobs_tasks_with_its_submission(tmp_path: Path) -> None:
    path = pai_tables(tmp_path, PAI_TASKS, PAI_JOBS)
    reading = read_with_notes(tmp_path)
    assert reading.format == "pai"
    first, second = reading.trace.jobs
    assert (first.user, first.submit_s, first.gpu_count, ran(first)) == ("bob", 0.0, 1, 340.0)
    # 3 × 50 % and 25 % of a GPU are two whole ones; the parameter server has no GPU and no say in the times
    assert (second.user, second.submit_s, second.gpu_count, ran(second)) == ("alice", 50.0, 2, 800.0 - 180.0)
    assert second.cpu_count == 6 + 3 * 4 + 4
    assert second.mem_gib == pytest.approx(29.296875 + 40)
    assert reading.left_out == {"had not ended": 1, "had no GPUs": 1}
    assert read_trace(path).jobs == reading.trace.jobs


def test_pai_without_its_job_table_says_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, "pai_task_table.csv", PAI_TASKS)
    with pytest.raises(TraceError, match=r"pai_job_table\.csv must lie beside it"):
        read_trace(path)


def test_pai_drops_a_job_whose_task_is_bad_whole(tmp_path: Path) -> None:
    broken = PAI_TASKS.replace("jobA,worker,3.0", "jobA,worker,some")
    path = pai_tables(tmp_path, broken, PAI_JOBS.replace("jobB", "jobX"))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "2 bad rows of 2" in str(caught.value)
    assert f"{path}:2: column inst_num: 'some' is not a number" in str(caught.value)
    assert f"{path}:4: column job_name: jobB is not in pai_job_table.csv" in str(caught.value)


def sacct_output(*rows: str) -> str:
    return "|".join(SACCT_COLUMNS) + "\n" + "".join(f"{row}\n" for row in rows)


def test_sacct_output_becomes_a_trace(tmp_path: Path) -> None:
    tres = "billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G,node=1"
    text = sacct_output(
        f"101|anna|COMPLETED|1761998400|7200|{tres}|{tres}|train resnet",
        '102|ben|CANCELLED by 1000|1761998460|60|cpu=1,gres/gpu:h100=4,mem=512M,node=1||odd|name "quoted',
        f"103|ben|RUNNING|1761998460|60|{tres}|{tres}|x",
        f"104|ben|PENDING|1761998460|0|{tres}||x",
        "105|ben|COMPLETED|1761998460|60|cpu=1,mem=1G,node=1|cpu=1,mem=1G,node=1|x",
        f"106|ben|FAILED|1761998460|0|{tres}|{tres}|x",
        f"101.batch||COMPLETED|1761998400|7200||{tres}|batch",
    )
    reading = read_with_notes(write(tmp_path, "last-month.txt", text))
    assert reading.format == "sacct"
    first, second = reading.trace.jobs
    assert (first.job_id, first.user, first.submit_s, first.gpu_count) == (101, "anna", 0.0, 2)
    assert (first.cpu_count, first.mem_gib, ran(first)) == (8.0, 64.0, 7200.0)
    assert (second.job_id, second.submit_s, second.gpu_count, second.mem_gib) == (102, 60.0, 4, 0.5)
    assert reading.left_out == {"had not ended": 2, "had no GPUs": 1, "never ran": 1, "are steps, not jobs": 1}


def test_the_output_of_a_real_sacct_is_read() -> None:
    """What the documented command printed on Slurm 26.05 with slurmdbd: an array, a pipe in a name, jobs under way."""
    reading = read_with_notes(Path(__file__).parent / "fixtures" / "sacct-26.05.txt")
    jobs = reading.trace.jobs
    assert [(job.job_id, job.gpu_count, job.cpu_count, ran(job)) for job in jobs] == [
        (1, 1, 2.0, 2.0),
        (2, 2, 1.0, 2.0),
        (3, 1, 1.0, 1.0),
        (6, 1, 1.0, 1.0),
    ]
    assert jobs[0].mem_gib == 200 / 1024
    assert jobs[2].key == jobs[3].key  # two tasks of one array train the same model
    assert reading.left_out == {"had no GPUs": 1, "had not ended": 2}


SYNERGY_HEADER = "job_id,model,arrival_s,iterations,num_gpu\n"
BEGAN = "1,uAbc,vcX,2,8,1,RUNNING,2020-06-09 18:41:28,2020-06-09 18:41:29,,,0\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HELIOS_HEADER + helios_row(1, 1, "yesterday", 5), "column submit_time: 'yesterday' is not a time such as"),
        (HELIOS_HEADER + BEGAN, "column duration: is empty; give a number"),
        (SYNERGY_HEADER + "0,resnet,409,3447,1\n", "column model: 'resnet' is not one of Synergy's models: alexnet, "),
        *(
            (sacct_output(row), said)
            for row, said in [
                ("1_4|a|COMPLETED|5|9|gres/gpu=1|gres/gpu=1|x", "column JobIDRaw: '1_4' is not a number"),
                ("1|a|COMPLETED|²|9|gres/gpu=1|gres/gpu=1|x", "column Submit: '²' is not a time"),
                ("1|a|COMPLETED|Unknown|9|gres/gpu=1|gres/gpu=1|x", "column Submit: is empty"),
                ("1|a|COMPLETED|5|00:09|gres/gpu=1|gres/gpu=1|x", "column ElapsedRaw: '00:09' is not a number"),
                ("1|a|COMPLETED|5|9||gres/gpu|x", "column AllocTRES: 'gres/gpu' is not of the form"),
                ("1|a|COMPLETED|5|9||gres/gpu=1,mem=6X|x", "column AllocTRES: memory '6X' is not of the form 16G"),
            ]
        ),
    ],
)
def test_a_bad_row_of_a_log_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, "log.csv", text))
    assert f"log.csv:2: {said}" in str(caught.value)


def test_synergy_takes_stages_from_its_models(tmp_path: Path) -> None:
    path = write(tmp_path, "s.csv", SYNERGY_HEADER + "0,alexnet,409,3447,1\n1,gnmt,951,5,1\n")
    image, text = read_trace(path).jobs
    assert (image.submit_s, image.service_s, image.profile.bottleneck) == (409.0, pytest.approx(3447 * 0.6), "cpu")
    assert text.profile.bottleneck == "gpu"


def test_a_logs_jobs_get_all_models_about_equally_often_and_reruns_the_same() -> None:
    first, second = assignment_of(None, 0), assignment_of(None, 1)
    drawn = [first.profile(f"job{number}", 1).key.model for number in range(4000)]
    expected = len(drawn) / len(measured_models())
    assert {model.name for model in measured_models()} == set(drawn)
    assert all(abs(drawn.count(name) - expected) < 5 * expected**0.5 for name in set(drawn))
    assert drawn == [assignment_of(None, 0).profile(f"job{number}", 1).key.model for number in range(4000)]
    assert drawn != [second.profile(f"job{number}", 1).key.model for number in range(4000)]


def own_profile(model: str, gpu_count: int, iteration_s: float) -> StageProfile:
    return StageProfile(ProfileKey(model, 32, gpu_count, "a100"), 0.1, 0.2, 0.3, 0.4, iteration_s, gpu_mem_gib=7.0)


def test_a_site_assigns_its_own_profiles_and_a_jobs_name_may_be_its_model(tmp_path: Path) -> None:
    own = [own_profile("unet", 1, 1.0), own_profile("unet", 8, 2.0), own_profile("bert", 4, 4.0)]
    tres = "cpu=8,gres/gpu={},mem=64G,node=1"
    names = ["unet", "bert", "other", "unet"]
    gpu_counts = [1, 2, 1, 16]
    rows = [
        f"{number}|a|COMPLETED|{number}|800||{tres.format(gpu_count)}|{name}"
        for number, (name, gpu_count) in enumerate(zip(names, gpu_counts, strict=True))
    ]
    jobs = read_with_notes(write(tmp_path, "s.txt", sacct_output(*rows)), profiles=own).trace.jobs
    assert [jobs[0].key.model, jobs[1].key.model, jobs[3].key.model] == ["unet", "bert", "unet"]
    # bert was measured with four GPUs only; unet with eight at most
    assert [(job.key.gpu_count, job.iterations) for job in jobs if job.job_id != 2] == [(1, 800), (2, 200), (16, 400)]
    assert jobs[2].key.model in {"unet", "bert"}
    assert {(job.key.gpu_type, job.key.batch_size, job.profile.gpu_mem_gib) for job in jobs} == {("a100", 32, 7.0)}
