"""Importing this makes each operation give the same digits in each run; one that cannot says so on standard error.

It is a module because threads of one process share these switches and may not change them: a runtime loads it first.
"""

import torch

if not torch.are_deterministic_algorithms_enabled():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
