"""How fast an all-reduce is: the ring model, its measured figures in the store, and the measurement.

It is measured between processes on this node or between the tasks of a Slurm step. Run as a module, this is one of
the processes on this node; rank 0 prints its timings.
"""

import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import click

from muri.errors import MuriError
from muri.foreign import json_of
from muri.installed import what_brings
from muri.profiler import figures
from muri.profiler.records import ProfileError
from muri.profiler.store import Document, ProfileStore
from muri.units import MIB, MIB_PER_GIB

if TYPE_CHECKING:
    import torch

SIZES_MIB: Final = (1 / 256, 1 / 16, 1.0, 8.0, 64.0)
"""From sizes that latency decides to sizes that bandwidth decides."""

LARGE_MIB: Final = 8.0
LEAST_REPEATS: Final = 5
MEASURE_S: Final = 0.15
LIMIT_S: Final = 120.0
_FLOAT_BYTES: Final = 4
log = logging.getLogger("muri.profiler")

BANDWIDTH_KIND: Final = "bandwidth"
"""Kind of the store's documents that hold bandwidths."""

DEFAULT_MIB_PER_S: Final = 10.0 * MIB_PER_GIB
"""Assumed where nothing was measured: between a 100 Gbit/s network and PCIe 3.0 × 16."""

DEFAULT_LATENCY_S: Final = 20e-6
"""Assumed for one step of the ring: the order of NCCL's over PCIe and InfiniBand."""


class AllReduceError(MuriError):
    """The ranks could not be started, could not find each other, or one of them failed."""


class Timing(NamedTuple):
    """One size.

    Attributes:
        size_mib: Data of each rank.
        seconds: Median time of an all-reduce.
    """

    size_mib: float
    seconds: float


class Fit(NamedTuple):
    """The ring model's two figures.

    Attributes:
        mib_per_s: What a link carries.
        latency_s: Seconds of a step of the ring beside that.
    """

    mib_per_s: float
    latency_s: float


def fit(timings: Sequence[Timing], ranks: int) -> Fit:
    """Find the ring's latency from the smallest size, and its bandwidth from those of `LARGE_MIB` or more.

    The large sizes decide because gradients travel in large pieces (PyTorch's DDP: 25 MiB).

    Raises:
        AllReduceError: The times don't grow with the size; no bandwidth follows from them.
    """
    smallest = min(timings)
    latency_s = smallest.seconds / (2 * (ranks - 1))
    large = [timing for timing in timings if timing.size_mib >= LARGE_MIB]
    seconds = sum(timing.seconds - smallest.seconds for timing in large)
    if seconds <= 0:
        raise AllReduceError("an all-reduce takes no longer with more data; measure again on a quiet machine")
    return Fit(ring_share(ranks) * sum(timing.size_mib for timing in large) / seconds, latency_s)


def time_all_reduce(init: str, rank: int, ranks: int, backend: str, local_rank: int) -> tuple[Timing, ...]:
    """Be one rank: join the others, and time all-reduces of every size.

    Args:
        init: How the ranks find each other, as `torch.distributed` takes it.
        rank: Which one this is.
        ranks: How many there are.
        backend: "gloo" or "nccl".
        local_rank: Which GPU of this node, for nccl.

    Raises:
        AllReduceError: The ranks did not find each other.
    """
    import torch  # the core works without PyTorch
    from torch import distributed

    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    try:
        limit = timedelta(seconds=LIMIT_S)
        distributed.init_process_group(backend, init_method=init, rank=rank, world_size=ranks, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise AllReduceError(f"rank {rank} of {ranks} did not find the others with {backend}: {error}") from error
    try:
        return tuple(
            Timing(size, _time(torch.zeros(int(size * MIB) // _FLOAT_BYTES, device=device))) for size in SIZES_MIB
        )
    finally:
        distributed.destroy_process_group()


def _time(data: "torch.Tensor") -> float:
    """Median seconds of an all-reduce; rank 0 decides for all how many there are."""
    import torch
    from torch import distributed

    def once() -> float:
        distributed.barrier()
        begun_s = time.perf_counter()
        distributed.all_reduce(data)
        if data.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun_s

    warm_s = max(once(), once())
    repeats = torch.tensor([max(LEAST_REPEATS, min(200, int(MEASURE_S / max(warm_s, 1e-6))))], device=data.device)
    distributed.broadcast(repeats, 0)
    return statistics.median(once() for _ in range(int(repeats.item())))


def measure_on_this_node(ranks: int, backend: str) -> tuple[Timing, ...]:
    """Time all-reduces between so many processes of this node.

    Raises:
        AllReduceError: A process failed; the message has its last line.
    """
    with tempfile.TemporaryDirectory(prefix="muri-allreduce-") as folder:
        command = [sys.executable, "-m", "muri.profiler.allreduce", f"file://{folder}/ranks", str(ranks), backend]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        try:
            told = [process.communicate(timeout=LIMIT_S) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise AllReduceError(f"the ranks took more than {LIMIT_S:.0f} s; fewer --ranks may help") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for rank, (process, (_, words)) in enumerate(zip(processes, told, strict=True)):
        if process.returncode:
            last = (words.strip().splitlines() or ["nothing"])[-1]
            raise AllReduceError(f"rank {rank} ended with code {process.returncode}; its last words: {last}")
    return tuple(Timing(*pair) for pair in json_of(told[0][0]))


class Step(NamedTuple):
    """The Slurm step that this process is a task of.

    Attributes:
        rank: Which task.
        ranks: Tasks of the step.
        nodes: Nodes of the step.
        local_rank: Which task of its node.
        init: How the tasks find each other.
    """

    rank: int
    ranks: int
    nodes: int
    local_rank: int
    init: str

    def meeting(self, backend: str) -> tuple[str, int, int, str, int]:
        """The arguments of `time_all_reduce`."""
        return self.init, self.rank, self.ranks, backend, self.local_rank


def step_of(environment: Mapping[str, str]) -> Step | None:
    """The step with several tasks that the environment tells of, None when there is none.

    The tasks meet on the step's first node, at $MASTER_PORT or a port that follows from the job's id.
    """
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID", "SLURM_JOB_ID")
    values = [environment.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        return None
    rank, ranks, nodes, local_rank, job = map(int, values)
    if ranks < 2:
        return None
    from ClusterShell.NodeSet import NodeSet

    first = next(iter(NodeSet(environment.get("SLURM_STEP_NODELIST", "127.0.0.1"))))
    port = environment.get("MASTER_PORT") or str(20_000 + job % 20_000)
    return Step(rank, ranks, nodes, local_rank, f"tcp://{environment.get('MASTER_ADDR') or first}:{port}")


def usable_backend(wanted: str, local_ranks: int) -> str:
    """The backend for what this node has: nccl with GPUs enough, else gloo.

    Args:
        wanted: "auto", "nccl" or "gloo".
        local_ranks: Ranks on this node.

    Raises:
        AllReduceError: PyTorch is not installed, or nccl is wanted and not usable here.
    """
    if find_spec("torch") is None:
        raise AllReduceError(f"measuring a bandwidth needs PyTorch: {what_brings('torch')}")
    if wanted == "gloo":
        return wanted
    import torch  # takes seconds

    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    if wanted == "nccl" and gpus < local_ranks:
        raise AllReduceError(
            f"nccl needs a GPU for each rank: {local_ranks} ranks here, {gpus} GPUs that PyTorch can use. "
            "Give fewer --ranks, or --backend gloo"
        )
    return wanted if wanted != "auto" else "nccl" if gpus >= local_ranks else "gloo"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured all-reduce between the ranks of one job.

    Attributes:
        gpu_type: GRES type of the GPUs.
        nodes: Nodes that the ranks ran on.
        ranks_per_node: Ranks on each node, one for each GPU.
        mib_per_s: What each link of the ring carries, MiB per second.
        latency_s: Seconds that a step of the ring takes beside that.
        backend: What carried it: "nccl" or "gloo".
        measured_at: UTC time, ISO-8601.
    """

    gpu_type: str
    nodes: int
    ranks_per_node: int
    mib_per_s: float
    latency_s: float
    backend: str = "nccl"
    measured_at: str = ""

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give.

        Raises:
            ProfileError: A figure is outside of what `muri.profiler.figures` allows.
        """
        for name, bounds, value in (
            ("number of nodes", figures.GPU_COUNT, self.nodes),
            ("number of ranks per node", figures.GPU_COUNT, self.ranks_per_node),
            ("MiB/s", figures.BANDWIDTH_MIB_PER_S, self.mib_per_s),
            ("latency", figures.TIME_S, self.latency_s),
        ):
            if fault := bounds.fault(value):
                raise ProfileError(f"bandwidth {self.name}: {name} {fault}")

    @property
    def name(self) -> str:
        """Name in the store: GPU type, ranks per node × nodes."""
        return f"{self.gpu_type}/{self.ranks_per_node}x{self.nodes}"

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node

    def to_document(self) -> Document:
        """As the store keeps it."""
        body = asdict(self)
        return Document(self.name, body.pop("measured_at"), body)

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Read what `to_document` made; figures of a newer version are ignored.

        Raises:
            ProfileError: A figure is missing or cannot be true.
        """
        known = {item.name: document.body[item.name] for item in fields(cls) if item.name in document.body}
        try:
            return cls(**known, measured_at=document.measured_at)
        except TypeError as error:
            raise ProfileError(f"bandwidth {document.name} in the store: {error}") from error


def bandwidths(store: ProfileStore) -> tuple[Bandwidth, ...]:
    """All bandwidths in the store; one that cannot be true is left out, and the log names it."""
    found: list[Bandwidth] = []
    for document in store.documents(BANDWIDTH_KIND):
        try:
            found.append(Bandwidth.from_document(document))
        except ProfileError as error:
            log.warning("%s", error)
    return tuple(found)


def ring_share(ranks: int) -> float:
    """How often each link of a ring carries the gradients in an all-reduce: 2 (n − 1) / n."""
    return 2 * (ranks - 1) / ranks


def ring_s(size_over_bandwidth_s: float, latency_s: float, ranks: int) -> float:
    """Seconds of a ring all-reduce: 2 (n − 1) steps, each of one n-th of the data.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    Args:
        size_over_bandwidth_s: Seconds in which a link would carry all the data once.
        latency_s: Seconds of a step beside the data.
        ranks: Ranks in the ring; a single one exchanges nothing.
    """
    return ring_share(ranks) * size_over_bandwidth_s + 2 * (ranks - 1) * latency_s


def nearest_bandwidth(known: Iterable[Bandwidth], gpu_type: str, ranks: int) -> Bandwidth | None:
    """The measurement between GPUs of this type whose number of ranks is nearest, None without any."""
    of_type = [item for item in known if item.gpu_type == gpu_type and item.ranks > 1]
    return min(of_type, key=lambda item: (abs(math.log(item.ranks / ranks)), -item.nodes), default=None)


@click.command()
@click.argument("init")
@click.argument("ranks", type=int)
@click.argument("backend")
@click.argument("rank", type=int)
def main(init: str, ranks: int, backend: str, rank: int) -> None:
    """Be one rank on this node."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timings = time_all_reduce(init, rank, ranks, backend, rank)
    if rank == 0:
        print(json.dumps(timings))


if __name__ == "__main__":
    main()
