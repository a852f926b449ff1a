"""Reading and writing traces: both CSV schemas, what is refused and how."""

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muri.policies.traits import BatchModel
from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.model import Trace, TraceJob
from muri.simulator.traces.models import load_share, split_exactly
from muri.simulator.traces.read import FORMATS, read_trace
from muri.simulator.traces.rows import TraceError
from muri.simulator.traces.schema import BATCH, REQUIRED, write_trace

SHARED_TRACES = Path(__file__).parents[4] / "shared" / "traces"

PAPER_HEADER = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,"
    "iteration_time,resource_time_0,resource_time_1,resource_time_2,priority\n"
)
MURI_HEADER = "job_id,submit_s,gpu_count,iterations,model,iteration_s,load_s,preprocess_s,propagate_s,synchronize_s\n"
GOOD_ROW = "1,0,2,100,gpt2,0.5,0.1,0.1,0.2,0.1\n"

Writer = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Writer:
    def write(text: str) -> Path:
        path = tmp_path / "t.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def shared(name: str) -> Path:
    path = SHARED_TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not there: this repository does not contain the published traces")
    return path


@pytest.mark.parametrize(("name", "jobs"), [("muri_trace1", 1494), ("muri_trace3", 992)])
def test_the_papers_traces_are_read_whole(name: str, jobs: int) -> None:
    trace = read_trace(shared(f"{name}.csv"))
    assert (trace.name, len(trace.jobs), trace.skipped_rows) == (name, jobs, 0)
    assert trace.jobs[0].submit_s == 0
    assert [job.submit_s for job in trace.jobs] == sorted(job.submit_s for job in trace.jobs)


def test_synergys_workload_is_read_whole() -> None:
    trace = read_trace(shared("synergy_single_gpu_load9.csv"))
    assert len(trace.jobs) == 25_000
    # nine jobs an hour is what the workload was made for
    assert 25_000 / (trace.jobs[-1].submit_s / 3600) == pytest.approx(9, rel=0.03)


def test_a_row_of_the_papers_format(written: Writer) -> None:
    path = written(PAPER_HEADER + "7,4,2500,1000,vgg19,16,90000,0,212,84,85,73,1\n")
    (job,) = read_trace(path).jobs
    assert (job.job_id, job.submit_s, job.gpu_count, job.iterations) == (7, 2.5, 4, 1000)
    assert job.key == ProfileKey("vgg19", 16, 4, "gpu")
    assert (job.profile.iteration_s, job.profile.propagate_s, job.profile.synchronize_s) == (0.212, 0.085, 0.073)
    assert job.profile.load_s == pytest.approx(0.084 * 24 / 28)
    assert job.profile.load_s + job.profile.preprocess_s == 0.084
    assert (job.opportunistic, job.listed_duration_s) == (True, 90.0)
    assert job.service_s == pytest.approx(212.0)


@given(total=st.floats(0, 1e6), share=st.floats(0, 1))
def test_a_split_keeps_the_sum_to_the_last_bit(total: float, share: float) -> None:
    first, second = split_exactly(total, share)
    assert first + second == total
    assert min(first, second) >= 0
    assert first == pytest.approx(total * share, abs=1e-9 * total + 1e-300)


@pytest.mark.parametrize(
    ("model", "like"), [("resnet18", "shufflenet_v2_x1_0"), ("bert", "gpt2"), ("GPT-2", "gpt2"), ("dqn", "a2c")]
)
def test_models_without_shares_split_like_the_nearest_kind(model: str, like: str) -> None:
    assert load_share(model) == load_share(like)


counts = st.integers(1, 2**53)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
times = st.floats(0, 86400)


@st.composite
def trace_jobs(draw: st.DrawFn) -> TraceJob:
    gpu_count = draw(st.integers(1, 4096))
    profile = StageProfile(
        ProfileKey(draw(texts), draw(st.integers(0, 4096)), gpu_count, draw(st.sampled_from(["gpu", "a100"]))),
        *draw(st.tuples(times, times, times, times)),
        iteration_s=draw(st.floats(1e-6, 86400)),
        gpu_mem_gib=draw(st.floats(0, 1024)),
        source="import",
    )
    return TraceJob(
        job_id=draw(st.integers(0, 2**53)),
        submit_s=draw(times),
        gpu_count=gpu_count,
        iterations=draw(counts),
        profile=profile,
        user=draw(texts),
        opportunistic=draw(st.booleans()),
        listed_duration_s=draw(st.none() | times),
        cpu_count=draw(st.none() | times),
        mem_gib=draw(st.none() | times),
        restart_s=draw(st.none() | times),
        batch=draw(st.none() | batch_models(profile.key.batch_size)) if profile.key.batch_size else None,
        gpu_utilization=draw(st.none() | st.floats(0, 1)),
    )


def batch_models(batch_size: int) -> st.SearchStrategy[BatchModel]:
    return st.builds(
        BatchModel,
        batch_size=st.just(batch_size),
        compute_fixed_s=times,
        compute_per_sample_s=times,
        communicate_s=times,
        overlap_exponent=st.floats(1, 100) | st.just(math.inf),
        fixed_mem_gib=times,
        mem_gib_per_sample=times,
        max_accumulate_steps=st.integers(1, 64),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(trace_jobs(), min_size=1, max_size=6, unique_by=lambda job: job.job_id))
def test_what_is_written_reads_back_the_same(jobs: list[TraceJob]) -> None:
    trace = Trace("t", tuple(sorted(jobs, key=lambda job: (job.submit_s, job.job_id))))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_trace(trace, path)
        assert read_trace(path) == trace


OPTIONAL = (
    "user", "batch_size", "gpu_mem_gib", "opportunistic", "listed_duration_s", "cpu_count", "mem_gib", "restart_s",
    "gpu_type", "gpu_utilization", *BATCH,
)  # fmt: skip


def test_optional_columns_may_be_missing_or_empty(written: Writer) -> None:
    (bare,) = read_trace(written(MURI_HEADER + GOOD_ROW)).jobs
    assert (bare.user, bare.opportunistic, bare.listed_duration_s, bare.cpu_count) == ("user", False, None, None)
    empty = MURI_HEADER.strip() + "," + ",".join(OPTIONAL) + "\n" + GOOD_ROW.strip() + "," * len(OPTIONAL) + "\n"
    assert read_trace(written(empty)).jobs == (bare,)


def test_a_spreadsheets_byte_order_mark_and_blank_lines_do_no_harm(written: Writer) -> None:
    assert len(read_trace(written("\ufeff" + MURI_HEADER + "\n" + GOOD_ROW + "\n\n")).jobs) == 1


@pytest.mark.parametrize(
    ("row", "column", "said"),
    [
        ("1,-3,2,100,gpt2,0.5,0.1,0.1,0.2,0.1", "submit_s", "-3 must be at least 0"),
        ("1,0,2,100,gpt2,0.5,0.1,nan,0.2,0.1", "preprocess_s", "nan is not a finite number"),
        ("1,0,2,100,gpt2,0.5,0.1,0.1,inf,0.1", "propagate_s", "inf is not a finite number"),
        ("1,0,0,100,gpt2,0.5,0.1,0.1,0.2,0.1", "gpu_count", "0 must be at least 1"),
        ("1,0,1.5,100,gpt2,0.5,0.1,0.1,0.2,0.1", "gpu_count", "1.5 is not a whole number"),
        ("1,0,2,many,gpt2,0.5,0.1,0.1,0.2,0.1", "iterations", "'many' is not a number"),
        ("1,0,2,100,gpt2,0,0.1,0.1,0.2,0.1", "iteration_s", "0 must be more than 0"),
        ("1,0,2,100,,0.5,0.1,0.1,0.2,0.1", "model", "is empty"),
        (",0,2,100,gpt2,0.5,0.1,0.1,0.2,0.1", "job_id", "is empty"),
        ("1,1e16,2,100,gpt2,0.5,0.1,0.1,0.2,0.1", "submit_s", "1e16 must be at most 1e+15"),
        ("1,0,1_0,100,gpt2,0.5,0.1,0.1,0.2,0.1", "gpu_count", "'1_0' is not a number"),
        ("1e99,0,2,100,gpt2,0.5,0.1,0.1,0.2,0.1", "job_id", "must be at most"),
    ],
)
def test_a_bad_cell_is_named_with_file_line_and_column(written: Writer, row: str, column: str, said: str) -> None:
    path = written(MURI_HEADER + GOOD_ROW.replace("1,", "9,", 1) + row + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}:3: column {column}: " in str(caught.value)
    assert said in str(caught.value)
    assert "--skip-bad-rows" in str(caught.value)
    assert read_trace(path, skip_bad_rows=True).skipped_rows == 1


def test_bad_rows_are_counted_and_the_first_five_shown(written: Writer) -> None:
    bad = "".join(f"{number},0,0,100,gpt2,0.5,0.1,0.1,0.2,0.1\n" for number in range(10, 17))
    path = written(MURI_HEADER + GOOD_ROW + bad)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert "7 bad rows of 8" in text
    assert [f":{line}: column gpu_count" in text for line in range(3, 10)] == [True] * 5 + [False] * 2
    assert "… and 2 more" in text
    skipped = read_trace(path, skip_bad_rows=True)
    assert (len(skipped.jobs), skipped.skipped_rows) == (1, 7)


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_missing_column_is_named_with_the_nearest(written: Writer, missing: str) -> None:
    typo = missing[:-1] + "x"
    with pytest.raises(TraceError) as caught:
        read_trace(written(MURI_HEADER.replace(missing, typo, 1) + GOOD_ROW), "muri")
    assert f"missing column {missing} (is it {typo}?)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (MURI_HEADER + GOOD_ROW + GOOD_ROW, None, "t.csv:3: column job_id: 1 is also the id of the job in line 2"),
        (MURI_HEADER + GOOD_ROW + "2,0\n", None, "t.csv:3: 2 cells, but the header has 10"),
        (MURI_HEADER, None, "no jobs to simulate"),
        ("job_id," + MURI_HEADER + "1," + GOOD_ROW, None, "the column job_id appears twice"),
        (PAPER_HEADER, "helios", "not a trace of format helios; it looks like muri-paper"),
        (MURI_HEADER, "hellios", "unknown trace format 'hellios' (is it helios?)"),
        ("a,b,c\n1,2,3\n", None, "the file starts with: a,b,c"),
        *(("a,b,c\n1,2,3\n", None, name) for name in FORMATS),
        (
            "id,submit,gpus,hours\n",
            None,
            "a table of your own needs the columns job_id, submit_s, gpu_count, ",
        ),
        ("job_id;user;gpu_num\n", None, "its columns are separated by semicolons; save it with commas"),
        ("job_id;user;gpu_num\n", "helios", "its columns are separated by semicolons; save it with commas"),
        ("job_id\tuser\tgpu_num\n", "helios", "its columns are separated by tabs; save it with commas"),
        (
            "gpu_milli,num_gpu,user,job_id\n",
            "helios",
            "missing columns gpu_num (is it num_gpu?), submit_time, ",
        ),
        ("num_gpus,user,job_id\n", "helios", "missing columns gpu_num (is it num_gpus?), submit_time, duration"),
        ("c" * 90 + ",d\n", "helios", f"has: {'c' * 40}…, d"),
        (",".join(f"c{number}" for number in range(8000)) + "\n", "helios", "c38, c39, … (8000 columns)"),
    ],
)
def test_a_file_that_is_no_trace_says_why(written: Writer, text: str, name: str | None, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(written(text), name)
    assert said in str(caught.value)


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(TraceError, match="the file is empty"):
        read_trace(tmp_path / "empty.csv")
    (tmp_path / "packed.csv").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8 text"):
        read_trace(tmp_path / "packed.csv")
    with pytest.raises(TraceError, match=r"a folder without pai_task_table\.csv"):
        read_trace(tmp_path)
