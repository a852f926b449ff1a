"""Record the JSON that tests/slurm_plugin/fixtures holds: `python tests/slurm/record_fixtures.py SANDBOX`."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from muri.slurm_plugin.gateway import json_records
from sandbox.driver import Driver

FIXTURES = Path(__file__).resolve().parents[1] / "slurm_plugin/fixtures"
WRAP = ("--output=/dev/null", "--wrap=sleep 600")


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
    driver.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=an invented reason", user="root")


def document(driver: Driver, *command: str) -> dict[str, Any]:
    """Run a command and drop what the tests don't need and what tells of the machine."""
    content: dict[str, Any] = json.loads(driver.run(*command, user="root").stdout)
    for job in content.get("jobs", []):
        job.pop("job_resources", None)
    for node in content.get("nodes", []):
        node.update(operating_system="Linux", cpu_load=0)
    return content


def main(name: str) -> None:
    """Record from a running, empty sandbox."""
    driver = Driver.of(name)
    release = driver.instance.slurm_version
    fill(driver)
    old = release.startswith("22.05")
    nodes = ("sinfo", "--json") if old else ("scontrol", "show", "nodes", "--json")
    jobs = json_records.queue_command("" if old else driver.run("squeue", "--json=list").stdout)
    for kind, command in (("jobs", jobs), ("nodes", nodes)):
        path = FIXTURES / f"{kind}-{release}.json"
        path.write_text(json.dumps(document(driver, *command), separators=(",", ":")) + "\n", encoding="utf-8")
    driver.cancel_all()


if __name__ == "__main__":
    main(sys.argv[1])
