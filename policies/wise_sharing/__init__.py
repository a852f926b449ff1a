"""When two jobs should share GPUs, and with which sub-batch: SJF-BSBF."""
