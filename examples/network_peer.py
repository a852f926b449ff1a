"""The other rank of train_network.py: adds zeros to the gradients, as fast as its slow link allows."""

import argparse
import contextlib
import os
import sys
import threading

import torch
import torch.distributed as dist
from support import TokenBucket

LINK_BYTES_PER_S = 17e6
BUCKETS = 4


def join_group(store, rank):
    """A gloo group of two, beside PyTorch's default group, which stays unused."""
    return dist.ProcessGroupGloo(dist.PrefixStore("train", store), rank, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("gradients", type=int, help="how many numbers are reduced in an iteration")
    options = parser.parse_args()
    # The job holds the other end of standard input: it closes however the job ends.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    group = join_group(dist.TCPStore("127.0.0.1", options.port, 2), 1)
    link = TokenBucket(LINK_BYTES_PER_S)
    with contextlib.suppress(RuntimeError):  # the job has closed the connection
        while True:
            for bucket in torch.zeros(options.gradients).chunk(BUCKETS):
                group.allreduce([torch.zeros(1)]).wait()  # the bucket begins
                link.take(bucket.nbytes)
                group.allreduce([bucket]).wait()


if __name__ == "__main__":
    main()
