"""Trains a small network with nothing but PyTorch: no word of Muri, its stages are found automatically."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FEATURES, CLASSES = 64, 10


class Samples(Dataset):
    """Random samples behind slow storage, with an augmentation."""

    def __init__(self, count, read_s, transform=None):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, FEATURES, generator=generator)
        self.labels = self.inputs[:, :CLASSES].argmax(1)
        self.read_s = read_s
        self.transform = transform

    def __len__(self):
        """How many there are."""
        return len(self.inputs)

    def __getitem__(self, index):
        """One sample, as slowly as the storage is."""
        time.sleep(self.read_s)
        sample = self.inputs[index]
        return (self.transform(sample) if self.transform else sample), self.labels[index]


def augment(sample):
    return sample + 0.01 * torch.randn_like(sample)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--read-ms", type=float, default=1.0, help="reading one sample takes that long")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Linear(FEATURES, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    read_s = options.read_ms / 1000
    training = DataLoader(
        Samples(options.samples, read_s, augment), batch_size=32, shuffle=True, num_workers=options.workers
    )
    validation = DataLoader(Samples(options.samples // 4, read_s), batch_size=64)
    for epoch in range(options.epochs):
        model.train()
        for inputs, labels in training:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            hits = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in validation)
        print(f"epoch {epoch} loss {loss.item():.9g} accuracy {hits / len(validation.dataset):.3f}", flush=True)


if __name__ == "__main__":
    main()
