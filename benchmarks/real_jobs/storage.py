"""Reads its samples from disk, past the page cache (O_DIRECT), at random places: bound by storage."""

import mmap
import os
import random

import torch
from common import CLASSES, job_options, optimize, small_convnet, train

import muri

IMAGE = (3, 64, 64)
SAMPLE_BYTES = 3 * 64 * 64
BATCH = 192
READ_BYTES = 4096
READS_PER_STAGE = 64


class DirectFile:
    """A file that is read in blocks from the disk itself."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._blocks = os.fstat(self._file).st_size // READ_BYTES
        self._buffer = mmap.mmap(-1, READ_BYTES)

    def read_blocks(self, count: int, generator: random.Random) -> bytes:
        """Read blocks from random places."""
        parts = []
        for _ in range(count):
            os.preadv(self._file, [self._buffer], generator.randrange(self._blocks) * READ_BYTES)
            parts.append(self._buffer[:])
        return b"".join(parts)


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
