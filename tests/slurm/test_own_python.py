"""A user's own Python on a real Slurm: scripts are measured and grouped in it, beside scripts in others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from muri_cluster import DRY_RUNS, TRAIN_PY, MuriCluster
from sandboxes import ONE_GPU, emptied, start

from sandbox.driver import Driver

pytestmark = DRY_RUNS

LIBRARY = Path(__file__).resolve().parents[2] / "muri" / "elsewhere"

# As packages install the command: in an environment of its own that holds what Muri needs, Muri found by PYTHONPATH.
WRAPPER = """\
#!/bin/sh
PYTHONPATH={library} exec /opt/private/bin/python3 -c 'from muri.cli import main; main()' "$@"
"""


@pytest.fixture(scope="module", params=["forky", "trixie"])
def release(request: pytest.FixtureRequest) -> Iterator[Driver]:
    yield from start(request.param, ONE_GPU, f"python-{request.param}")


@pytest.fixture
def one_gpu(release: Driver) -> Iterator[Driver]:
    yield from emptied(release)


@pytest.fixture
def muri(muri: MuriCluster, one_gpu: Driver) -> MuriCluster:
    packages = "import click, pathlib; print(pathlib.Path(click.__file__).parents[1])"
    third_party = muri.python(packages).stdout.strip()
    make = (
        "rm -rf /opt/private; python3 -m venv --without-pip /opt/private; "
        "echo $0 > $(/opt/private/bin/python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')/it.pth"
    )
    one_gpu.run("sh", "-c", make, third_party, user="root")
    one_gpu.write("/opt/packaged/muri", WRAPPER.format(library=LIBRARY), user="root")
    for name in ("one", "two"):
        one_gpu.run("sh", "-c", f"rm -rf {name}; python3 -m venv --without-pip {name}")
        lacks = one_gpu.run(f"/home/alice/{name}/bin/python3", "-c", "import click", check=False)
        assert "No module named 'click'" in lacks.stderr
    muri.script("train", f"import sys\nprint('prefix', sys.prefix, flush=True)\n{TRAIN_PY}")
    return muri


def submit(muri: MuriCluster, kind: str, venv: str, iterations: int = 30) -> int:
    """Submit a job as one who has activated a virtual environment."""
    path = f"/home/alice/{venv}/bin:/opt/packaged:/usr/local/bin:/usr/bin:/bin"
    environment = {"PATH": path, "VIRTUAL_ENV": f"/home/alice/{venv}"}
    words = ("/home/alice/train.sh", str(iterations), "0", kind)
    sbatch = muri.driver.run("sh", "-c", "command -v sbatch").stdout.strip()
    options = ("-p", "train", "--gres=gpu:1", f"--muri=model={kind},batch-size=8")
    done = muri.driver.run("env", *(f"{k}={v}" for k, v in environment.items()), sbatch, "--parsable", *options, *words)
    return int(done.stdout.strip().split(";")[0])


@pytest.mark.parametrize("second", ["two", pytest.param("one", marks=pytest.mark.thorough)])
def test_jobs_in_own_pythons_are_measured_and_share_a_gpu_each_in_its_own(muri: MuriCluster, second: str) -> None:
    with muri.training():
        jobs = [submit(muri, "load", "one"), submit(muri, "propagate", second)]
        with muri.controller():
            muri.wait_grouped(*jobs)
        assert muri.models().keys() == {"load", "propagate"}, muri.controller_log()
        assert len(muri.pilots()) == 1
    fields = [muri.driver.wait_state(job) for job in jobs]
    assert [(job["JobState"], job["Restarts"]) for job in fields] == [("COMPLETED", "0")] * 2
    prefixes = [muri.output(job).split("\n")[0] for job in jobs]
    assert prefixes == ["prefix /home/alice/one", f"prefix /home/alice/{second}"]
    assert all("refused" not in muri.output(job) for job in jobs)
