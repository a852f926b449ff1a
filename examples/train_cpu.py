"""Trains on heavily augmented images: most of each iteration prepares the batch on the CPU."""

import torch
from support import PacedFile, PacedLink, option_parser
from torch import nn

import muri

IMAGE = (3, 64, 64)
CLASSES = 10
MICRO_BATCH = 4


def images(file, batch_size, iterations):
    sample_bytes = IMAGE[0] * IMAGE[1] * IMAGE[2]
    for _ in range(iterations):
        raw = torch.frombuffer(file.read(batch_size * sample_bytes), dtype=torch.uint8)
        yield raw.view(batch_size, *IMAGE)


def augment(batch, generator):
    """Rotate, zoom, blur and add noise."""
    batch = batch.float() / 255
    angle = torch.empty(len(batch)).uniform_(-0.5, 0.5, generator=generator)
    zero = torch.zeros_like(angle)
    rows = [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)]
    grid = nn.functional.affine_grid(torch.stack(rows, 1), list(batch.shape), align_corners=False)
    batch = nn.functional.grid_sample(batch, grid, mode="bicubic", align_corners=False)
    for size in (3, 5, 7, 9, 11):
        batch = nn.functional.avg_pool2d(batch, size, stride=1, padding=size // 2)
    return batch + 0.05 * torch.randn(batch.shape, generator=generator)


def main():
    options = option_parser(__doc__, batch_size=16).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file, metrics = PacedFile(64 << 20, bytes_per_s=55e6), PacedLink(bytes_per_s=2.6e6)
    loader = images(file, options.batch_size, options.iterations)
    for step, raw in enumerate(muri.batches(loader), start=1):
        labels = raw.flatten(1)[:, :8].sum(1) % CLASSES
        parts = []
        for micro_batch in raw.split(MICRO_BATCH):
            with muri.stage("preprocess"):
                parts.append(augment(micro_batch, generator))
        with muri.stage("propagate"):
            loss = nn.functional.cross_entropy(model(torch.cat(parts).to(device)), labels.to(device))
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
