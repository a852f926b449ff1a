"""ResNet-18, VGG-16, GPT-2 small and an actor-critic, in plain PyTorch, of any size."""

import torch
from torch import nn

CLASSES = 1000
TOKENS = 50257
OBSERVATION, ACTIONS = 128, 18


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut (He et al. 2016, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        same = stride == 1 and channels_in == channels
        shortcut = (nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return torch.relu(self.path(images) + self.shortcut(images))


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 (He et al. 2016, table 1); `width` channels in its first layers."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels_in = width
    for level in range(4):
        channels = width * 2**level
        layers.append(ResidualBlock(channels_in, channels, 1 if level == 0 else 2))
        layers.append(ResidualBlock(channels, channels, 1))
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES))


def vgg16(width: int = 64, hidden: int = 4096, side: int = 224) -> nn.Module:
    """VGG-16 (Simonyan and Zisserman 2015, configuration D) for images of `side` pixels, a multiple of 32."""
    layers: list[nn.Module] = []
    channels_in = 3
    for channels, convolutions in ((width, 2), (2 * width, 2), (4 * width, 3), (8 * width, 3), (8 * width, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels_in, channels, 3, padding=1), nn.ReLU(inplace=True)]
            channels_in = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(channels_in * (side // 32) ** 2, hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, CLASSES),
    )  # fmt: skip


class Gpt2Block(nn.Module):
    """Masked self-attention and a feed-forward layer, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.joint, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """The states after the block."""
        batch, length, width = states.shape
        parts = self.joint(self.norms[0](states)).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return states + self.feed(self.norms[1](states))  # type: ignore[no-any-return]


class Gpt2(nn.Module):
    """GPT-2 small: 12 blocks of width 768 (Radford et al. 2019, table 2)."""

    def __init__(self, width: int = 768, heads: int = 12, depth: int = 12, length: int = 1024) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Gpt2Block(width, heads) for _ in range(depth)), nn.LayerNorm(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token; input and output embeddings are the same."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.blocks(self.tokens(tokens) + self.places(places))
        return states @ self.tokens.weight.T  # type: ignore[no-any-return]


class ActorCritic(nn.Module):
    """Policy and value of an advantage actor-critic (Mnih et al. 2016)."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVATION, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.policy, self.value = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the actions, and the state's value."""
        states = self.body(observations)
        return self.policy(states), self.value(states).squeeze(-1)
