"""The other rank of network.py: takes part in every all-reduce with gradients of zero."""

import argparse
import contextlib
import os
import subprocess
import sys
import threading

import torch
import torch.distributed as dist

BUCKETS = 4


def join_group(store: dist.Store, rank: int, address: str) -> dist.ProcessGroupGloo:
    """A gloo group of two that speaks through the interface with this address."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = dist.default_pg_timeout
    return dist.ProcessGroupGloo(dist.PrefixStore("train", store), rank, 2, options)


def own_address(address: str) -> str:
    """The address of this end of the link to `address`."""
    if address == "127.0.0.1":
        return address
    route = subprocess.run(["ip", "-o", "route", "get", address], capture_output=True, text=True, check=True).stdout
    return route.split(" src ")[1].split()[0]


def main() -> None:
    """Take part until the job is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("gradients", type=int, help="how many numbers are reduced in an iteration")
    options = parser.parse_args()
    # The job holds the other end of standard input: it closes however the job ends.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    torch.set_num_threads(1)
    group = join_group(dist.TCPStore(options.address, options.port, 2), 1, own_address(options.address))
    with contextlib.suppress(RuntimeError):  # the job has closed the connection
        while True:
            for bucket in torch.zeros(options.gradients).chunk(BUCKETS):
                group.allreduce([bucket]).wait()


if __name__ == "__main__":
    main()
