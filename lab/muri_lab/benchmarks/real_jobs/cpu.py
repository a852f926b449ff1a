"""Decodes JPEGs and augments them, in one thread as a data loader's worker would: bound by the CPU."""

import io
import os
import random
from pathlib import Path

import numpy as np
import torch
from common import CLASSES, DirectFile, job_options, optimize, small_convnet, train
from PIL import Image

import muri

BATCH, SIDE, PICTURE_SIDE, PICTURES = 32, 96, 320, 64
PICTURE_BYTES = 32 * 1024


def make_pictures(generator: np.random.Generator) -> list[bytes]:
    """JPEGs with some structure."""
    pictures = []
    for _ in range(PICTURES):
        coarse = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
        pictures.append(file.getvalue())
    return pictures


def write_pictures(path: Path, generator: np.random.Generator) -> DirectFile:
    """Put the pictures on the disk, each in a place of its own; JPEG decoders stop at the picture's end."""
    path.write_bytes(b"".join(picture.ljust(PICTURE_BYTES, b"\0") for picture in make_pictures(generator)))
    file = DirectFile(path, PICTURE_BYTES)
    path.unlink()
    return file


def augment(picture: bytes, generator: random.Random) -> np.ndarray:
    """Decode, crop at random, scale, flip and change the brightness."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    left, top = generator.randrange(64), generator.randrange(64)
    image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, (left, top, left + 256, top + 256))
    pixels = np.asarray(image, dtype=np.float32) / 255
    if generator.random() < 0.5:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray((pixels * generator.uniform(0.8, 1.2)).transpose(2, 0, 1))


def main() -> None:
    """Train until told to stop."""
    options = job_options(__doc__)
    generator = random.Random(options.seed)
    pictures = write_pictures(options.data / f"pictures-{os.getpid()}.bin", np.random.default_rng(options.seed))
    model = small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        with muri.stage("load"):
            encoded = [pictures.read(place) for place in generator.sample(range(PICTURES), BATCH)]
        images = []
        with muri.stage("preprocess"):
            for picture in encoded:
                with muri.stage("preprocess"):  # a yield point: between two pictures others may use the CPU
                    images.append(augment(picture, generator))
            return torch.from_numpy(np.stack(images)), torch.arange(BATCH) % CLASSES

    train(options, fetch, lambda batch: optimize(model, optimizer, *batch))


if __name__ == "__main__":
    main()
