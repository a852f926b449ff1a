"""Trains one of five models, each with a bottleneck of its own; see the classes for what each does.

    python train.py resnet18 --log ends.txt --data DIR --stop stop
    python train.py gpt2 small --tiny --device cpu --seconds 1 --log ends.txt --data DIR
    muri run train.py vgg16 --log ends.txt --data DIR --iterations 100

The log gets a line for each iteration: the monotonic clock. What else is known of the models stands in a JSON file
beside it, with the same name: losses, stage times by CUDA events, GPU memory. VGG-16 marks its stages itself, because
no hook sees its network; hooks find those of the others.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from kernels import KernelError, stray_write
from models import ACTIONS, CLASSES, OBSERVATION, TOKENS, ActorCritic, Gpt2, resnet18, vgg16
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import muri

WARM_ITERATIONS = 5  # Not timed, where the time is a number of seconds; two more are, on however slow a machine
LAST_ITERATIONS = 400  # Stage times are those of this many last iterations
FILL_BYTES = 1 << 30  # Allocation step of a job that is to run out of memory


class Stopwatch:
    """What each stage takes, as the script itself measures it: by the host's clock, on a GPU by CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._spans: list[dict[str, list[Any]]] = [defaultdict(list)]

    @contextlib.contextmanager
    def host(self, stage: str) -> Iterator[None]:
        """Time of the calling thread."""
        begin_s = time.perf_counter()
        yield
        self._spans[-1][stage].append(time.perf_counter() - begin_s)

    @contextlib.contextmanager
    def gpu(self, stage: str) -> Iterator[None]:
        """From the first kernel that is queued within to the end of the last one."""
        if not self._events:
            with self.host(stage):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._spans[-1][stage].append((begin, end))

    def next_iteration(self) -> None:
        """What follows belongs to the next iteration."""
        self._spans.append(defaultdict(list))
        del self._spans[:-LAST_ITERATIONS]

    def stage_s(self) -> dict[str, float]:
        """Mean seconds of each stage in an iteration, without the first ones; the GPU has to be done."""
        counted = self._spans[WARM_ITERATIONS:-1]
        stages = sorted({stage for spans in counted for stage in spans})
        return {stage: sum(_seconds(spans[stage]) for spans in counted) / len(counted) for stage in stages}


def _seconds(spans: list[Any]) -> float:
    return sum(each if isinstance(each, float) else each[0].elapsed_time(each[1]) / 1e3 for each in spans)


class Samples(Dataset[torch.Tensor]):
    """Samples by number, each of them read and then prepared."""

    def __init__(self, read: Any, transform: Any, watch: Stopwatch) -> None:
        self.read, self.watch = read, watch
        self.transform = self._timed(transform)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Read and prepare one."""
        with self.watch.host("load"):
            sample = self.read(number)
        return self.transform(sample)

    def _timed(self, transform: Any) -> Any:
        def timed(sample: Any) -> Any:
            with self.watch.host("preprocess"):
                return transform(sample)

        return timed


class Endless(Sampler[int]):
    """Random numbers without end, the same in each run."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        """Begin anew."""
        random = np.random.default_rng(0)
        while True:
            yield int(random.integers(self._count))


class Job:
    """A model, where its batches come from, and how it learns from one."""

    batch, side = 0, 0

    def __init__(self, options: argparse.Namespace) -> None:
        self.tiny, self.device, self.folder = options.tiny, torch.device(options.device), options.data
        self.watch = Stopwatch(self.device)
        self.model = self.make_model().to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)

    def make_model(self) -> nn.Module:
        """The model, on the CPU."""
        raise NotImplementedError

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        """The loss to minimize; for images the cross entropy with labels 0, 1, 2 and so on."""
        labels = torch.arange(len(inputs), device=self.device) % CLASSES
        return nn.functional.cross_entropy(self.model(inputs), labels)

    def batches(self) -> Iterator[torch.Tensor]:
        """Batches without end, on the CPU."""
        raise NotImplementedError

    def loader(self, read: Any, transform: Any, count: int) -> Iterator[torch.Tensor]:
        """Batches of `count` samples, in an order that is the same in each run."""

        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            with self.watch.host("preprocess"):
                return torch.stack(samples)

        samples = Samples(read, transform, self.watch)
        loader: DataLoader[torch.Tensor] = DataLoader(
            samples, batch_size=self.batch, sampler=Endless(count), collate_fn=collate
        )
        return iter(loader)

    def images_in_memory(self) -> Iterator[torch.Tensor]:
        """Batches of random images that are made once."""
        pool = torch.rand(2 * self.batch, 3, self.side, self.side, generator=torch.Generator().manual_seed(0))
        return self.loader(pool.__getitem__, lambda image: image, len(pool))

    def learn(self, batch: torch.Tensor) -> torch.Tensor:
        """One optimizer step; returns the loss, still on the device."""
        inputs = batch.to(self.device)
        with self.watch.gpu("propagate"):
            self.optimizer.zero_grad()
            loss = self.loss(inputs)
            loss.backward()
            self.optimizer.step()
        return loss.detach()


class ResNet18(Job):
    """Bound by storage: reads its images from disk, past the page cache, and crops them."""

    batch, read_side, side = 64, 384, 224

    def make_model(self) -> nn.Module:
        """ResNet-18."""
        if self.tiny:
            self.batch, self.read_side, self.side = 2, 40, 32
        return resnet18(8 if self.tiny else 64)

    def batches(self) -> Iterator[torch.Tensor]:
        """Random places of one large file."""
        size = self.read_side**2 * 3
        file = os.open(self.folder / "images.bin", os.O_RDONLY)
        count = os.fstat(file).st_size // size

        def read(number: int) -> bytes:
            os.posix_fadvise(file, number * size, size, os.POSIX_FADV_DONTNEED)
            return os.pread(file, size, number * size)

        return self.loader(read, self._prepare, count)

    def _prepare(self, data: bytes) -> torch.Tensor:
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(3, self.read_side, self.read_side)
        return pixels[:, : self.side, : self.side].float().sub_(127.5).div_(64.0)


class Gpt2Small(Job):
    """Bound by the GPU."""

    batch, length = 4, 512

    def make_model(self) -> nn.Module:
        """GPT-2 small."""
        if self.tiny:
            self.batch, self.length = 2, 16
            return Gpt2(width=32, heads=2, depth=2, length=32)
        return Gpt2()

    def batches(self) -> Iterator[torch.Tensor]:
        """Random tokens."""

        def read(number: int) -> Any:
            return np.random.default_rng(number).integers(0, TOKENS, self.length + 1)

        return self.loader(read, torch.from_numpy, 1 << 20)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the next token."""
        scores = self.model(inputs[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), inputs[:, 1:].flatten())


class A2c(Job):
    """Bound by the CPU: simulates its environments (damped oscillators) step by step."""

    environments, steps = 256, 16

    def make_model(self) -> nn.Module:
        """The actor-critic, and the environments' dynamics."""
        self.environments, self.steps = (8, 2) if self.tiny else (self.environments, self.steps)
        random = np.random.default_rng(0)
        self.states = random.standard_normal((self.environments, OBSERVATION)).astype(np.float32)
        self.dynamics = np.linalg.qr(random.standard_normal((OBSERVATION, OBSERVATION)))[0].astype(np.float32)
        self.push = random.standard_normal((ACTIONS, OBSERVATION)).astype(np.float32)
        self.later = torch.ones(self.steps, self.steps, device=self.device).triu()
        return ActorCritic(32 if self.tiny else 512)

    def batches(self) -> Iterator[torch.Tensor]:
        """Nothing is read: the script has no loader, as reinforcement learning has none."""
        return itertools.repeat(torch.empty(0))

    def learn(self, batch: torch.Tensor) -> torch.Tensor:
        """Play some steps with the current policy, then learn from them."""
        return super().learn(self._play())

    def _play(self) -> torch.Tensor:
        seen = []
        for _ in range(self.steps):
            seen.append(torch.from_numpy(self.states))
            with self.watch.gpu("propagate"), torch.no_grad():
                scores, _ = self.model(seen[-1].to(self.device))
                chosen = torch.distributions.Categorical(logits=scores).sample()
            actions = chosen.cpu().numpy()
            with self.watch.host("preprocess"):
                for _ in range(8):  # physics in finer steps than decisions
                    self.states = np.tanh(self.states @ self.dynamics + 0.1 * self.push[actions])
        return torch.stack(seen)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        """Policy gradient with the advantage, value error, entropy."""
        scores, values = self.model(inputs)
        returns = self.later @ -inputs.square().mean(-1)
        advantage = returns - values
        actions = scores.argmax(-1).flatten()
        surprise = nn.functional.cross_entropy(scores.flatten(0, 1), actions, reduction="none")
        entropy = torch.distributions.Categorical(logits=scores).entropy().mean()
        gain = surprise * advantage.detach().flatten()
        return gain.mean() + 0.5 * advantage.square().mean() - 0.01 * entropy


class Vgg16(Job):
    """Bound by the exchange of its 138 million gradients, which go to the host and back as at a parameter server."""

    batch, side = 32, 224

    def make_model(self) -> nn.Module:
        """VGG-16, and memory for its gradients on the host."""
        if self.tiny:
            self.batch, self.side = 2, 32
        model = vgg16(4, 32, 32) if self.tiny else vgg16()
        pinned = self.device.type == "cuda"
        self.gradients = [torch.empty_like(each, pin_memory=pinned) for each in model.parameters()]
        return model

    def batches(self) -> Iterator[torch.Tensor]:
        """Images from memory; the script marks its stages, this one included."""
        return muri.batches(self.images_in_memory())

    def learn(self, batch: torch.Tensor) -> torch.Tensor:
        """Forward and backward, the exchange, then the step."""
        inputs = batch.to(self.device)
        with muri.stage("propagate"), self.watch.gpu("propagate"):
            self.optimizer.zero_grad()
            loss = self.loss(inputs)
            with muri.stage("propagate"):  # the same stage inside itself: others may go first here
                loss.backward()
        with muri.stage("synchronize"), self.watch.gpu("synchronize"):
            self._exchange()
        with muri.stage("propagate"), self.watch.gpu("propagate"):
            self.optimizer.step()
        return loss.detach()

    def _exchange(self) -> None:
        parameters = list(self.model.parameters())
        for host, parameter in zip(self.gradients, parameters, strict=True):
            host.copy_(parameter.grad, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for host, parameter in zip(self.gradients, parameters, strict=True):
            parameter.grad.copy_(host, non_blocking=True)


class Small(Job):
    """A narrow ResNet-18 on images of 32 pixels from memory: its kernels do not fill a large GPU."""

    batch, side = 128, 32

    def make_model(self) -> nn.Module:
        """An eighth of the width of ResNet-18 in a tiny size, else a quarter."""
        self.batch = 2 if self.tiny else self.batch
        return resnet18(8 if self.tiny else 16)

    def batches(self) -> Iterator[torch.Tensor]:
        """Images from memory."""
        return self.images_in_memory()


JOBS: dict[str, type[Job]] = {"resnet18": ResNet18, "gpt2": Gpt2Small, "a2c": A2c, "vgg16": Vgg16, "small": Small}


def train(name: str, options: argparse.Namespace, log: TextIO) -> dict[str, Any]:
    """Train one model until it is told to stop, or for as long as the options say; return its figures."""
    torch.manual_seed(0)
    if torch.cuda.is_initialized():  # by the model before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    job = JOBS[name](options)
    losses: list[torch.Tensor] = []
    begin_s = 0.0
    batches = job.batches()
    for batch in batches:
        losses.append(job.learn(batch))
        job.watch.next_iteration()
        log.write(f"{time.monotonic():.6f}\n")
        done = len(losses)
        if done == WARM_ITERATIONS:
            finish(job.device)
            begin_s = time.perf_counter()
        if options.fail and options.log.with_suffix(".fail").exists():
            fail(options.fail, job.device)
        timed_out = options.seconds and done > WARM_ITERATIONS + 1 and time.perf_counter() - begin_s >= options.seconds
        if timed_out or done == options.iterations or (options.stop and options.stop.exists()):
            break
    finish(job.device)
    passed_s, counted = time.perf_counter() - begin_s, len(losses) - WARM_ITERATIONS
    return {
        "iteration_s": passed_s / counted if begin_s and counted > 0 else None,
        "losses": [float(each) for each in losses],
        "stage_s": job.watch.stage_s() if counted > 1 else {},
        "hooks_s": hook_times(),
        "profiler_s": profile(job, batches, options.profile) if options.profile else {},
        "gpu_mib": gpu_memory(),
    }


def finish(device: torch.device) -> None:
    """Wait for this script's own work."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def hook_times() -> dict[str, float]:
    """Mean seconds of each stage as Muri has measured them, if it measures this script; and of an iteration."""
    if os.environ.get("MURI_TIMING") != "1":
        return {}
    from muri.launcher.script.script_clock import current_clock
    from muri.profiler.records import STAGES

    records = list(current_clock().recent)
    means = [sum(column) / len(records) for column in zip(*(each.stage_s for each in records), strict=True)]
    whole_s = sum(each.iteration_s for each in records) / max(1, len(records))
    return {**dict(zip(STAGES, means, strict=False)), "iteration": whole_s}


def profile(job: Job, batches: Iterator[torch.Tensor], count: int) -> dict[str, float]:
    """Return kernels and copies of a few more iterations, by PyTorch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if job.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for batch in itertools.islice(batches, count):
            job.learn(batch)
        finish(job.device)
    found = {"kernels": 0.0, "copies": 0.0}
    events = profiler.profiler.kineto_results.events()
    marks = {event.name() for event in events if event.device_type().name == "CPU"}  # the GPU's rows repeat them
    for event in events:
        if event.device_type().name == "CUDA" and event.name() not in marks:
            kind = "copies" if event.name().startswith(("Memcpy", "Memset")) else "kernels"
            found[kind] += event.duration_ns() / 1e9
    return {kind: seconds / count for kind, seconds in found.items()}


def gpu_memory() -> dict[str, float]:
    """Most that this process had of the GPU, MiB: in tensors, and in PyTorch's allocator."""
    if not torch.cuda.is_initialized():
        return {}
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {name: size / 2**20 for name, size in peaks.items()}


def fail(how: str, device: torch.device) -> None:
    """Fail for want of memory, or by a write to where nothing is."""
    if how == "memory":
        if device.type != "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. (There is no GPU: this error is made up.)")
        held = []
        while True:
            held.append(torch.empty(FILL_BYTES, dtype=torch.uint8, device=device))
    if device.type != "cuda":
        raise RuntimeError("CUDA error: an illegal memory access was encountered (there is no GPU: it is made up)")
    try:
        stray_write()
    except KernelError:  # then PyTorch's own: an index beyond the end
        torch.zeros(1, device=device)[torch.full((1,), 1 << 40, device=device)].sum()
    torch.cuda.current_stream().synchronize()


def options_of(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("jobs", nargs="+", choices=JOBS, help="one after the other")
    add("--log", type=Path, required=True, help="a line for each iteration: the monotonic clock")
    add("--data", type=Path, required=True, help="directory of images.bin")
    add("--stop", type=Path, help="the job ends when this file exists")
    add("--iterations", type=int, default=0, help="end after so many")
    add("--seconds", type=float, default=0.0, help=f"end so long after the first {WARM_ITERATIONS}")
    add("--profile", type=int, default=0, help="so many more iterations under PyTorch's profiler")
    add("--deterministic", action="store_true", help="the same digits in each run")
    add(
        "--fail",
        choices=("memory", "access"),
        help="how to fail, once there is a file beside the log that ends in .fail",
    )
    add("--device", default="cuda")
    add("--tiny", action="store_true", help="a size that a CPU trains at once")
    return parser.parse_args(words)


def main() -> None:
    """Train one job after the other."""
    options = options_of(sys.argv[1:])
    if options.deterministic:
        importlib.import_module("deterministic")
    with options.log.open("w", buffering=1) as log:
        found = {name: train(name, options, log) for name in options.jobs}
    options.log.with_suffix(".json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
