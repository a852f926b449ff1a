"""What each release of Slurm can do that Muri depends on: small probes on a real cluster, which fill docs/releases.md.

Each probe answers one question by trying it, not by a version's number.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from sandbox import instance, lifecycle
from sandbox.cluster import Shape, Suite
from sandbox.driver import FINAL_STATES, DeadlineError, Driver
from sandbox.releases_page import Answer, Release
from sandbox.support import Progress, SandboxError

SHAPE: Final = Shape(nodes=2, accounting=True, site=True)
"""As on a site: accounting, munge, typed GPUs, a login host."""

#: The changed request of a waiting job, so that it loses its GPUs.
WAYS: Final = ("gres/gpu:0", "gres/gpu:0,gres/muri:1")

#: Ways of asking for a GPU, by their names on the page.
FORMS: Final = {
    "--gres=gpu:1": ("--gres=gpu:1",),
    "--gres=gpu:TYPE:1": ("--gres=gpu:tesla:1",),
    "--gpus-per-node=1": ("--gpus-per-node=1",),
    "--gpus=1": ("--gpus=1",),
    "--gpus-per-task=1": ("--gpus-per-task=1", "--ntasks=1"),
}

_SLEEP: Final = "--wrap=exec sleep 600"

_REVOKED_S: Final = 2.0

_MARK: Final = "--muri=model=m,batch-size=8"


Probe = Callable[[Driver], Answer]


@contextmanager
def job(driver: Driver, *options: str) -> Iterator[int]:
    """Submit a job of alice's that sleeps; it is cancelled at the end."""
    job_id = driver.submit("--output=/dev/null", "--time=5", *options, _SLEEP)
    try:
        yield job_id
    finally:
        driver.run("scancel", str(job_id), user="root", check=False)
        driver.wait_state(job_id)


def update(driver: Driver, job_id: int, *settings: str) -> str:
    """Change a job as root; return Slurm's words where it refuses, "" where it does not."""
    done = driver.run("scontrol", "update", f"JobId={job_id}", *settings, user="root", check=False)
    words = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else words[0] if words else "refused"


def queued(driver: Driver, job_id: int) -> dict[str, Any]:
    """Return a job's record in `squeue --json`."""
    records = json.loads(driver.run("squeue", "--json", user="root").stdout)["jobs"]
    return next(record for record in records if record["job_id"] == job_id)


def pyslurm(driver: Driver) -> Answer:
    """Whether a pyslurm fits this release."""
    running = driver.instance
    return Answer(running.pyslurm, "" if running.pyslurm else "Muri uses Slurm's commands")


def submit_line(driver: Driver) -> Answer:
    """Whether the queue's records hold the sbatch command."""
    with job(driver, "--hold") as job_id:
        return Answer(bool(queued(driver, job_id).get("submit_line")))


def recorded(driver: Driver, job_id: int, field: str, word: str) -> bool:
    """Return whether sacct's record of a job comes to hold a word in a field."""
    command = ("sacct", "-nPX", "-j", str(job_id), "-o", field)
    with suppress(DeadlineError):
        driver.wait_until(lambda: word in driver.run(*command, user="root").stdout, "a record of sacct's", 20)
        return True
    return False


def sacct_submit_line(driver: Driver) -> Answer:
    """Whether sacct knows the sbatch command."""
    with job(driver, "--hold") as job_id:
        return Answer(recorded(driver, job_id, "SubmitLine", "sbatch"))


def gpus_shown(driver: Driver) -> Answer:
    """Whether the queue's records tell of --gpus."""
    with job(driver, "--hold", "--gpus=1") as job_id:
        shown = str(queued(driver, job_id).get("tres_per_job", ""))
        return Answer("gpu" in shown)


def spank_option(driver: Driver) -> Answer:
    """Whether sbatch takes --muri from the SPANK plugin, and job_submit sees it."""
    with job(driver, "--hold", "--gres=gpu:1", _MARK) as job_id:
        return Answer("muri:model=m" in driver.run("scontrol", "show", "job", str(job_id), user="root").stdout)


def admin_comment_of_sbatch(driver: Driver) -> Answer:
    """Whether sbatch itself has an option for the AdminComment."""
    done = driver.run("sbatch", "--test-only", "--admin-comment=x", _SLEEP, user="root", check=False)
    works = "unrecognized option" not in done.stderr
    return Answer(works, "" if works else "Muri's job_submit module sets it")


def admin_comment_while_running(driver: Driver) -> Answer:
    """Whether the AdminComment of a running job can be changed."""
    with job(driver) as job_id:
        driver.wait_state(job_id, "RUNNING")
        return Answer(not update(driver, job_id, "AdminComment=x"))


def sacct_admin_comment(driver: Driver) -> Answer:
    """Whether an AdminComment reaches the accounting once the job has ended."""
    with job(driver) as job_id:
        driver.wait_state(job_id, "RUNNING")
        update(driver, job_id, "AdminComment=told")
    return Answer(recorded(driver, job_id, "AdminComment", "told"))


def license_gate(driver: Driver) -> Answer:
    """Whether a reservation of licenses alone keeps a job waiting, and its end lets it start."""
    name = "matrix_gate"
    create = f"flags=LICENSE_ONLY licenses=matlab:2 user=root starttime=now duration=60 reservationname={name}"
    done = driver.run("scontrol", "create", "reservation", *create.split(), user="root", check=False)
    if done.returncode:
        return Answer(False, done.stderr.strip())
    try:
        with job(driver, "--licenses=matlab:1") as job_id:
            driver.wait_until(lambda: driver.job(job_id)["Reason"] not in {"None", "Priority"}, "a reason to wait")
            waits = driver.job(job_id)["JobState"] == "PENDING"
            reason = driver.job(job_id)["Reason"]
            driver.run("scontrol", "delete", f"reservationname={name}", user="root")
            driver.wait_state(job_id, "RUNNING")
            return Answer(waits, f"Reason={reason}")
    finally:
        driver.run("scontrol", "delete", f"reservationname={name}", user="root", check=False)


def license_while_running(driver: Driver) -> Answer:
    """Whether a running job can be given a license, so that it waits once it is requeued."""
    with job(driver) as job_id:
        driver.wait_state(job_id, "RUNNING")
        refused = update(driver, job_id, "Licenses=matlab:1")
        return Answer(not refused, refused)


def licenses_after_requeue(driver: Driver) -> Answer:
    """Whether a requeued job holds its licenses again when it runs: up to 25.11.6 only its record showed them."""
    with job(driver, "--licenses=matlab:1") as job_id:
        driver.wait_state(job_id, "RUNNING")
        driver.run("scontrol", "requeue", str(job_id), user="root")
        driver.wait_state(job_id, "PENDING")
        time.sleep(_REVOKED_S)
        update(driver, job_id, "StartTime=now")
        if not started(driver, job_id):
            return Answer(False, "it does not start")
        used = "Used=1" in driver.run("scontrol", "show", "license", "matlab", user="root").stdout
        return Answer(used, "" if used else "it starts without them")


def started(driver: Driver, job_id: int) -> bool:
    """Wait until a job runs; False when it has ended instead, or does not start within half a minute."""
    with suppress(DeadlineError):
        return driver.wait_state(job_id, "RUNNING", *FINAL_STATES, deadline_s=30)["JobState"] == "RUNNING"
    return False


def requeued_early(driver: Driver) -> Answer:
    """Whether a requeued job starts again before its old credential has expired, with StartTime=now."""
    with job(driver) as job_id:
        driver.wait_state(job_id, "RUNNING")
        driver.run("scontrol", "requeue", str(job_id), user="root")
        driver.wait_state(job_id, "PENDING")
        time.sleep(_REVOKED_S)
        refused = update(driver, job_id, "StartTime=now")
        return Answer(not refused and started(driver, job_id), refused)


def requeued_in_the_same_second(driver: Driver) -> Answer:
    """Whether that is safe at once: a node refuses credentials as old as the run that it has just ended."""
    for _ in range(5):
        with job(driver, "--nodelist=n1") as job_id:
            driver.wait_state(job_id, "RUNNING")
            time.sleep(1 - time.time() % 1)
            driver.run("scontrol", "requeue", str(job_id), user="root")
            driver.wait_state(job_id, "PENDING")
            update(driver, job_id, "StartTime=now")
            if not started(driver, job_id):
                return Answer(False, "the job may fail: its node takes it for the run that was ended")
    return Answer(True)


def ended_job_spared(driver: Driver) -> Answer:
    """Whether `requeuehold incomplete` leaves a job alone that has ended."""
    job_id = driver.submit("--output=/dev/null", "--wrap=true")
    driver.wait_state(job_id, "COMPLETED")
    driver.run("scontrol", "requeuehold", "incomplete", str(job_id), user="root", check=False)
    return Answer(driver.job(job_id)["JobState"] == "COMPLETED")


def overlapping_step(driver: Driver) -> Answer:
    """Whether a second step shares the GPU of a first one, with --overlap."""
    with job(driver, "--gres=gpu:1") as job_id:
        driver.wait_state(job_id, "RUNNING")
        step = (
            "srun",
            f"--jobid={job_id}",
            "--overlap",
            "--gres=gpu:1",
            "--time=1",
            "printenv",
            "CUDA_VISIBLE_DEVICES",
        )
        first = driver.popen("srun", f"--jobid={job_id}", "--overlap", "--gres=gpu:1", "sleep", "30")
        try:
            done = driver.run(*step, check=False)
        finally:
            first.terminate()
            first.communicate()
        return Answer(done.returncode == 0 and bool(done.stdout.strip()))


def without_gpus(options: Sequence[str], way: str) -> Probe:
    """Return a probe: whether a waiting job that asked for a GPU by `options` starts without one after a change."""

    def probe(driver: Driver) -> Answer:
        with job(driver, "--hold", *options) as job_id:
            refused = update(driver, job_id, f"TresPerNode={way}")
            if refused and "gres" in refused.lower():  # up to Slurm 22.05 another notation
                refused = update(driver, job_id, f"TresPerNode={way.replace('gres/', 'gres:')}")
            if refused:
                return Answer(False, refused.rpartition(": ")[2])
            driver.run("scontrol", "release", str(job_id), user="root")
            if not started(driver, job_id):
                return Answer(False, f"accepted, and it does not start: {driver.job(job_id)['Reason']}")
            given = driver.run("scontrol", "--details", "show", "job", str(job_id), user="root").stdout
            has_gpu = re.search(r"(?:JOB_GRES|GRES)=\S*gpu", given)
            return Answer(not has_gpu, "accepted, and the GPU is handed out" if has_gpu else "")

    return probe


SAME_SECOND: Final = "… also within the second of the requeue"
"""The one question whose answer depends on chance: a busy machine may not get it done in a second."""

PROBES: Final[Mapping[str, Probe]] = {
    "a pyslurm that fits": pyslurm,
    "`squeue --json` has the submit line": submit_line,
    "`sacct` has the submit line (`SubmitLine`)": sacct_submit_line,
    "`squeue --json` shows `--gpus`": gpus_shown,
    "option `--muri` (SPANK), tag set at submission (job_submit)": spank_option,
    "`sbatch --admin-comment`": admin_comment_of_sbatch,
    "AdminComment of a running job can be changed": admin_comment_while_running,
    "`sacct` has the AdminComment of an ended job": sacct_admin_comment,
    "reservation of licenses alone keeps a job waiting": license_gate,
    "license given to a running job": license_while_running,
    "requeued job holds its licenses again": licenses_after_requeue,
    "requeued job starts before its old credential has expired (`StartTime`)": requeued_early,
    SAME_SECOND: requeued_in_the_same_second,
    "`requeuehold incomplete` spares ended jobs": ended_job_spared,
    "second step on a job's GPU (`srun --overlap`)": overlapping_step,
    **{
        f"`{way}` takes the GPU of a waiting job with `{name}`": without_gpus(options, way)
        for way in WAYS
        for name, options in FORMS.items()
    },
}
"""Every probe by its question, in the order of the page."""


def examine(driver: Driver, progress: Progress, questions: Collection[str] = PROBES.keys()) -> Release:
    """Ask a running sandbox these questions. A probe that fails is an answer, too."""
    driver.cancel_all()
    answers = {}
    for question, probe in ((each, PROBES[each]) for each in questions):
        progress.detail(f"{driver.instance.suite}: {question}")
        try:
            answers[question] = probe(driver)
        except SandboxError as error:
            answers[question] = Answer(False, str(error).strip().splitlines()[-1])
    today = datetime.datetime.now(datetime.UTC).date()
    return Release(driver.instance.suite, driver.instance.slurm_version, today, answers)


def examine_suite(suite: Suite, progress: Progress) -> Release:
    """Start a sandbox of a suite as a site has it, ask it, and take it down."""
    lifecycle.up("matrix", suite, SHAPE, progress)
    try:
        return examine(Driver(instance.require("matrix")), progress)
    finally:
        lifecycle.down("matrix", progress)
