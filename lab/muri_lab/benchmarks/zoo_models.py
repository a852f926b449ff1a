"""Networks to learn from: 17 small families, written for the purpose, each in several sizes."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

CLASSES = 10
VOCABULARY = 2000


class Entry(NamedTuple):
    """One configuration of the zoo.

    Attributes:
        name: "family/size".
        build: Makes the module.
        kind: What it is fed: "image", "signal", "tokens", "table" or "clicks".
        shape: Shape of one sample.
        batch_size: Samples per iteration.
    """

    name: str
    build: Callable[[], nn.Module]
    kind: str
    shape: tuple[int, ...]
    batch_size: int


class Residual(nn.Module):
    """Adds what a block does to its input."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Input plus block."""
        out: Tensor = x + self.block(x)
        return out


class Dense(nn.Module):
    """Appends what a block makes to its input's channels."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, growth, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Input and new channels."""
        return torch.cat((x, self.block(x)), dim=1)


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def mlp(width: int, depth: int) -> nn.Module:
    """Linear layers."""
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def residual_mlp(width: int, depth: int) -> nn.Module:
    """Normalised linear layers with short cuts."""
    blocks = [
        Residual(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        )
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, CLASSES))


def plain_cnn(width: int, depth: int) -> nn.Module:
    """Convolutions without normalization, strided at the start."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, *_head(width))


def vgg(width: int, depth: int) -> nn.Module:
    """Normalised convolutions, pooled, with a large linear head."""
    layers: list[nn.Module] = []
    channels = 3
    for level in range(depth):
        out = width * 2**level
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
        channels = out
    side = 32 // 2**depth
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def residual_cnn(width: int, depth: int) -> nn.Module:
    """Residual blocks."""

    def block() -> nn.Module:
        half = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        other = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        return Residual(nn.Sequential(*half, nn.ReLU(), *other))

    return nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), *(block() for _ in range(depth)), *_head(width))


def depthwise_cnn(width: int, depth: int) -> nn.Module:
    """Depthwise convolutions and pointwise ones."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride=2, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width), nn.ReLU6()]
        layers += [nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU6()]
    return nn.Sequential(*layers, *_head(width))


def dense_cnn(growth: int, depth: int) -> nn.Module:
    """Blocks that see all that came before."""
    blocks = [Dense(2 * growth + level * growth, growth) for level in range(depth)]
    return nn.Sequential(nn.Conv2d(3, 2 * growth, 3, stride=2, padding=1), *blocks, *_head((2 + depth) * growth))


def signal_cnn(width: int, depth: int) -> nn.Module:
    """Convolutions along time."""
    layers: list[nn.Module] = [nn.Conv1d(1, width, 9, stride=4, padding=4), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv1d(width, width, 5, stride=2, padding=2), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class Autoencoder(nn.Module):
    """Convolutions down, transposed ones up again, with short cuts between the same sizes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [3, *(width * 2**level for level in range(depth))]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 4, 2, 1) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """The image again."""
        kept = []
        for layer in self.down:
            kept.append(x)
            x = torch.relu(layer(x))
        for layer, earlier in zip(reversed(self.up), reversed(kept), strict=True):
            x = torch.tanh(layer(x)) + earlier
        return x


class Recurrent(nn.Module):
    """A recurrent network over tokens; the last state is classified."""

    def __init__(self, kind: type[nn.RNNBase], width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.recurrent = kind(width, width, depth, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.recurrent(self.embed(tokens))[0][:, -1])
        return scores


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What each position gathers from the others."""
        batch, length, width = x.shape
        split = self.project(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def _transformer_blocks(width: int, depth: int, *, causal: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers.append(Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, 4, causal=causal))))
        wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        layers.append(Residual(nn.Sequential(nn.LayerNorm(width), *wide)))
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """Transformer encoder over tokens, classified by the mean."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = _transformer_blocks(width, depth, causal=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.blocks(self.embed(tokens)).mean(dim=1))
        return scores


class Decoder(nn.Module):
    """Causal language model: a score for each word at each place."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = _transformer_blocks(width, depth, causal=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Word scores."""
        scores: Tensor = self.head(self.norm(self.blocks(self.embed(tokens))))
        return scores


class VisionTransformer(nn.Module):
    """Patches of 4 × 4 as words."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = _transformer_blocks(width, depth, causal=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        words = self.patches(x).flatten(2).transpose(1, 2)
        scores: Tensor = self.head(self.blocks(words).mean(dim=1))
        return scores


class Mixer(nn.Module):
    """Linear layers over patches and over channels in turn."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.across = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.within = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        words = self.patches(x).flatten(2)
        for across, within in zip(self.across, self.within, strict=True):
            words = words + torch.relu(across(words))
            words = words + torch.relu(within(words.transpose(1, 2)).transpose(1, 2))
        scores: Tensor = self.head(words.mean(dim=2))
        return scores


class Recommender(nn.Module):
    """Embeddings of categories beside numbers, as in click prediction."""

    def __init__(self, width: int, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(width * tables, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def forward(self, categories: Tensor) -> Tensor:
        """Class scores."""
        found = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        scores: Tensor = self.top(torch.cat(found, dim=1))
        return scores


_IMAGE, _TOKENS = ("image", (3, 32, 32)), ("tokens", (24,))
_Family = tuple[str, Callable[[int, int], nn.Module], tuple[str, tuple[int, ...]], tuple[tuple[int, int], ...]]
_FAMILIES: tuple[_Family, ...] = (
    ("mlp", mlp, ("table", (64,)), ((128, 2), (512, 4), (1024, 3))),
    ("residual-mlp", residual_mlp, ("table", (64,)), ((96, 3), (256, 6), (512, 4))),
    ("plain-cnn", plain_cnn, _IMAGE, ((8, 2), (16, 6), (32, 4))),
    ("vgg", vgg, _IMAGE, ((8, 3), (16, 3), (24, 4))),
    ("residual-cnn", residual_cnn, _IMAGE, ((8, 2), (16, 4), (32, 2))),
    ("depthwise-cnn", depthwise_cnn, _IMAGE, ((16, 3), (32, 5), (64, 3))),
    ("dense-cnn", dense_cnn, _IMAGE, ((6, 4), (8, 8), (12, 6))),
    ("signal-cnn", signal_cnn, ("signal", (1, 4096)), ((8, 3), (24, 4), (48, 3))),
    ("autoencoder", Autoencoder, _IMAGE, ((4, 3), (8, 3), (16, 2))),
    ("rnn", partial(Recurrent, nn.RNN), _TOKENS, ((32, 1), (128, 2), (256, 1))),
    ("lstm", partial(Recurrent, nn.LSTM), _TOKENS, ((32, 1), (96, 2), (160, 1))),
    ("gru", partial(Recurrent, nn.GRU), _TOKENS, ((32, 1), (96, 2), (160, 1))),
    ("encoder", Encoder, _TOKENS, ((32, 2), (64, 4), (128, 2))),
    ("decoder", Decoder, _TOKENS, ((32, 1), (64, 2), (96, 3))),
    ("vision-transformer", VisionTransformer, _IMAGE, ((32, 2), (64, 3), (96, 2))),
    ("mixer", Mixer, _IMAGE, ((32, 2), (64, 6), (128, 3))),
    ("recommender", Recommender, ("clicks", (16,)), ((8, 16), (32, 16), (64, 8))),
)

BATCH_SIZES = (4, 16, 64)


def zoo() -> tuple[Entry, ...]:
    """All configurations: every size of every family with every batch size."""
    return tuple(
        Entry(f"zoo-{family}/{first}x{second}", partial(build, first, second), kind, shape, batch_size)
        for family, build, (kind, shape), sizes in _FAMILIES
        for first, second in sizes
        for batch_size in BATCH_SIZES
    )
