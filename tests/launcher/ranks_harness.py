"""Runtimes of several ranks and DDP members on this machine, with gloo."""

import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from group_words import runtime_words
from launcher_harness import Launcher, Process
from polling import until

SLOW_MACHINE_S = 400.0
"""A group of eight scripts that takes half a minute on two free cores may take ten times that on busy ones."""

TRAIN_DDP = """\
import datetime, os, random, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import muri

seed, iterations, fail_rank, explicit = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "explicit"
rank = int(os.environ["SLURM_PROCID"])
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["SLURM_STEP_NUM_TASKS"]))
delays = random.Random(seed * 100 + rank)
data = torch.Generator().manual_seed(seed * 100 + rank)
torch.manual_seed(seed)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def samples():
    for _ in range(iterations):
        yield torch.randn(8, 16, generator=data), torch.randn(8, 1, generator=data)

def pause():
    time.sleep(delays.uniform(0, 0.003))

def train(inputs, targets):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

print("started", flush=True)
for step, (inputs, targets) in enumerate(muri.batches(samples()) if explicit else samples()):
    if rank == fail_rank and step == iterations // 2:
        raise RuntimeError("this rank fails")
    if explicit:
        with muri.stage("preprocess"):
            pause()
        with muri.stage("propagate"):
            pause()
            loss = train(inputs, targets)
            pause()
    else:
        pause()
        loss = train(inputs, targets)
    dist.all_reduce(loss)
    if step % 20 == 19 or iterations > 1000:
        print(f"{step} {loss.item():.17g}", flush=True)
weights = sum(float(p.double().sum()) for p in model.parameters())
print(f"weights {weights:.17g}", flush=True)
dist.destroy_process_group()
if os.environ["ALONE"] == "True":  # a plain process with gloo is now and then aborted by C++ while it exits
    os._exit(0)
"""


_KEPT: list[socket.socket] = []
"""Sockets that keep each port of `free_port` bound until this process ends."""


def free_port() -> int:
    """A TCP port that stays free for what listens with SO_REUSEADDR, below those that the kernel gives to connections.

    Linux lets such a listener share a port with a socket that is only bound, if both have the option. This one gets it
    after it was bound, so that it has the port alone.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        kept, port = socket.socket(), given // 2 + secrets.randbelow(given // 2)
        try:
            kept.bind(("", port))
        except OSError:
            kept.close()
            continue
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _KEPT.append(kept)
        return port


class RankedLauncher:
    """One runtime per rank, and members with one process per rank."""

    def __init__(self, launcher: Launcher, world_size: int) -> None:
        self.launcher = launcher
        self.world_size = world_size
        self.runtimes: list[Process] = []
        self.script = launcher.script(TRAIN_DDP, "train_ddp.py")
        self._key = secrets.token_hex(32)

    def start(self, *members: str, options: tuple[str, ...] = ()) -> None:
        """Start all runtimes and wait until they take members."""
        self.launcher.give_grant()
        port = free_port()
        for rank in range(self.world_size):
            command = [sys.executable, "-m", "muri.launcher.runtime.main", "--preload", ""]
            command += ["--world-size", str(self.world_size), "--status-file", str(self.path("status.json"))]
            command += runtime_words(members, options)
            environment = self.launcher.environment | {"MURI_GROUP_KEY": self._key, "PYTHONFAULTHANDLER": "1"}
            environment |= {"MURI_GROUP_PORT": str(port), "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
            environment["SLURM_PROCID"] = str(rank)
            log = self.log_path(rank).open("ab")
            self.runtimes.append(self.launcher.spawn(command, environment, stderr=log))
        for rank in range(self.world_size):
            serves = self.path(f"r{rank}-status.json" if rank else "status.json").exists
            until(lambda serves=serves: serves() or any(p.poll() is not None for p in self.runtimes), f"rank {rank}")
            assert serves(), self.log(rank)

    def path(self, name: str) -> Path:
        """A file of the test."""
        return self.launcher.folder / name

    def log_path(self, rank: int) -> Path:
        """The log of one rank's runtime."""
        return self.path(f"runtime.r{rank}.log")

    def log(self, rank: int) -> str:
        """What one rank's runtime has logged."""
        return self.log_path(rank).read_text()

    def member(
        self, job_id: str, *arguments: object, alone: bool = False, script: Path | None = None, **environment: str
    ) -> list[Process]:
        """Start all tasks of a member as `srun muri run train_ddp.py …` would, or of another script."""
        port = str(free_port())
        processes = []
        for rank in range(self.world_size):
            variables = {"MURI_REQUEUE_WAIT_S": "0.1"} | environment
            variables |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)}
            variables |= {"SLURM_STEP_NUM_TASKS": str(self.world_size), "SLURM_STEP_NODELIST": "localhost"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURM_LOCALID": str(rank)}
            variables["ALONE"] = str(alone)
            words = (*["--no-attach"] * alone, script or self.script, *arguments)
            processes.append(self.launcher.member(job_id, *words, into=f"{job_id}.r{rank}", **variables))
        return processes

    def out(self, job_id: str, rank: int, kind: str = "out") -> str:
        """What one task has written."""
        return self.launcher.path(f"{job_id}.r{rank}", kind).read_text()

    def exit_codes(self, processes: list[Process]) -> list[int]:
        """The exit codes of processes that should end by themselves; else fail with what every runtime is doing."""
        end_s = time.monotonic() + SLOW_MACHINE_S
        for process in processes:
            try:
                process.wait(timeout=max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"after {SLOW_MACHINE_S:g} s:\n{self._stacks()}") from None
        return [process.returncode for process in processes]

    def _stacks(self) -> str:
        """Every thread's stack in every runtime, which ends of it."""
        for runtime in self.runtimes:
            runtime.send_signal(signal.SIGABRT)
        for runtime in self.runtimes:
            runtime.wait(timeout=SLOW_MACHINE_S)
        written = sorted(self.launcher.folder.glob("*.r*.out")) + sorted(self.launcher.folder.glob("*.r*.err"))
        texts = [f"{path.name}: {path.read_text()[-200:]}" for path in written]
        return "\n".join(texts + [self.log(rank) for rank in range(self.world_size)])

    def end(self) -> None:
        """End the group as its host does: rank 0 is told, and tells the others."""
        self.runtimes[0].send_signal(signal.SIGTERM)
