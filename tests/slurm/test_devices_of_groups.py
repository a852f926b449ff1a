"""Who of a group can open the GPU where cgroups constrain devices: its runtime, and not the members' own steps."""

from conftest import on_sites
from devices import constrained, opened_by_step, opener
from muri_cluster import STAGES, MuriCluster

from muri.profiler.records import ProfileKey
from sandbox.driver import Driver

TRAIN_PY = """\
import subprocess, sys, time
import muri

print("runtime:", subprocess.check_output({opens!r}, shell=True, text=True).strip(), flush=True)
for step in range(20):
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.07 if stage == sys.argv[3] else 0.01)
"""
TRAIN_SH = """\
#!/bin/sh
echo "batch: $({opens})"
echo "step: $(srun {opens} 2>/dev/null)"
exec muri run train.py "$@"
"""


def cluster_with_scripts(site: Driver) -> MuriCluster:
    muri = MuriCluster(site)
    opens = opener(site)
    site.write("train.py", TRAIN_PY.format(opens=opens))
    site.write("train.sh", TRAIN_SH.format(opens=opens))
    for slow in STAGES:
        muri.know_profile(ProfileKey(slow, 8, 1, "tesla"), [0.07 if stage == slow else 0.01 for stage in STAGES])
    return muri


@constrained
@on_sites("forky", "trixie")
def test_a_groups_runtime_opens_its_gpu_and_the_members_steps_none(site: Driver) -> None:
    muri = cluster_with_scripts(site)
    other = site.submit("-p", "train", "--gres=gpu:1", "--wrap=exec sleep 600", user="bob", on="login")
    site.wait_state(other, "RUNNING")
    jobs = [muri.submit(kind) for kind in ("load", "propagate")]
    ended = muri.cycles_until_ended(*jobs)
    assert [ended[job]["ExitCode"] for job in jobs] == ["0:0", "0:0"]
    assert all("muri-state" in ended[job]["AdminComment"] for job in jobs)  # grouped
    outputs = [muri.output(job).splitlines() for job in jobs]
    assert [lines[:2] for lines in outputs] == [["batch: ", "step: "]] * 2
    opened = {lines[2] for lines in outputs}
    assert len(opened) == 1
    assert opened <= {"runtime: /dev/muri-gpu0", "runtime: /dev/muri-gpu1"}
    site.wait_until(lambda: muri.hosts() == [], "the end of the group")
    assert opened_by_step(site, "--partition=train") == []
