"""Imported, lets each operation give the same digits in each run; one that cannot says so on standard error.

Threads of one process have these switches in common, and may not change them: their runtime imports this ahead.
"""

import torch

if not torch.are_deterministic_algorithms_enabled():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
