"""What a run uses of CPUs, memory, disk, network and GPUs: readers of the host and of NVML, and their sampler."""
