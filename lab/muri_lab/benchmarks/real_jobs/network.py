"""Averages its gradients with a peer over a slow link (gloo all-reduce): bound by the network."""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import CLASSES, job_options, train
from network_peer import BUCKETS, join_group
from torch import nn

import muri

INPUTS, WIDTH, BATCH = 256, 416, 16
PEER = Path(__file__).with_name("network_peer.py")


def main() -> None:
    """Train until told to stop."""
    options = job_options(__doc__, address="address of this end of the link", namespace="the peer's network namespace")
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    address = options.address or "127.0.0.1"
    store = dist.TCPStore(address, 0, 2, is_master=True, wait_for_workers=False)
    size = sum(parameter.numel() for parameter in model.parameters())
    enter = ["ip", "netns", "exec", options.namespace] if options.namespace else []
    command = [*enter, sys.executable, str(PEER), address, str(store.port), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        train_with_peer(options, model, join_group(store, 0, address))


def train_with_peer(options: argparse.Namespace, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Train until told to stop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(options.seed)

    def fetch() -> torch.Tensor:
        return torch.rand(BATCH, INPUTS, generator=generator)

    def step(inputs: torch.Tensor) -> None:
        with muri.stage("propagate"):
            labels = (inputs[:, :8].sum(1) * 255).long() % CLASSES
            nn.functional.cross_entropy(model(inputs), labels).backward()
            gradients = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        for bucket in gradients.chunk(BUCKETS):
            with muri.stage("synchronize"):
                group.allreduce([bucket]).wait()
        with muri.stage("propagate"):
            nn.utils.vector_to_parameters(gradients / 2, [p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()

    train(options, fetch, step)


if __name__ == "__main__":
    main()
