"""Trains with a peer behind a slow link: most of each iteration waits for the gloo all-reduce."""

import argparse
import contextlib
import os
import subprocess
import sys
import threading

import torch
import torch.distributed as dist
from support import PacedFile, TokenBucket, option_parser
from torch import nn

import muri

INPUTS, WIDTH, CLASSES, BUCKETS = 256, 512, 10, 4
LINK_BYTES_PER_S = 25e6


def build_model():
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def join_group(store, rank):
    """A gloo group of two, beside PyTorch's default group, which stays unused."""
    return dist.ProcessGroupGloo(dist.PrefixStore("train", store), rank, 2)


def run_peer(port):
    """The other rank: adds zeros to the gradients, as fast as its link allows; ends with the job."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    group, link = join_group(dist.TCPStore("127.0.0.1", port, 2), 1), TokenBucket(LINK_BYTES_PER_S)
    size = sum(parameter.numel() for parameter in build_model().parameters())
    with contextlib.suppress(RuntimeError):  # the job has closed the connection
        while True:
            for bucket in torch.zeros(size).chunk(BUCKETS):
                group.allreduce([torch.zeros(1)]).wait()  # the bucket begins
                link.take(bucket.nbytes)
                group.allreduce([bucket]).wait()


def main():
    parser = option_parser(__doc__, batch_size=128)
    parser.add_argument("--peer", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        return run_peer(options.peer)
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "--peer", str(store.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # its input ends with this job, however it ends
        return train(options, join_group(store, 0))


def train(options, group):
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file = PacedFile(16 << 20, bytes_per_s=4.5e6)
    loader = (file.read(options.batch_size * INPUTS) for _ in range(options.iterations))
    for step, raw in enumerate(muri.batches(loader), start=1):
        with muri.stage("preprocess"):
            inputs = torch.frombuffer(raw, dtype=torch.uint8).view(-1, INPUTS).float() / 255
            labels = (inputs[:, :8].sum(1) * 255).long() % CLASSES
            for _ in range(40):
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
    print(f"done: {options.iterations} iterations")


if __name__ == "__main__":
    main()
