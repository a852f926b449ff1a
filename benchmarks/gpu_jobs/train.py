"""Trains one of four models with a bottleneck of its own; see the classes for what each does.

python train.py resnet18 --log ends.txt --stop stop --data DIR
python train.py gpt2 --tiny --device cpu --iterations 2 --log ends.txt --stop stop --data DIR
"""

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from models import ACTIONS, CLASSES, OBSERVATION, TOKENS, ActorCritic, Gpt2, resnet18, vgg16
from torch import nn

import muri


class Job:
    """A model, where its batches come from, and how it learns from one.

    Args:
        options: Command line.
    """

    momentum = 0.9

    def __init__(self, options: argparse.Namespace) -> None:
        self.tiny, self.device, self.folder = options.tiny, torch.device(options.device), options.data
        self.random = np.random.default_rng(0)
        self.model = self.make_model().to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=self.momentum)

    def make_model(self) -> nn.Module:
        """The model, on the CPU."""
        raise NotImplementedError

    def fetch(self) -> torch.Tensor:
        """A batch from storage."""
        raise NotImplementedError

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """What is minimised."""
        raise NotImplementedError

    def prepare(self, batch: torch.Tensor) -> torch.Tensor:
        """The batch, ready for the model, on the device."""
        return batch.to(self.device)

    def learn(self, batch: torch.Tensor) -> None:
        """One optimizer step."""
        with muri.stage("preprocess"):
            inputs = self.prepare(batch)
        with muri.stage("propagate"):
            self.optimizer.zero_grad()
            loss = self.loss(inputs)
            with muri.stage("propagate"):  # the same stage inside itself: others may go first here
                loss.backward()
            with muri.stage("propagate"):
                self.optimizer.step()


class ResNet18(Job):
    """Bound by storage: reads its images from disk, past the page cache."""

    batch, side = 64, 224

    def make_model(self) -> nn.Module:
        """ResNet-18."""
        self.batch, self.side = (2, 32) if self.tiny else (self.batch, self.side)
        return resnet18(self.tiny)

    def fetch(self) -> torch.Tensor:
        """Random images, one read each."""
        size = self.side * self.side * 3
        path = self.folder / "images.bin"
        file = os.open(path, os.O_RDONLY)
        try:
            places = self.random.integers(0, max(1, path.stat().st_size - size), self.batch)
            for place in places:
                os.posix_fadvise(file, int(place), size, os.POSIX_FADV_DONTNEED)
            data = b"".join(os.pread(file, size, int(place)) for place in places)
        finally:
            os.close(file)
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return pixels.view(self.batch, 3, self.side, self.side)

    def prepare(self, batch: torch.Tensor) -> torch.Tensor:
        """Normalised on the CPU, as torchvision's transforms do."""
        return batch.float().sub_(127.5).div_(64.0).to(self.device)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Cross entropy."""
        labels = torch.arange(len(batch), device=self.device) % CLASSES
        return nn.functional.cross_entropy(self.model(batch), labels)


class Vgg16(Job):
    """Bound by the exchange of its 138 million gradients, which go to the host and back as at a parameter server."""

    batch, side = 32, 224

    def make_model(self) -> nn.Module:
        """VGG-16."""
        self.batch, self.side = (2, 32) if self.tiny else (self.batch, self.side)
        return vgg16(self.tiny)

    def fetch(self) -> torch.Tensor:
        """Images made on the spot."""
        return torch.rand(self.batch, 3, self.side, self.side)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Cross entropy."""
        labels = torch.arange(len(batch), device=self.device) % CLASSES
        return nn.functional.cross_entropy(self.model(batch), labels)

    def learn(self, batch: torch.Tensor) -> None:
        """Forward and backward, the exchange, then the step."""
        inputs = self.prepare(batch)
        with muri.stage("propagate"):
            self.optimizer.zero_grad()
            self.loss(inputs).backward()
        with muri.stage("synchronize"):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(parameter.grad.cpu())
        with muri.stage("propagate"):
            self.optimizer.step()


class Gpt2Small(Job):
    """Bound by the GPU."""

    batch, length = 4, 512

    def make_model(self) -> nn.Module:
        """GPT-2 small."""
        self.batch, self.length = (2, 16) if self.tiny else (self.batch, self.length)
        return Gpt2(self.tiny)

    def fetch(self) -> torch.Tensor:
        """Random tokens."""
        return torch.from_numpy(self.random.integers(0, TOKENS, (self.batch, self.length + 1)))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the next token."""
        scores = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


class A2c(Job):
    """Bound by the CPU: simulates its environments (damped oscillators) step by step."""

    environments, steps = 256, 16

    def make_model(self) -> nn.Module:
        """The actor-critic, and the environments' dynamics."""
        self.environments, self.steps = (8, 2) if self.tiny else (self.environments, self.steps)
        self.states = self.random.standard_normal((self.environments, OBSERVATION)).astype(np.float32)
        self.dynamics = np.linalg.qr(self.random.standard_normal((OBSERVATION, OBSERVATION)))[0].astype(np.float32)
        self.push = self.random.standard_normal((ACTIONS, OBSERVATION)).astype(np.float32)
        return ActorCritic(self.tiny)

    def fetch(self) -> torch.Tensor:
        """Nothing is read."""
        return torch.empty(0)

    def prepare(self, batch: torch.Tensor) -> torch.Tensor:
        """Observations of a few steps with actions of the current policy."""
        seen = []
        for _ in range(self.steps):
            seen.append(torch.from_numpy(self.states))
            with torch.no_grad():
                scores, _ = self.model(seen[-1].to(self.device))
            actions = torch.distributions.Categorical(logits=scores).sample().cpu().numpy()
            for _ in range(8):  # physics in finer steps than decisions
                self.states = np.tanh(self.states @ self.dynamics + 0.1 * self.push[actions])
        return torch.stack(seen).to(self.device)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Policy gradient with the advantage, value error, entropy."""
        scores, values = self.model(batch)
        rewards = -batch.square().mean(-1)
        returns = rewards.flip(0).cumsum(0).flip(0)
        advantage = returns - values
        policy = torch.distributions.Categorical(logits=scores)
        actions = scores.argmax(-1)
        gain = policy.log_prob(actions) * advantage.detach()
        return -gain.mean() + 0.5 * advantage.square().mean() - 0.01 * policy.entropy().mean()


JOBS: dict[str, type[Job]] = {"resnet18": ResNet18, "vgg16": Vgg16, "gpt2": Gpt2Small, "a2c": A2c}


def train(job: Job, options: argparse.Namespace, log: TextIO) -> None:
    """Run one job to its end."""

    def batches() -> Iterator[torch.Tensor]:
        for count in itertools.count():
            if options.stop.exists() or count == options.iterations:
                return
            yield job.fetch()

    for batch in muri.batches(batches()):
        job.learn(batch)
        log.write(f"{time.monotonic():.6f}\n")


def main() -> None:
    """Train until told to stop; a line with the time for each iteration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", choices=JOBS, help="one after the other")
    parser.add_argument("--log", type=Path, required=True, help="a line for each iteration: the monotonic clock")
    parser.add_argument("--stop", type=Path, required=True, help="the job ends when this file exists")
    parser.add_argument("--data", type=Path, required=True, help="directory of images.bin")
    parser.add_argument("--iterations", type=int, help="end after so many")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a size that a CPU trains at once")
    options = parser.parse_args()
    with options.log.open("w", buffering=1) as log:
        for name in options.jobs:
            torch.manual_seed(0)
            train(JOBS[name](options), options, log)


if __name__ == "__main__":
    main()
