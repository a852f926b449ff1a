"""What the controller tells Prometheus: the file, what survives a process, and that no metric costs a cycle."""

import socket
import stat
import threading
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_slurm import FakeSlurm, behind_license, four_jobs, make_job, one_cycle, one_gpu, pilots
from polling import DEADLINE_S, until
from prometheus_client.parser import text_string_to_metric_families

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller import metrics
from muri.slurm_plugin.controller.books import MetricsError
from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.records import comment_tags as tags


def samples(path: Path) -> dict[tuple[str, tuple[str, ...]], float]:
    """Read the file as Prometheus does: values by name and labels' values, in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            key = sample.name, tuple(value for _, value in sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def run(make_controller, tmp_path):
    """Run a cycle in a process of its own; return what the file tells then."""
    path = tmp_path / "out" / "muri.prom"
    path.parent.mkdir()

    def cycle(slurm: FakeSlurm, **changes):
        one_cycle(make_controller, slurm, metrics_file=str(path), **changes)
        return samples(path)

    cycle.path = path
    return cycle


def test_a_group_shows_in_the_file(run, accounts):
    slurm = FakeSlurm(four_jobs(), one_gpu(), gate_license=True)
    told = run(slurm)
    assert told["muri_actions_total", ("StartGroup", "done")] == 1
    assert told["muri_slurm_requests_total", ("done", "submit")] == 1
    assert told["muri_lease_end_timestamp_seconds", ()] == slurm.now_s + Config().lease_s
    assert {labels[0] for name, labels in told if name == "muri_cycle_seconds"} == {"read", "plan", "start"}
    for _ in range(3):
        slurm.tick()
        told = run(slurm)
    assert told["muri_jobs", ("", "interleaved")] == 4
    assert (told["muri_groups", ("interleave",)], told["muri_group_members", ()]) == (1, 4)
    assert told["muri_group_efficiency", ("predicted",)] == pytest.approx(1.0, abs=0.1)
    assert ("muri_group_efficiency", ("measured",)) not in told
    (pilot,) = pilots(slurm)
    figures = {str(job): {"n": 5, "t": 1.25, "s": [0.25] * 4, "w": [0] * 4} for job in (1, 2, 3, 4)}
    slurm.jobs[pilot.job_id] = replace(pilot, comment=tags.SPEED_PREFIX + tags.format_json(figures))
    assert run(slurm)["muri_group_efficiency", ("measured",)] == pytest.approx(0.8)


def test_a_failed_cycle_is_counted_and_the_last_that_finished_stays(run, accounts):
    slurm = FakeSlurm([], one_gpu(), gate_license=True)
    before = run(slurm)
    assert before["muri_cycles_total", ("failed",)] == 0

    def unreachable():
        raise SlurmUnreachableError("slurmctld does not answer")

    slurm.snapshot, read = unreachable, slurm.snapshot
    with pytest.raises(SlurmUnreachableError):
        run(slurm)
    told = samples(run.path)
    assert told["muri_cycles_total", ("failed",)] == 1
    assert told["muri_slurm_requests_total", ("unreachable", "snapshot")] == 1
    for name in ("muri_last_cycle_timestamp_seconds", "muri_lease_end_timestamp_seconds"):
        assert told[name, ()] == before[name, ()]
    assert ("muri_unreadable_jobs", ()) not in told  # not known now
    slurm.snapshot = read
    told = run(slurm)
    assert told["muri_cycles_total", ("finished",)] == 2
    assert told["muri_slurm_requests_total", ("done", "snapshot")] == 2


def test_what_slurm_refuses_is_counted(run, accounts):
    slurm = FakeSlurm(four_jobs(), one_gpu())

    slurm.submit = Mock(side_effect=GatewayError("Invalid account"))
    told = run(slurm)
    assert told["muri_slurm_requests_total", ("refused", "submit")] == 1
    assert told["muri_actions_total", ("StartGroup", "refused")] == 1


def test_reasons_are_classes(run, accounts):
    def gated(job_id, reason, **changes):
        return replace(behind_license(make_job(job_id, **changes)), reason=reason)

    known, unheld = {"admin_comment": "muri:model=m1,batch-size=8,duration=100"}, {"held": False}
    jobs = [
        gated(1, "Dependency", dependency="afterok:99"),
        gated(3, "Licenses", admin_comment="muri:model=unknown,batch-size=8"),
        replace(gated(4, "JobHeldAdmin"), held=True),
        make_job(5, reason="QOSMaxGRESPerUser", **known, **unheld),
        make_job(6, reason="Resources", **known, **unheld),
        make_job(8, reason="A_new_word_of_Slurm's", **known, **unheld),
    ]
    told = run(FakeSlurm(jobs, one_gpu(), gate_license=True))
    shown = {labels: value for (name, labels), value in told.items() if name == "muri_jobs"}
    assert shown == {  # labels in the order of their names: reason, state
        ("dependency", "waiting"): 1,
        ("gpus", "waiting"): 1,
        ("held", "user-held"): 1,
        ("limit", "alone"): 1,
        ("resources", "alone"): 1,
        ("other", "alone"): 1,
    }


def test_no_text_of_a_user_and_no_job_id_becomes_a_label(run, accounts):
    name = "evil\nmuri_jobs 666"
    slurm = FakeSlurm([make_job(1147114711, name=name, account=name, reason=name), *four_jobs()], one_gpu())
    told = run(slurm)
    text = run.path.read_text()
    assert "evil" not in text
    assert "muri_jobs 666" not in text
    assert "1147114711" not in text
    allowed = {metric.exported: len(metric.labels) for metric in metrics.METRICS}
    assert {each: len(labels) for each, labels in told} == {each: allowed[each] for each, _ in told}


def test_the_file_is_for_all_to_read_and_replaces_a_link(run, tmp_path, accounts):
    target = tmp_path / "precious"
    target.write_text("mine")
    run.path.symlink_to(target)
    run(FakeSlurm([], one_gpu()))
    facts = run.path.lstat()
    assert stat.S_ISREG(facts.st_mode)
    assert stat.S_IMODE(facts.st_mode) == 0o644
    assert target.read_text() == "mine"
    assert [*run.path.parent.iterdir()] == [run.path]


@pytest.mark.parametrize(("place", "why"), [("missing", "FileNotFoundError"), ("", "ZeroDivisionError")])
def test_no_fault_in_the_books_costs_a_cycle(make_controller, tmp_path, accounts, monkeypatch, caplog, place, why):
    if not place:
        monkeypatch.setattr(metrics, "queue_values", Mock(side_effect=ZeroDivisionError))
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm, metrics_file=str(tmp_path / place / "muri.prom")) as controller:
        status = controller.cycle()
    assert len(pilots(slurm)) == 1
    assert status.jobs
    assert f"the metrics of this cycle are incomplete: {why}" in caplog.text


def test_damaged_books_begin_anew(make_controller, accounts, tmp_path, run):
    from muri.slurm_plugin.records.journal import COUNTERS, GROUP_RUN, Journal

    with Journal(tmp_path / "journal.db") as journal:
        journal.set_fact(COUNTERS, "cycles", {"finished": "many", "failed": 7})
        journal.set_fact(COUNTERS, "actions", [1])
        journal.set_fact(GROUP_RUN, "12", {"pilot": "x"})
        journal.set_fact(GROUP_RUN, "x", {})
    told = run(FakeSlurm([], one_gpu()))
    assert (told["muri_cycles_total", ("finished",)], told["muri_cycles_total", ("failed",)]) == (1, 7)


def test_a_controller_that_stays_serves_the_same_whatever_strangers_do(make_controller, accounts, monkeypatch):
    most, before = metrics.MOST_CONNECTIONS, threading.active_count()
    monkeypatch.setattr(metrics, "REQUEST_LIMIT_S", 2 * DEADLINE_S)
    with make_controller(FakeSlurm([], one_gpu()), metrics_listen="127.0.0.1:0") as controller, ExitStack() as stack:
        server, thread = controller.books.serve()
        controller.cycle()
        address = ("127.0.0.1", server.server_port)
        strangers = [stack.enter_context(socket.create_connection(address, DEADLINE_S)) for _ in range(100)]
        assert strangers[-1 - most].recv(1) == b"", "more are there than may be"
        until(lambda: threading.active_count() - before <= most + 1, "the threads' ends")
        taken = f"127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"http://{taken}/metrics") as answer:
            assert 'muri_cycles_total{outcome="finished"} 1.0' in answer.read().decode()
        monkeypatch.setattr(metrics, "REQUEST_LIMIT_S", 0.0)
        assert strangers[-1].recv(1) == b"", "it may stay for ever"
        with (
            make_controller(FakeSlurm([], one_gpu()), metrics_listen=taken) as other,
            pytest.raises(MetricsError, match=f"metrics_listen: cannot listen at {taken}"),
        ):
            other.books.serve()
        server.shutdown()
        server.server_close()
        thread.join()


def test_nodes_show_what_their_pilots_monitors_have_told(run, accounts):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    run(slurm)
    slurm.tick()
    (pilot,) = pilots(slurm)
    use = {"n": [3.5, 16, 8, 2, None], "g": {"0": [0.75, 4], "7": [1, 1]}, "1": [1.5, 2, 0, None, None]}
    report = {"1": {"n": 5, "t": 1.25, "s": [0.25] * 4, "w": [0] * 4}, "u": use}
    slurm.jobs[pilot.job_id] = replace(pilot, comment=tags.SPEED_PREFIX + tags.format_json(report))
    told = run(slurm)
    assert told["muri_node_cpu_cores", ("n1",)] == 3.5
    assert told["muri_node_memory_bytes", ("n1",)] == 8 * 2**30
    assert told["muri_node_disk_bytes_per_second", ("n1",)] == 2 * 2**20
    assert ("muri_node_network_bytes_per_second", ("n1",)) not in told
    # Prometheus sorts labels: gpu, node. The node has no GPU 7, whatever the comment says.
    assert {key: value for key, value in told.items() if key[0].startswith("muri_node_gpu")} == {
        ("muri_node_gpu_utilization", ("0", "n1")): 0.75,
        ("muri_node_gpu_memory_bytes", ("0", "n1")): 4 * 2**30,
    }
