"""Reads its samples from disk, past the page cache (O_DIRECT), at random places: bound by storage."""

import random

import torch
from common import CLASSES, DirectFile, job_options, optimize, small_convnet, train

import muri

IMAGE = (3, 64, 64)
SAMPLE_BYTES = 3 * 64 * 64
BATCH = 192
READS_PER_STAGE = 64


def main() -> None:
    """Train until told to stop."""
    options = job_options(__doc__)
    generator = random.Random(options.seed)  # noqa: S311 (sampling, no secret)
    file = DirectFile(options.data / "samples.bin")
    model = small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fetch() -> bytearray:
        data = bytearray()
        while len(data) < BATCH * SAMPLE_BYTES:
            with muri.stage("load"):  # between parts of the batch others may read
                data += file.read_blocks(READS_PER_STAGE, generator)
        return data

    def step(data: object) -> None:
        with muri.stage("preprocess"):
            raw = torch.frombuffer(data, dtype=torch.uint8)[: BATCH * SAMPLE_BYTES].view(BATCH, *IMAGE)
            inputs = raw.float() / 255
            labels = raw.flatten(1)[:, :8].sum(1) % CLASSES
        optimize(model, optimizer, inputs[:32], labels[:32])

    train(options, fetch, step)


if __name__ == "__main__":
    main()
