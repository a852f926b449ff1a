"""`muri profile run --sweep` with real scripts on real cores, the storage's bandwidth, and what is stored."""

import json
import os
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from muri.profiler import sweep as storage
from muri.profiler.commands import profile
from muri.profiler.commands.stored import sweep_of as stored
from muri.profiler.errors import SensitivityError
from muri.profiler.records import Document
from muri.profiler.sensitivity import SENSITIVITIES, Dataset, Measured, SensitivityProfile, bisect
from muri.profiler.store import ProfileStore
from muri.profiler.sweep import MemoryAxis

# While its throughput is measured, it writes when its iterations would end on a machine that nothing disturbs.
WAITING_JOB = """
import os, sys, time
import muri

iteration_s = max(0.02, 0.08 / int(sys.argv[1]))  # what is fetched by so many workers at once
if log := os.environ.get("MURI_ITERATION_LOG"):
    with open(log, "a") as stream:
        stream.writelines(f"{step * iteration_s}\\n" for step in range(200))
    sys.exit()

def batches():
    while True:
        time.sleep(iteration_s)
        yield 1

for _ in muri.batches(batches()):
    with muri.stage("propagate"):
        pass
"""

CORES_JOB = """
import os, sys, time
import muri

with open(sys.argv[1], "a") as log:
    print(len(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], os.environ["MURI_CPUS"], file=log)
for _ in muri.batches(range(1000)):
    with muri.stage("preprocess"):
        time.sleep(0.005)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("MURI_PROFILES", str(tmp_path / "profiles.db"))

    def run_it(*arguments):
        return CliRunner().invoke(profile, ["run", "--sweep", *map(str, arguments)])

    return run_it


def write(path, text):
    path.write_text(text)
    return path


def test_a_job_whose_workers_follow_the_count(run, tmp_path):
    script = write(tmp_path / "waits.py", WAITING_JOB)
    dataset = ("--memory", "dataset-gib=2,storage-mib-per-s=100,batch-mib=1.5,overlap=1")
    options = ("--no-pin", "--max-cpus", 8, "--seconds", 0.2, *dataset)
    result = run(*options, "--", script, "{cpus}")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "waits: 4 measurements, counts only told to the script"
    enough = next(line for line in lines if line.endswith("enough"))
    assert int(enough.split()[0]) == 4
    assert re.search(r"^demand: 4 CPUs, .*GiB of cache$", lines[-1])
    assert result.stderr.count("iterations/s") == 4
    show = CliRunner().invoke(profile, ["show", "waits", "--json"])
    again = json.loads(show.stdout)["sweep"]
    assert again["measurements"] == 4
    assert again["demand"]["cpus"] == int(enough.split()[0])
    assert len(again["curve"]) == 8
    assert again["memory"]["throughput"][7][-1] == pytest.approx(again["curve"][7])
    assert CliRunner().invoke(profile, ["show", "waits"]).stdout == result.stdout


def test_affinity_and_threads_are_those_of_the_count(run, tmp_path):
    script, log = write(tmp_path / "cores.py", CORES_JOB), tmp_path / "log"
    most = min(2, storage.usable_cpus())
    result = run("--max-cpus", most, "--seconds", 0.2, "--", script, log)
    assert result.exit_code == 0, result.output
    seen = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert sorted(set(seen)) == [(cpus,) * 3 for cpus in range(1, most + 1)]
    assert result.stdout.startswith("cores: ")
    assert "cores by affinity" in result.stdout


def test_a_script_that_ends_too_soon_is_told_what_to_do(run, tmp_path):
    short = write(tmp_path / "short.py", "import muri\nfor _ in muri.batches(range(2)): pass\n")
    assert "2 iterations were seen, up to 16 are needed; let it run longer" in str(
        run("--max-cpus", 1, short).exception
    )
    none = write(tmp_path / "none.py", "print('nothing to do')")
    text = str(run("--max-cpus", 1, none).exception)
    assert "mark its iterations with muri.batches(loader)" in text
    assert text.endswith("its last words: nothing to do")


def test_what_is_stored_comes_back_and_what_is_not_is_said(tmp_path):
    cpu = bisect(lambda cpus: Measured(float(min(cpus, 5)), 0.01), 8)
    found = SensitivityProfile("resnet", "", cpu, dataset=Dataset(100, 50, 500, 0.5), process_gib=3.0)
    plain = SensitivityProfile("plain", "2026-03-01T12:00:00Z", cpu)
    with ProfileStore(tmp_path / "profiles.db") as store:
        for one in (found, plain):
            store.put_document(SENSITIVITIES, one.to_document())
        assert (stored(store, "resnet"), stored(store, "plain")) == (found, plain)
        store.put_document(SENSITIVITIES, Document("odd", "", {"points": [1]}))
        with pytest.raises(SensitivityError, match=r"'odd' cannot be read .*; measure it again"):
            stored(store, "odd")
        assert stored(store, "rsnet") is None
    assert found.demand.mem_gib == pytest.approx(3.0 + (found.demand.cache_gib or 0))
    assert plain.demand.mem_gib is None


@pytest.fixture
def reads(monkeypatch):
    """Bytes of each read; a read takes a virtual second."""
    counts, read = [], os.readv
    monkeypatch.setattr(storage, "time", SimpleNamespace(perf_counter=lambda: float(len(counts))))
    monkeypatch.setattr(os, "readv", lambda fd, buffers: counts.append(read(fd, buffers)) or counts[-1])
    return counts


@pytest.mark.parametrize(
    ("limits", "files_read"),
    [({"READ_LIMIT_S": 60.0}, 3), ({"READ_LIMIT_S": 60.0, "READ_LIMIT_MIB": 1.0}, 1), ({"READ_LIMIT_S": 2.0}, 2)],
    ids=["all", "so many MiB", "so many seconds"],
)
def test_bandwidth_is_read_until_a_limit_and_size_is_that_of_all_files(
    tmp_path, monkeypatch, reads, limits, files_read
):
    size = (1 << 20) + 3
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(os.urandom(size))
    for name, limit in limits.items():
        monkeypatch.setattr(storage, name, limit)
    axis = MemoryAxis.from_words(f"dataset={tmp_path},batch-mib=0.5")
    dataset = axis.measure()
    assert dataset.dataset_gib == 3 * size / 2**30
    assert sum(reads) == files_read * size
    assert dataset.storage_mib_per_s == pytest.approx(sum(reads) / 2**20 / len(reads))
    assert axis.with_overlap(dataset, 0.25).overlap == 0.25
    assert axis.with_overlap(dataset, None).overlap == 1.0


def test_storage_that_refuses_direct_reading_is_read_without_its_pages(tmp_path, monkeypatch, reads):
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    plain, dropped = os.open, []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: dropped.append(given[1:]))

    def refuse(name, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return plain(name, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    storage.measure_bandwidth([path])
    assert sum(reads) == 1 << 20
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)]
