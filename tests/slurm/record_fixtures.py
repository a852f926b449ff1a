"""Record what tests/slurm_plugin/fixtures holds of a release: `python tests/slurm/record_fixtures.py SANDBOX`."""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from muri.slurm_plugin.gateway.queue_reader import ASK
from muri.slurm_plugin.gateway.squeue import FieldReader, known_fields
from sandbox.driver import Driver

FIXTURES = Path(__file__).resolve().parents[1] / "slurm_plugin/fixtures"
WRAP = ("--output=/dev/null", "--wrap=sleep 600")
MARK = "<recorded>"
PLAIN = {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


def fill(driver: Driver) -> None:
    """Fill the queue with one job of each kind."""
    failed = driver.submit("--job-name=failed", "--output=/dev/null", "--wrap=exit 3")
    driver.wait_state(failed)
    running = driver.submit("--job-name=running", "--gres=gpu:2", "--nodelist=n1", *WRAP)
    driver.wait_state(running, "RUNNING")
    hold = ("--hold", *WRAP)
    driver.submit("--job-name=per-job", "--gpus=2", *hold)
    driver.submit("--job-name=per-node", "--gpus-per-node=1", "--nodes=2", *hold)
    driver.submit("--job-name=per-task", "--gpus-per-task=1", "--ntasks=2", *hold)
    driver.submit("--job-name=bare", "--gres=gpu", *hold)
    dependency = f"--dependency=afterany:{running},after:{running}+5"
    driver.submit(
        "--job-name=details", "--nodelist=n2", "--mem=500M", "--time=90", "--cpus-per-task=3", dependency, *hold
    )
    driver.submit("--job-name=array", "--array=1-3", "--time=UNLIMITED", *hold)
    driver.submit("--job-name=one", "--gres=gpu:1", "--exclude=n4", "--spread-job", "--cpu-freq=high", *hold)
    driver.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=an invented reason", user="root")


def main(name: str) -> None:
    """Record from a running, empty sandbox."""
    driver = Driver.of(name)
    fill(driver)
    listed = driver.run("squeue", "--helpFormat", user="root", check=False)
    reader = FieldReader(known_fields(listed.stdout if listed.returncode == 0 else ""), MARK)
    show = ("scontrol", "--all", "--oneliner", "show")
    nodes = driver.run(*show[:3], "--details", *show[3:], "nodes", user="root", env=PLAIN).stdout
    document = {
        "fields": " ".join(reader.names),
        "squeue": driver.run(*ASK, user="root", env=PLAIN | dict(reader.variables)).stdout,
        "jobs": driver.run(*show, "job", user="root", env=PLAIN).stdout,
        "nodes": re.sub(r" OS=.*?  RealMemory", " OS=Linux  RealMemory", nodes),
    }
    path = FIXTURES / f"slurm-{driver.instance.slurm_version}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    driver.cancel_all()


if __name__ == "__main__":
    main(sys.argv[1])
