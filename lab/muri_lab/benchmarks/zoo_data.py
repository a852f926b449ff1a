"""Samples for the zoo: compressed records in a file, read from the disk each time, decoded and augmented on the CPU."""

import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from muri_lab.benchmarks.zoo_models import VOCABULARY, Entry

RECORDS: Final = 512
SEED: Final = 6
_LENGTH_BYTES: Final = 4
_BLOCK_BYTES: Final = 4096
_PICTURE: Final = (3, 96, 96)
_WAVE: Final = 16384
_WORDS: Final = 256
_COLUMNS: Final = 64


def _picture(random: np.random.Generator) -> bytes:
    """Coarse colors with some grain."""
    coarse = random.integers(0, 248, (_PICTURE[0], 12, 12)).repeat(8, axis=1).repeat(8, axis=2)
    return bytes((coarse + random.integers(0, 8, _PICTURE)).astype(np.uint8).tobytes())


def _wave(random: np.random.Generator) -> bytes:
    """A tone with noise."""
    tone = 8000 * np.sin(np.arange(_WAVE) * random.uniform(0.01, 0.3))
    return bytes((tone + random.integers(-64, 64, _WAVE)).astype(np.int16).tobytes())


def _text(random: np.random.Generator) -> bytes:
    """Words as text."""
    return " ".join(f"word{number}" for number in random.integers(0, VOCABULARY, _WORDS)).encode()


def _row(random: np.random.Generator) -> bytes:
    """Numbers as comma-separated text."""
    return ",".join(f"{number:.6f}" for number in random.normal(size=_COLUMNS)).encode()


_MAKE: Final = {"image": _picture, "signal": _wave, "tokens": _text, "clicks": _text, "table": _row}


class Records(Dataset[bytes]):
    """Compressed samples of one kind in a file, made when missing.

    What was read is dropped from the page cache, so that the next reader waits for the disk.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        path = folder / kind
        if not path.exists():
            _write(path, _MAKE[kind])
        self._file = os.open(path, os.O_RDONLY)
        self._slot_bytes = os.fstat(self._file).st_size // RECORDS

    def __len__(self) -> int:
        """Samples in the file."""
        return RECORDS

    def __getitem__(self, index: int) -> bytes:
        """One sample from the disk, still compressed."""
        offset = index * self._slot_bytes
        os.posix_fadvise(self._file, offset, self._slot_bytes, os.POSIX_FADV_DONTNEED)
        slot = os.pread(self._file, self._slot_bytes, offset)
        return slot[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(slot[:_LENGTH_BYTES], "little")]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _write(path: Path, make: Callable[[np.random.Generator], bytes]) -> None:
    """The same records each time, in slots of whole blocks."""
    random = np.random.default_rng(SEED)
    packed = [zlib.compress(make(random), 6) for _ in range(RECORDS)]
    slot_bytes = -(-(max(map(len, packed)) + _LENGTH_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
    with path.open("wb") as stream:
        for item in packed:
            stream.write((len(item).to_bytes(_LENGTH_BYTES, "little") + item).ljust(slot_bytes, b"\0"))
        stream.flush()
        os.fsync(stream.fileno())  # only what is on the disk can be dropped from the page cache


def _as_they_are(samples: list[bytes]) -> list[bytes]:
    return samples


def loader(records: Records, batch_size: int) -> "DataLoader[bytes]":
    """Shuffled batches of compressed samples."""
    generator = torch.Generator().manual_seed(SEED)
    return DataLoader(
        records, batch_size, shuffle=True, drop_last=True, generator=generator, collate_fn=_as_they_are, num_workers=0
    )


def _image(sample: bytes, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    """Cut a random part of the picture, mirror half of them, normalize."""
    _, height, width = shape
    picture = np.frombuffer(sample, np.uint8).reshape(_PICTURE)
    top, left = random.integers(0, _PICTURE[1] - height), random.integers(0, _PICTURE[2] - width)
    part = picture[:, top : top + height, left : left + width]
    if random.random() < 0.5:
        part = part[:, :, ::-1]
    return torch.from_numpy((part.astype(np.float32) / 255.0 - 0.45) / 0.22)


def _signal(sample: bytes, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    """A random window with random gain and zero mean."""
    begin = random.integers(0, _WAVE - shape[-1])
    wave = np.frombuffer(sample, np.int16)[begin : begin + shape[-1]].astype(np.float32).reshape(shape)
    return torch.from_numpy((wave - wave.mean()) * np.float32(random.uniform(0.5, 1.5) / 32768.0))


def _tokens(sample: bytes, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    """Words looked up in the vocabulary; a random window, of which some are masked."""
    words = [_VOCABULARY[word] for word in sample.split()]
    begin = int(random.integers(0, len(words) - shape[0]))
    window = np.array(words[begin : begin + shape[0]], np.int64)
    window[random.random(shape[0]) < 0.1] = 0
    return torch.from_numpy(window)


def _table(sample: bytes, _: tuple[int, ...], random: np.random.Generator) -> Tensor:
    """Numbers with some noise."""
    row = np.array(sample.split(b","), np.float32)
    return torch.from_numpy(row + random.normal(0.0, 0.01, len(row)).astype(np.float32))


_VOCABULARY: Final = {f"word{number}".encode(): number for number in range(VOCABULARY)}
_PREPARE: Final = {"image": _image, "signal": _signal, "tokens": _tokens, "clicks": _tokens, "table": _table}


def preprocess(entry: Entry, samples: Sequence[bytes], random: np.random.Generator) -> Tensor:
    """The batch as the model takes it."""
    prepare = _PREPARE[entry.kind]
    return torch.stack([prepare(zlib.decompress(sample), entry.shape, random) for sample in samples])
