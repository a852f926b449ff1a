"""Two kernels that PyTorch has none of: one notes the GPU's time, one writes to where nothing is.

They are PTX, which the driver compiles, so that no compiler is needed. The GPU's clock is the same for all processes.
"""

import ctypes
import functools

import torch

_PTX = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry stamp(.param .u64 place)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [place];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u64 %rd2, %globaltimer;
    st.global.u64 [%rd1], %rd2;
    ret;
}
.visible .entry stray()
{
    .reg .b64 %rd<2>;
    mov.u64 %rd1, 4096;
    st.global.u64 [%rd1], %rd1;
    ret;
}
"""


class KernelError(Exception):
    """The driver refuses; the text has its number for the reason."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise KernelError(f"{name} returned {code}")


@functools.cache
def _function(name: bytes) -> ctypes.c_void_p:
    """A kernel of the calling process's context, which PyTorch must have made."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
    _call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name))
    return function


def _launch(name: bytes, *values: int) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    held = [ctypes.c_uint64(value) for value in values]
    addresses = (ctypes.c_void_p * max(1, len(held)))(*(ctypes.addressof(each) for each in held))
    one, none = ctypes.c_uint(1), ctypes.c_uint(0)
    _call("cuLaunchKernel", _function(name), one, one, one, one, one, one, none, stream, addresses, None)


def stamp(times: torch.Tensor, index: int) -> None:
    """Let the GPU note its time (ns) when it comes to this, behind what the calling thread has queued."""
    _launch(b"stamp", times.data_ptr() + 8 * index)


def stray_write() -> None:
    """Make the GPU write to an unmapped address, which ends the CUDA context."""
    _launch(b"stray")
