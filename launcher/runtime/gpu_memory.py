"""How much memory the GPU has, asked of its driver: the runtime itself may have neither PyTorch nor a CUDA context."""

import logging
import subprocess
import sys
from typing import Final

from muri.units import GIB

logger = logging.getLogger("muri.launcher")

LIMIT_S: Final = 30.0

_ASK: Final = """
import ctypes
cuda, device, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_size_t()
error = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
print(error or cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), total.value)
"""


def total_gib() -> float | None:
    """Memory of this process's first GPU; None where no CUDA driver tells it.

    A child asks: what the driver takes for itself ends with it.
    """
    ask = [sys.executable, "-I", "-S", "-c", _ASK]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    if answer[0] != "0":
        logger.warning("the CUDA driver does not tell the GPU's memory (error %s)", answer[0])
        return None
    return int(answer[1]) / GIB
