"""Trains a small VGG on all cores, the stand-in for a GPU: bound by forward and backward."""

import random

import torch
from common import CLASSES, DirectFile, job_options, train
from torch import nn

import muri

IMAGE = (3, 32, 32)
BATCH, MICRO_BATCH = 64, 8
SAMPLE_BYTES = 3 * 32 * 32


def block(inputs: int, outputs: int) -> list[nn.Module]:
    """Two convolutions and a pooling, as in VGG."""
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.ReLU(inplace=True)]
    return [*layers, nn.MaxPool2d(2)]


def main() -> None:
    """Train until told to stop."""
    options = job_options(__doc__)
    model = nn.Sequential(*block(3, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = random.Random(options.seed)
    corpus = DirectFile(options.data / "samples.bin")

    def fetch() -> torch.Tensor:
        """Images from one shard."""
        pixels = bytearray(corpus.read_random(generator, BATCH * SAMPLE_BYTES))
        return torch.frombuffer(pixels, dtype=torch.uint8).view(BATCH, *IMAGE)

    def step(batch: torch.Tensor) -> None:
        with muri.stage("propagate"):
            optimizer.zero_grad()
            for part in batch.split(MICRO_BATCH):
                with muri.stage("propagate"):  # yield points: between these parts others may use the GPU
                    labels = part.flatten(1)[:, :8].sum(1) % CLASSES
                    loss = nn.functional.cross_entropy(model(part.float() / 255), labels)
                with muri.stage("propagate"):
                    loss.backward()
            optimizer.step()

    train(options, fetch, step)


if __name__ == "__main__":
    main()
