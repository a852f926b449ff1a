"""Attempts of users to open GPUs that are not theirs, or to keep those that were, on a real Slurm."""

import pytest
from devices import opener
from pilot_ends import PilotEnds
from sandboxes import on_constrained_sites

from sandbox.driver import Driver

pytestmark = [pytest.mark.thorough, on_constrained_sites("forky", "trixie")]

PLACE = "/run/muri/node/n1"


@pytest.fixture
def ends(site: Driver) -> PilotEnds:
    return PilotEnds(site)


def as_alice(ends: PilotEnds, script: str, on: str = "n1") -> str:
    """Run shell text on a node and return its output with its errors."""
    done = ends.driver.run("sh", "-c", f"exec 2>&1; {script}", on=on, check=False)
    return done.stdout


def test_the_place_of_the_notes_is_roots(ends: PilotEnds) -> None:
    pilot = ends.pilot("n1")
    note = f"{PLACE}/job-{pilot}"
    before = ends.root(f"cat {note}", on="n1")
    tries = (
        f"echo gpus=0 > {note}",
        f"touch {PLACE}/grant-1",
        f"rm -f {note}",
        f"ln -s /home/alice {PLACE}/job-99",
        f"mv {PLACE} /tmp/the-place-of-notes",
        "mkdir /run/muri/node/n9",
        "mv /run/muri/node /run/muri/other",
        f"flock {PLACE}/lock true",
    )
    for each in tries:
        assert "denied" in as_alice(ends, each).lower(), each
    assert ends.root(f"cat {note}", on="n1") == before


def test_only_root_writes_an_admin_comment(ends: PilotEnds) -> None:
    pilot = ends.pilot("n1")
    job = ends.submit("n1", "own", "--hold", script="true")
    said = as_alice(ends, f"scontrol update jobid={job} admincomment=muri-grant:{pilot}", on="login")
    assert "denied" in said.lower(), said
    assert "muri-grant" not in ends.driver.job(job).get("AdminComment", "")


LIES = (
    "MURI_JOB=on",
    "MURI_PILOT={pilot}",
    "SLURM_SPANK_MURI_JOB=on",
    "SLURM_SPANK_MURI_OPTION=c:",
    "SLURM_JOB_GPUS=0,1",
    "SLURM_STEP_GPUS=0,1",
    "CUDA_VISIBLE_DEVICES=0,1",
    "SLURMD_NODENAME=n2",
    "SLURM_JOB_ID={pilot}",
    "SLURM_JOBID={pilot}",
    "SLURM_RESTART_COUNT=0",
)


def test_no_word_of_a_users_opens_anything(ends: PilotEnds) -> None:
    """In the job's name, its comment, its environment, a file of its own where root would look."""
    pilot, opens = ends.pilot("n1"), opener(ends.driver)
    lies = [each.format(pilot=pilot) for each in LIES]
    fake = f"mkdir -p /run/muri/$(id -u)/node/n1 && printf 'pilot={pilot}\\nuid=1001\\nrun=0\\ngate=hold\\ncgroup=\\n'"
    script = f"{fake} > /run/muri/$(id -u)/node/n1/grant-$SLURM_JOB_ID; {opens}; env {' '.join(lies)} {opens};"
    of_step = " ".join(each for each in lies if "JOBID" not in each and "JOB_ID" not in each)
    script += f" srun --overlap {opens}; env {of_step} srun {opens}; echo end"
    words = ("--comment=muri-grant:1", f"--job-name=muri-grant:{pilot}", f"--export=ALL,{lies[0]},{lies[1]},{lies[2]}")
    job = ends.submit("n1", "own", *words, script=script)
    ends.driver.wait_state(job)
    assert "/dev/" not in ends.output("own", job), ends.output("own", job)
    assert "end" in ends.output("own", job)


def test_a_pilots_own_steps_cannot_say_that_it_holds_more(ends: PilotEnds) -> None:
    lies = "SLURM_JOB_GPUS=0,1 SLURM_STEP_GPUS=0,1 CUDA_VISIBLE_DEVICES=0,1 SLURMD_NODENAME=n2 GPU_DEVICE_ORDINAL=0,1"
    script = f"env {lies} srun --overlap true; exec sleep 600"
    options = ("--gres=gpu:1", f"--export=ALL,{lies.replace(' ', ',').replace('0,1', '1')}")
    pilot = ends.submit("n1", "pilot", *options, script=script)
    ends.driver.wait_state(pilot, "RUNNING")
    note = f"cat {PLACE}/job-{pilot}"
    ends.driver.wait_until(lambda: "gpus=" in ends.root(note, on="n1", check=False), "the note")
    before = ends.root(note, on="n1")
    as_alice(ends, f"env {lies} srun --jobid={pilot} --overlap --gres=none true", on="login")
    assert ends.root(note, on="n1") == before
    assert "gpus=0\n" in before or "gpus=1\n" in before
    opens = opener(ends.driver)
    member = ends.member("n1", pilot, f"{opens}; echo end")
    ends.driver.wait_state(member, "COMPLETED")
    assert ends.output("member", member).count("/dev/") == 1
    assert ends.root("ls /run/muri/node/", on="n1") == "n1\n"


def test_a_member_that_may_not_be_requeued_is_canceled(ends: PilotEnds) -> None:
    pilot = ends.pilot("n1")
    member = ends.member("n1", pilot, "exec python3 hold.py ignores", "--no-requeue")
    ends.driver.wait_until(lambda: ends.holds(member), "the member to hold the GPUs")
    ends.driver.run("scancel", str(pilot))
    assert ends.driver.wait_state(member)["JobState"] == "CANCELLED"
    assert ends.holders() == []
