"""What GPU, CPU, disk and network do while a job runs: NVML, psutil, /proc."""
