"""What squeue of three real Slurm versions printed, read into the same records."""

from dataclasses import replace

import pytest
from recorded_slurm import MARK, VERSIONS, jobs, recorded, row

from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.squeue import FieldReader, job_of, known_fields
from muri.slurm_plugin.gateway.tables import nodes_of_table
from muri.slurm_plugin.gateway.text_fields import JobDetails, details_of
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.limits import PartitionLimits

NEW = "26.05.5"


@pytest.mark.parametrize("version", VERSIONS)
def test_gpus_of_every_way_to_ask(version: str) -> None:
    assert {name: (job.gpu_count, job.gpu_request) for name, job in jobs(version).items()} == {
        "failed": (0, ""),
        "running": (2, "gres/gpu:2"),
        "per-job": (2, ""),
        "per-node": (2, "gres/gpu:1"),
        "per-task": (2, ""),
        "bare": (1, "gres/gpu:1"),
        "details": (0, ""),
        "array": (0, ""),
        "one": (1, "gres/gpu:1"),
    }
    per_socket = row(version, "array") | {"tres-per-socket": "gres/gpu:2"}
    assert job_of(per_socket, None, 0.0).gpu_count == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_states_times_and_holds(version: str) -> None:
    named = jobs(version)
    failed, running, held = named["failed"], named["running"], named["bare"]
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 3)
    assert 0 < failed.submit_s <= failed.start_s <= failed.end_s
    assert (running.state, running.held, running.reason, running.nodes, running.end_s) == (
        JobState.RUNNING, False, "", "n1", 0,
    )  # fmt: skip
    assert (held.state, held.held, held.reason, held.start_s) == (JobState.PENDING, True, "JobHeldUser", 0)
    array = named["array"]
    assert (array.array, array.array_job_id, array.array_tasks, array.array_limit) == (True, array.job_id, "1-3", 0)
    assert (held.array_job_id, held.array_tasks) == (0, "")
    assert named["array"].time_limit_s == 0
    assert not held.array


@pytest.mark.parametrize("version", VERSIONS)
def test_details_of_a_job(version: str) -> None:
    job = jobs(version)["details"]
    assert (job.user, job.uid, job.gid, job.partition, job.work_dir) == ("alice", 1001, 1001, "main", "/home/alice")
    assert (job.cpu_count, job.cpus_per_task, job.mem_per_node_mib, job.time_limit_s) == (3, 3, 500, 5400)
    assert (job.required_nodes, job.dependency, job.node_count) == ("n2", "after:2+5,afterany:2", 1)
    assert (job.batch, job.het, job.can_requeue, job.restart_count) == (True, False, True, 0)
    assert jobs(version)["one"].excluded_nodes == "n4"
    each_task = jobs(version)["per-task"]
    assert (each_task.mem_per_node_mib, each_task.mem_per_cpu_mib) == (4000, 2000)


def test_all_versions_give_the_same_records() -> None:
    old, *newer = (
        [replace(job, submit_s=0, start_s=0, end_s=0, submit_line="", priority=1) for job in jobs(version).values()]
        for version in VERSIONS
    )
    assert newer == [old, old]


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes(version: str) -> None:
    nodes = {node.name: node for node in nodes_of_table(recorded(version)["nodes"])}
    assert {name: node.usable for name, node in nodes.items()} == {"n1": True, "n2": True, "n3": True, "n4": False}
    assert nodes["n4"].state == "IDLE+DRAIN"
    assert (nodes["n1"].gpu_count, nodes["n1"].gpus_allocated, nodes["n1"].cpus_allocated) == (2, 2, 1)
    assert (nodes["n2"].gpus_allocated, nodes["n2"].cpu_count, nodes["n2"].gpu_type) == (0, 16, "gpu")
    assert (nodes["n1"].mem_mib, nodes["n1"].mem_allocated_mib, nodes["n1"].threads_per_core) == (64000, 2000, 1)
    assert nodes["n2"].partitions == ("main",)


@pytest.mark.parametrize("version", VERSIONS)
def test_ordinary_requests_are_not_special(version: str) -> None:
    special = {name: job.special for name, job in jobs(version).items() if job.special}
    assert special == {
        "per-job": ("--gpus",), "per-task": ("--gpus-per-task",), "one": ("--cpu-freq", "--spread-job"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({"OverSubscribe": "NO"}, ("--exclusive",)),
        ({"Exclusive": "NODE"}, ("--exclusive",)),
        ({"OverSubscribe": "USER"}, ("--exclusive=user",)),
        ({"Exclusive": "TOPO"}, ("--exclusive=topo",)),
        ({"OverSubscribe": "YES"}, ()),
        ({"CoreSpec": "1 Threads"}, ("--core-spec",)),
        ({"cpus-per-tres": "gpu:3", "mem-per-tres": "gpu:3000"}, ()),  # the partition's defaults
        ({"cpus-per-tres": "gres:gpu:3"}, ("--cpus-per-gpu",)),
        ({"mem-per-tres": "gres/gpu:1024"}, ("--mem-per-gpu",)),
        ({"tres-per-node": "gres/gpu:1,gres/muri:1"}, ("--gres",)),
        ({"tres-per-node": "gres/gpu:0,gres/muri:1"}, ()),
        ({"tres-per-node": "gres/gpu:a:1,gres/gpu:b:1"}, ("--gres",)),
        ({"tres-bind": "gres/gpu:closest"}, ("--gpu-bind",)),
        ({"Partition": "main,small"}, ("--partition",)),
        ({"MaxNodes": "4"}, ("--nodes",)),
        ({"MaxNodes": "2", "NumTasks": "2", "NumCPUs": "2"}, ()),  # Slurm's own bound
        ({"MinCPUs": "8"}, ("--mincpus",)),
        ({"NumTasks": "2"}, ("--overcommit",)),
        ({"WCKey": "*default"}, ()),
        ({"WCKey": "x", "MCSLabel": "alice"}, ("--wckey",)),
        ({"MCSLabel": "team"}, ("--mcs-label",)),
        ({"Contiguous": "1", "Network": "x", "Deadline": "1800000000", "ReqSwitch": "1"},
         ("--contiguous", "--deadline", "--network", "--switches")),
    ],
)  # fmt: skip
def test_options_that_muri_does_not_carry_over(fields: dict[str, str], special: tuple[str, ...]) -> None:
    assert job_of(row(NEW, "bare") | fields, None, 0.0).special == special


def test_a_job_shares_cpus_where_it_or_its_partition_says_so() -> None:
    plain, asked = (row(NEW, "bare") | {"OverSubscribe": word} for word in ("OK", "YES"))
    assert [job_of(each, None, 0.0).oversubscribe for each in (plain, asked)] == [False, True]
    of_force = job_of(asked, None, 0.0, PartitionLimits("main", shares_all=True))
    assert of_force.special == ("--oversubscribe",)


def test_no_memory_is_all_memory_only_where_jobs_get_some_by_default() -> None:
    record = row(NEW, "bare") | {"MinMemory": "0", "tres-alloc": "cpu=1,mem=62.50G,node=1"}
    assert job_of(record, None, 0.0, PartitionLimits("main", default_mem=True)).special == ("--mem",)
    assert job_of(record, None, 0.0).special == ()


@pytest.mark.parametrize(
    ("asked", "cpus_per_tres", "mem_mib", "given_cpus"),
    [
        ("cpu=1,mem=6000M,node=1", "gpu:4", 6000, 8),
        ("cpu=1,mem=500M,node=1", "gpu:4", 500, 8),
        ("cpu=2,mem=6000M,node=1", "N/A", 6000, 2),
    ],
)
def test_what_a_partition_gives_for_each_gpu_is_what_a_job_has(asked, cpus_per_tres, mem_mib, given_cpus) -> None:
    """As Slurm 26.05 shows jobs of two GPUs in a partition with DefMemPerGPU=3000 and DefCpuPerGPU=4."""
    cpus = asked[4]
    shown = {"MinMemory": "3000M", "tres-alloc": asked, "mem-per-tres": "gpu:3000", "cpus-per-tres": cpus_per_tres}
    record = row(NEW, "bare") | shown | {"tres-per-node": "gres/gpu:2", "NumCPUs": cpus, "cpus-per-task": cpus}
    job = job_of(record, None, 0.0, PartitionLimits("main", cpus_per_gpu=4, mem_per_gpu=True))
    assert (job.mem_per_node_mib, job.mem_per_cpu_mib, job.given_cpus, job.special) == (mem_mib, 0, given_cpus, ())


def test_job_that_must_wait_until_later_says_so() -> None:
    record = row(NEW, "bare") | {"EligibleTime": "2000"}
    assert job_of(record, None, taken_s=1_000.0).begin_s == 2_000
    assert job_of(record, None, taken_s=3_000.0).begin_s == 0


def test_numbers_are_bounded() -> None:
    huge = {"NumNodes": "2000000000", "tres-alloc": "node=2000000000", "NumTasks": "9" * 30, "RestartCnt": "-4"}
    job = job_of(row(NEW, "per-node") | huge, None, 0.0)
    assert (job.node_count, job.gpu_count, job.restart_count) == (10**6, 10**6, 0)
    assert job_of(row(NEW, "bare") | {"SubmitTime": "9" * 19}, None, 0.0).submit_s == 2**53 - 1
    assert job_of(row(NEW, "bare") | {"PriorityLong": str(0xFFFF_FFFE)}, None, 0.0).priority == 1


@pytest.mark.parametrize(
    ("text", "code"), [("3:0", 3), ("0:9", 0), ("768", 3), ("9", 0), ("", 0), ("x:1", 0), ("9" * 40, 0)]
)
def test_exit_codes_of_both_forms(text: str, code: int) -> None:
    assert job_of(row(NEW, "bare") | {"exit_code": text}, None, 0.0).exit_code == code


@pytest.mark.parametrize(
    ("text", "limit_s"),
    [("1:00:00", 3600), ("5:00", 300), ("2-01:00:30", 176_430), ("UNLIMITED", 0), ("NOT_SET", 0), ("x", 0)],
)
def test_time_limits(text: str, limit_s: int) -> None:
    assert job_of(row(NEW, "bare") | {"TimeLimit": text}, None, 0.0).time_limit_s == limit_s


HOSTILE = ["", " two  blanks ", "line\nend\n", "\x1b[31m\t|", "caf\udce9", "x" * 9999, "<a>", "(null) ", MARK[:-1]]


@pytest.mark.parametrize("text", HOSTILE)
def test_users_texts_come_whole(text: str) -> None:
    names = ("JobID", "Name", "Comment")
    reader = FieldReader(names)
    output = "".join(f"{job}{reader.mark}{text}{reader.mark}{text}{reader.mark}\n" for job in (1, 2))
    found = list(reader.rows(output.encode("utf-8", "surrogateescape")))
    assert found == [{"JobID": job, "Name": text, "Comment": text} for job in ("1", "2")]


def test_the_mark_is_drawn_anew_and_is_no_argument() -> None:
    first, second = FieldReader(("JobID", "Name")), FieldReader(("JobID", "Name"))
    assert first.mark != second.mark
    assert first.variables == {"SQUEUE_FORMAT2": f"JobID:0{first.mark},Name:0{first.mark}"}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (b"1<m>a<m>", "ends within"),
        (b"1<m>a<m>\n2<m>\n", "1 fields"),
        (b"1<m>a<m>b<m>\n", "3 fields"),
        (b"1<m>a<m>\n2<m>a<m>\n1<m>b<m>\n", "more than one record of these jobs: 1"),
    ],
)
def test_output_of_another_form_is_refused(output: bytes, said: str) -> None:
    with pytest.raises(GatewayError, match=said):
        list(FieldReader(("JobID", "Name"), "<m>").rows(output))


def test_an_empty_queue_is_none_that_cannot_be_read() -> None:
    assert list(FieldReader(("JobID",), "<m>").rows(b"")) == []


def test_fields_that_a_release_lacks_are_not_asked_for() -> None:
    assert set(known_fields("JobId ExcNodes Exclusive")) - set(known_fields("")) == {"ExcNodes", "Exclusive"}


@pytest.mark.parametrize("version", VERSIONS)
def test_details_are_read_of_every_version(version: str) -> None:
    lines = recorded(version)["jobs"].splitlines()
    told = [details_of(line) for line in lines]
    assert [each.mem_per_cpu for each in told] == [True] * 6 + [False, True, True]
    assert told[-1].flags == ("SPREAD_JOB",)
    assert (told[-1].excluded_nodes, told[0].excluded_nodes) == ("n4", "")
    assert bool(told[-1].submit_line) == (version == NEW)
    assert told[2].options["tres_per_job"].endswith("gpu:2")


def test_where_memory_cannot_be_told_apart_the_details_decide() -> None:
    record = row(NEW, "bare")  # one CPU on one node
    assert job_of(record, JobDetails(mem_per_cpu=True), 0.0).mem_per_cpu_mib == 2000
    assert job_of(record, JobDetails(mem_per_cpu=False), 0.0).mem_per_cpu_mib == 0
    assert job_of(row(NEW, "per-task"), None, 0.0).mem_per_cpu_mib == 2000


def _printed(rows: list[dict[str, str]], reader: FieldReader) -> bytes:
    return "".join("".join(row[name] + reader.mark for name in reader.names) + "\n" for row in rows).encode()


def test_tasks_that_wait_in_one_record_are_one_job_and_those_with_their_own_are_not() -> None:
    bare = row("26.05.5", "bare") | {"ArrayJobID": "20"}
    own = bare | {"JobID": "21", "ArrayTaskID": "0"}
    waiting = [bare | {"JobID": "20", "ArrayTaskID": str(task)} for task in (7, 4, 5, 1)]
    reader = FieldReader(known_fields(""))
    output = _printed([*waiting[:2], own, *waiting[2:]], reader)
    found = {each["JobID"]: each["ArrayTaskID"] for each in reader.rows(output)}
    assert found == {"20": "1,4-5,7", "21": "0"}


def test_a_second_record_of_a_job_that_is_no_other_task_is_refused() -> None:
    bare = row("26.05.5", "bare") | {"ArrayJobID": "20", "JobID": "20", "ArrayTaskID": "4"}
    reader = FieldReader(known_fields(""))
    for second in (bare, bare | {"ArrayTaskID": "N/A"}, bare | {"ArrayJobID": "3", "ArrayTaskID": "5"}):
        with pytest.raises(GatewayError, match="more than one record of these jobs: 20"):
            list(reader.rows(_printed([bare, second], reader)))
