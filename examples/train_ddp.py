"""A small DistributedDataParallel training: one process per GPU (or CPU core), started by srun or torchrun.

Alone and in a group it is the same script; `muri run` only fills in MASTER_ADDR and MASTER_PORT where they are unset.
Try it without Slurm:

    torchrun --nproc-per-node=2 --no-python muri run examples/train_ddp.py --epochs 1
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train on data made up on the spot and print the loss on every rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=32, help="Per rank.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    print(f"started as rank {rank} of {world_size} on {device}", flush=True)
    dist.init_process_group("nccl" if use_gpu else "gloo", rank=rank, world_size=world_size)

    torch.manual_seed(options.seed)
    inputs = torch.randn(options.samples, 64)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=options.seed)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = DistributedDataParallel(network.to(device), device_ids=[local_rank] if use_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = torch.nn.functional.mse_loss(model(batch.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(f"rank {rank} epoch {epoch} loss {mean.item() / world_size:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
