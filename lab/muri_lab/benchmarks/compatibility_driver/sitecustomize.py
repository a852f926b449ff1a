"""Record a script's losses, with all digits, and optimizer steps, from outside of the script.

It stands first on PYTHONPATH and changes nothing that the script sees. It writes a line for each `backward` and each
optimizer step into $COMPATIBILITY_LOG, which is looked up each time: members of one process have one each.
"""

import hashlib
import importlib.machinery
import os
import sys


def _write(line):
    folder = os.environ.get("COMPATIBILITY_LOG")
    if folder:
        with open(os.path.join(folder, f"{os.getpid()}.log"), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(line + "\n")


def _digits(tensor):
    values = tensor.detach()
    if values.numel() == 1:
        return float(values).hex()
    return hashlib.sha256(values.contiguous().cpu().double().numpy().tobytes()).hexdigest()


def _observe(torch):
    backward = torch.autograd.backward

    def observed(tensors, *arguments, **named):
        for each in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
            _write(f"loss {_digits(each)}")
        return backward(tensors, *arguments, **named)

    torch.autograd.backward = observed
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: _write("step"))


def _complete(extension):
    """Give a torchvision without its C++ part (a build for CUDA beside a PyTorch for CPUs) what YOLO needs of it."""
    if extension._has_ops():
        return
    import torch

    def nms(dets, scores, iou_threshold):
        kept, order = [], scores.argsort(descending=True, stable=True)
        areas = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
        while len(order):
            best, order = order[0], order[1:]
            kept.append(int(best))
            size = torch.minimum(dets[best, 2:], dets[order, 2:]) - torch.maximum(dets[best, :2], dets[order, :2])
            shared = size.clamp(min=0).prod(1)
            order = order[shared / (areas[best] + areas[order] - shared) <= iou_threshold]
        return torch.tensor(kept, dtype=torch.int64)

    extension.library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):  # torchvision describes both to PyTorch when it is imported
        extension.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    extension.library.impl("nms", nms, "CPU")
    extension._assert_has_ops = lambda: None


class _Finder:
    """Does something once a module has been imported."""

    afterwards = {"torch": _observe, "torchvision.extension": _complete}  # noqa: RUF012

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """The plain specification of such a module, with a loader that does one thing more."""
        act = cls.afterwards.pop(name, None)
        spec = None if act is None else importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                act(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
