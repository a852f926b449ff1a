"""A training script that can be stopped at any iteration and goes on later: see docs/checkpoints.md.

Submit it with `sbatch --muri=checkpoint=1 …`, stop it with `scontrol requeue` or `muri preempt`, and compare the
losses with those of a run that was never stopped: they are the same to the last bit.
"""

import argparse
from pathlib import Path

import torch

import muri


def main() -> None:
    """Train a small network on made-up data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2048)
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(options.samples, 64)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load(path: Path) -> None:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # Right before the loop: what is drawn from a random generator after this is repeated after a stop.
    begun = muri.checkpoint(save, load, every_s=600)
    done = begun.iteration
    for _epoch in range(begun.epoch, options.epochs):
        for batch, target in muri.batches(loader):
            with muri.stage("propagate"):
                loss = (model(batch) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            done += 1
            if done % 10 == 0:
                print(f"iteration {done}: loss {loss.item():.6f}", flush=True)
    print("finished")


if __name__ == "__main__":
    main()
