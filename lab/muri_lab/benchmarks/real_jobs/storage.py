"""Reads random shards from disk, past the page cache (O_DIRECT), and takes a sample of each: bound by storage."""

import random

import torch
from common import CLASSES, DirectFile, job_options, optimize, small_convnet, train

import muri

IMAGE = (3, 64, 64)
SAMPLE_BYTES = 3 * 64 * 64
BATCH = 32
SHARDS_PER_STAGE = 4


def main() -> None:
    """Train until told to stop."""
    options = job_options(__doc__)
    generator = random.Random(options.seed)
    file = DirectFile(options.data / "samples.bin")
    model = small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        data = bytearray()
        for _ in range(BATCH // SHARDS_PER_STAGE):
            with muri.stage("load"):  # between parts of the batch others may read
                for _ in range(SHARDS_PER_STAGE):
                    data += file.read_random(generator, SAMPLE_BYTES)
        with muri.stage("preprocess"):
            raw = torch.frombuffer(data, dtype=torch.uint8).view(BATCH, *IMAGE)
            return raw.float() / 255, raw.flatten(1)[:, :8].sum(1) % CLASSES

    train(options, fetch, lambda batch: optimize(model, optimizer, *batch))


if __name__ == "__main__":
    main()
