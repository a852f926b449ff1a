"""Trains on images that come from slow storage: most of each iteration waits for reads."""

import torch
from support import PacedFile, PacedLink, option_parser
from torch import nn

import muri

IMAGE = (3, 64, 64)
CLASSES = 10


def images(file, batch_size, iterations):
    """Read one batch after the other; a sample's label is the sum of its first bytes."""
    sample_bytes = IMAGE[0] * IMAGE[1] * IMAGE[2]
    for _ in range(iterations):
        raw = torch.frombuffer(file.read(batch_size * sample_bytes), dtype=torch.uint8)
        yield raw.view(batch_size, *IMAGE)


def augment(batch, generator):
    """Scale, flip, shift the brightness and blur."""
    batch = batch.float() / 255
    if torch.rand((), generator=generator) < 0.5:
        batch = batch.flip(-1)
    batch = batch + 0.1 * torch.randn(len(batch), 1, 1, 1, generator=generator)
    return nn.functional.avg_pool2d(batch, 5, stride=1, padding=2)


def main():
    options = option_parser(__doc__, batch_size=18).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file, metrics = PacedFile(64 << 20, bytes_per_s=6.3e6), PacedLink(bytes_per_s=2.1e6)
    loader = images(file, options.batch_size, options.iterations)
    for step, raw in enumerate(muri.batches(loader), start=1):
        with muri.stage("preprocess"):
            labels = raw.flatten(1)[:, :8].sum(1) % CLASSES
            inputs = augment(raw, generator)
        with muri.stage("propagate"):
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with muri.stage("synchronize"):
            metrics.send(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
        if step % 10 == 0:
            print(f"iteration {step} loss {loss.item():.4f}")
    print(f"done: {options.iterations} iterations")


if __name__ == "__main__":
    main()
