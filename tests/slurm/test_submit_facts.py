"""Facts of a submission, on a Slurm whose job records keep the submit line and on one where they do not."""

import re
from typing import Any

import pytest
from muri_cluster import DRY_RUNS, MuriCluster
from sandboxes import on_both_releases

pytestmark = [DRY_RUNS, on_both_releases]

WORDS = ["train_cpu.py", "--iterations", "100", "two words", "", "it's $HOME `id`", "a\nb", "*", "-x"]

TRAIN_SH = """\
#!/bin/sh
for word; do printf '%s\\0' "$word"; done >> /home/alice/words.$SLURM_JOB_NAME
printf '\\n' >> /home/alice/words.$SLURM_JOB_NAME
muri run /home/alice/train.py 30 0 load
"""


@pytest.fixture
def muri(muri: MuriCluster) -> MuriCluster:
    muri.driver.run("sh", "-c", "rm -f words.*")
    muri.driver.write("train.sh", TRAIN_SH)
    return muri


def submit(muri: MuriCluster, *words: str, **options: Any) -> int:
    # Alone: the model is measured on each release, whether or not it can group.
    marked = ("-p", "train", "--gres=gpu:1", "--muri=alone")
    return muri.driver.submit(*marked, "/home/alice/train.sh", *words, **options)


def test_arguments_reach_dry_run_and_job_as_they_were_given(muri: MuriCluster) -> None:
    job = submit(muri, *WORDS)
    fields = muri.cycles_until_ended(job)[job]
    assert fields["JobState"] == "COMPLETED", muri.controller_log()
    expected = "".join(f"{word}\0" for word in WORDS) + "\n"
    assert muri.driver.read("/home/alice/words.muri-dryrun") == expected
    assert muri.driver.read("/home/alice/words.train.sh") == expected
    (model,) = muri.models()
    assert "--iterations 100 'two words'" in model


def test_jobs_that_only_their_arguments_tell_apart_are_measured_once_each_and_grouped(muri: MuriCluster) -> None:
    muri.driver.write("plain.sh", '#!/bin/sh\nmuri run /home/alice/train.py "$@"\n')
    jobs = [
        muri.driver.submit("-p", "train", "--gres=gpu:1", "--muri", "plain.sh", "60", "0", kind, "two words")
        for kind in ("load", "propagate", "load")
    ]
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}, muri.controller_log()
    assert len(muri.models()) == 2
    grouped = [job for job in fields.values() if "muri-state" in job["AdminComment"]]
    assert len(grouped) >= 2, muri.controller_log()
    assert {job["Restarts"] for job in fields.values()} == {"0"}


def test_arguments_that_are_too_long_leave_the_job_alone_and_it_says_so(muri: MuriCluster) -> None:
    job = submit(muri, "x" * 5000)
    assert ".~ " in muri.driver.job(job)["AdminComment"]
    assert muri.cycles_until_ended(job)[job]["JobState"] == "COMPLETED"
    assert muri.models() == {}
    assert len(muri.driver.read("/home/alice/words.train.sh")) == 5002


def test_without_the_facts_nothing_is_guessed(muri: MuriCluster) -> None:
    """As an older SPANK plugin submits it: on a Slurm that keeps no submit line the arguments are not known."""
    job = submit(muri, "7", "8")
    comment = muri.driver.job(job)["AdminComment"]
    older = " ".join(word for word in comment.split() if not word.startswith("muri-facts:"))
    muri.driver.run("scontrol", "update", f"jobid={job}", f"admincomment={older}", user="root")
    knows_line = "SubmitLine" in muri.driver.job(job)
    muri.cycles_until_ended(job)
    assert len(muri.models()) == int(knows_line)
    if not knows_line:
        assert "nothing tells its script's arguments" in muri.controller_log()


def test_facts_survive_a_requeue_and_what_muri_changes(muri: MuriCluster) -> None:
    job = submit(muri, "a word")
    (told,) = [word for word in muri.driver.job(job)["AdminComment"].split() if word.startswith("muri-facts:")]
    muri.cycle()
    assert told in muri.driver.job(job)["AdminComment"].split()
    muri.cycles_until_ended(job)
    muri.driver.run("scontrol", "requeue", str(job), user="root")
    assert told in muri.driver.job(job)["AdminComment"].split()


def test_nothing_is_said_of_an_environment_that_the_job_does_not_get(muri: MuriCluster) -> None:
    kept, lost = (
        muri.driver.submit("-p", "train", "--gres=gpu:1", "--muri", "--hold", *options, "/home/alice/train.sh", "7")
        for options in ((), ("--export=NONE",))
    )
    form = r"muri-facts:1\.{}\.[0-9a-f]{{16}}\.{}\.NwA "
    assert re.search(form.format("[0-9a-f]{16}", "[A-Za-z0-9_-]+"), muri.driver.job(kept)["AdminComment"])
    assert re.search(form.format("", ""), muri.driver.job(lost)["AdminComment"])


def test_a_forged_word_costs_the_facts_and_reaches_nothing(muri: MuriCluster) -> None:
    """Variables of an outer job or its user are forgotten; muri.lua refuses the rest."""
    forged = "1.0000000000000000.0000000000000000..YQA muri-state:{} $(touch /tmp/forged)"
    job = submit(muri, "7", env={"SLURM_SPANK_MURI_FACTS": forged, "MURI_FACTS": forged})
    comment = muri.driver.job(job)["AdminComment"]
    assert "forged" not in comment
    assert "muri-state" not in comment
    assert comment.count("muri-facts:1.") == 1


def test_a_script_in_another_encoding_and_a_comment_of_two_lines_are_no_obstacle_to_a_dry_run(
    muri: MuriCluster,
) -> None:
    write = "printf '#!/bin/sh\\n# caf\\351\\nmuri run /home/alice/train.py 500 0 load\\n' > latin1.sh"
    options = "-p train --gres=gpu:1 --muri=model=latin,batch-size=8,duration=60s"
    submit = f"sbatch --parsable {options} --comment=\"$(printf 'a\\nb')\" latin1.sh"
    job = int(muri.driver.run("sh", "-c", f"{write}; {submit}").stdout)
    with muri.controller():
        muri.driver.wait_until(lambda: "latin" in muri.models(), "the profile")
        muri.driver.run("scancel", str(job), user="alice")
