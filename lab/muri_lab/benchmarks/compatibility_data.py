"""Make small local data in the formats of the compatibility scripts: python compatibility_data.py KIND FOLDER.

It runs under the scripts' own Python, and makes the same bytes each time.
"""

import json
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

SEED = 1
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "by", "old", "tree", "in", "sun")


def _random() -> np.random.Generator:
    return np.random.default_rng(SEED)


def mnist(folder: Path) -> None:
    """MNIST and Fashion-MNIST, as torchvision finds them unpacked, and as Lightning's own copy of it reads them."""
    random = _random()
    for name in ("MNIST", "FashionMNIST"):
        raw = folder / name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 640), ("t10k", 128)):
            labels = random.integers(0, 10, count, dtype=np.uint8)
            images = random.integers(0, 80, (count, 28, 28), dtype=np.uint8)
            for image, label in zip(images, labels, strict=True):
                image[2 + 2 * label : 5 + 2 * label, 4:24] += 150
            (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def images(folder: Path) -> None:
    """JPEG files in folders named by their class, for training and validation."""
    from PIL import Image

    random = _random()
    for part, count in (("train", 12), ("val", 4)):
        for label in ("n01", "n02"):
            (folder / part / label).mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 255, (72, 72, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / label / f"{index}.jpg")


def bsds(folder: Path) -> None:
    """Pictures for super resolution."""
    from PIL import Image

    random = _random()
    for part, count in (("train", 12), ("test", 4)):
        (folder / part).mkdir(parents=True)
        for index in range(count):
            Image.fromarray(random.integers(0, 255, (260, 260, 3), dtype=np.uint8)).save(folder / part / f"{index}.jpg")


def boxes(folder: Path) -> None:
    """A data set of YOLO: pictures, and boxes in them."""
    from PIL import Image

    random = _random()
    for part, count in (("train", 12), ("val", 4)):
        (folder / "boxes/images" / part).mkdir(parents=True)
        (folder / "boxes/labels" / part).mkdir(parents=True)
        for index in range(count):
            pixels = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "boxes/images" / part / f"{index}.png")
            (folder / "boxes/labels" / part / f"{index}.txt").write_text(f"{index % 2} 0.5 0.5 0.4 0.4\n")
    (folder / "boxes.yaml").write_text("path: boxes\ntrain: images/train\nval: images/val\nnames: {0: a, 1: b}\n")


def _text(count: int) -> str:
    random = _random()
    return "\n".join(" ".join(WORDS[each] for each in random.integers(0, len(WORDS), 12)) for _ in range(count))


def words(folder: Path) -> None:
    """Lines of words."""
    for part, count in (("train", 400), ("valid", 60), ("test", 60)):
        (folder / f"{part}.txt").write_text(_text(count) + "\n")


def characters(folder: Path) -> None:
    """A text as it is (minGPT), and as character tokens with their alphabet (nanoGPT)."""
    text = "O God, O God!\n" + _text(400)  # minGPT's script goes on from there
    (folder / "input.txt").write_text(text)
    alphabet = sorted(set(text))
    code = {each: index for index, each in enumerate(alphabet)}
    tokens = np.array([code[each] for each in text], dtype=np.uint16)
    tokens[: len(tokens) * 9 // 10].tofile(folder / "train.bin")
    tokens[len(tokens) * 9 // 10 :].tofile(folder / "val.bin")
    meta = {"vocab_size": len(alphabet), "itos": dict(enumerate(alphabet)), "stoi": code}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def sines(folder: Path) -> None:
    """Sine waves, as generate_sine_wave.py writes them, but fewer and shorter."""
    import torch

    shift = _random().integers(-80, 80, (12, 1))
    torch.save(np.sin((np.arange(60) + shift) / 20.0).astype("float64"), folder / "traindata.pt")


def cora(folder: Path) -> None:
    """A citation graph in the format of Cora."""
    random = _random()
    count = 1700
    labels = random.integers(0, 7, count)
    with (folder / "cora.content").open("w") as file:
        for index, label in enumerate(labels):
            features = (random.random(64) < 0.1).astype(int)
            features[label] = 1
            file.write(f"{index}\t" + "\t".join(map(str, features)) + f"\tclass_{label}\n")
    pairs = random.integers(0, count, (3000, 2))
    (folder / "cora.cites").write_text("".join(f"{one}\t{other}\n" for one, other in pairs))


def mrpc(folder: Path) -> None:
    """Pairs of sentences, in the files that accelerate's examples read in its own tests."""
    random = _random()
    for part, count in (("train", 96), ("dev", 32)):
        lines = ["label,sentence1,sentence2"]
        for _ in range(count):
            first, second = (" ".join(WORDS[each] for each in random.integers(0, len(WORDS), 8)) for _ in range(2))
            lines.append(f"{('not_equivalent', 'equivalent')[int(random.integers(2))]},{first},{second}")
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")


def tiny_bert(folder: Path) -> None:
    """A BERT of two small layers, with a tokenizer for a few words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    torch.manual_seed(SEED)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=160)  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


def tiny_llama(folder: Path) -> None:
    """A Llama of two small layers, with a tokenizer for a few words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(SEED)
    vocabulary = {each: index for index, each in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 (a token of text, no secret)
    model.pre_tokenizer = Whitespace()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=model, **names).save_pretrained(folder)
    config = LlamaConfig(vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, max_position_embeddings=128)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def alpaca(folder: Path) -> None:
    """Instructions and answers."""
    lines = _text(72).split("\n")
    rows = [{"instruction": a, "input": b, "output": c} for a, b, c in zip(*[iter(lines)] * 3, strict=True)]
    (folder / "alpaca.json").write_text(json.dumps(rows))


KINDS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (mnist, images, bsds, boxes, words, characters, sines, cora, mrpc, tiny_bert, tiny_llama, alpaca)
}


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True)
    KINDS[sys.argv[1]](Path(sys.argv[2]))
