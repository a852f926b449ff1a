"""A Slurm that starts tasks with SIGCHLD blocked, as 25.05 does."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

BLOCKS = """\
#include <signal.h>
#include <stddef.h>
#include <slurm/spank.h>
SPANK_PLUGIN(blocks, 1)
int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    return sigprocmask(SIG_BLOCK, &set, NULL);
}
"""
COMPILE = (
    "cc -shared -fPIC -o /usr/lib/blocks.so -x c - && echo required /usr/lib/blocks.so >> /etc/slurm/plugstack.conf"
)


@contextmanager
def tasks_that_block_sigchld(cluster: Driver) -> Iterator[None]:
    """Let Slurm start every task so, those of batch scripts, too."""
    try:
        cluster.run("sh", "-c", COMPILE, user="root", stdin=BLOCKS)
        yield
    finally:
        cluster.cancel_all()
        cluster.run("sed", "-i", "/blocks.so/d", "/etc/slurm/plugstack.conf", user="root")


@pytest.mark.thorough
def test_members_of_a_slurm_that_blocks_sigchld_end_as_their_scripts_do(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu)
    with tasks_that_block_sigchld(one_gpu):
        told = one_gpu.submit("-p", "train", "--wrap=srun grep SigBlk /proc/self/status")
        one_gpu.wait_state(told)
        assert muri.output(told).split() == ["SigBlk:", f"{1 << 16:016x}"]  # SIGCHLD is signal 17
        with muri.training():
            jobs, _ = muri.start_group("load", "propagate", code=7)
        ended = [one_gpu.wait_state(job) for job in jobs]
        assert [(job["JobState"], job["ExitCode"]) for job in ended] == [("FAILED", "7:0")] * 2
        one_gpu.wait_until(lambda: muri.hosts() == [], "the end of the group")
