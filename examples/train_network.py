"""Trains with a peer behind a slow link: most of each iteration waits for the gloo all-reduce."""

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from network_peer import BUCKETS, join_group
from support import PacedFile, option_parser
from torch import nn

import muri

INPUTS, WIDTH, CLASSES = 256, 256, 10
PEER = Path(__file__).with_name("network_peer.py")


def main():
    options = option_parser(__doc__, batch_size=72).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    size = sum(parameter.numel() for parameter in model.parameters())
    command = [sys.executable, str(PEER), str(store.port), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        group = join_group(store, 0)
        train(options, model, group)
    print(f"done: {options.iterations} iterations")


def train(options, model, group):
    generator = torch.Generator().manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file = PacedFile(16 << 20, bytes_per_s=4.5e6)
    loader = (file.read(options.batch_size * INPUTS) for _ in range(options.iterations))
    for step, raw in enumerate(muri.batches(loader), start=1):
        with muri.stage("preprocess"):
            inputs = torch.frombuffer(raw, dtype=torch.uint8).view(-1, INPUTS).float() / 255
            labels = (inputs[:, :8].sum(1) * 255).long() % CLASSES
            for _ in range(25):
                inputs = inputs + 0.01 * torch.randn(inputs.shape, generator=generator)
        with muri.stage("propagate"):
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            gradients = nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).cpu()
        with muri.stage("synchronize"):
            for bucket in gradients.chunk(BUCKETS):
                with muri.stage("synchronize"):  # between buckets others may use the network
                    group.allreduce([torch.zeros(1)]).wait()
                    group.allreduce([bucket]).wait()
            nn.utils.vector_to_parameters(gradients.to(device), [p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            print(f"iteration {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
