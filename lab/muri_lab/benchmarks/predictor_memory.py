"""The memory formula beside PyTorch's own count of what it allocates, on the CPU."""

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from muri.units import GIB, MIB
from muri_lab.benchmarks.profile_zoo import example_inputs
from muri_lab.benchmarks.zoo_models import VOCABULARY, Entry, zoo
from muri_lab.prediction.features import estimate_memory
from muri_lab.prediction.graph import features_of


def measure() -> dict[str, Any]:
    """Ratio of the formula to the measured peak for every model of the zoo, with its largest batch."""
    largest = max(entry.batch_size for entry in zoo())
    rows = [_row(entry) for entry in zoo() if entry.batch_size == largest]
    ratios = sorted(row["formula_mib"] / row["measured_mib"] for row in rows)
    errors = [abs(ratio - 1) for ratio in ratios]
    error = {
        "mean_relative": round(sum(errors) / len(errors), 4),
        "worst_relative": round(max(errors), 4),
        "least_ratio": round(ratios[0], 4),
        "most_ratio": round(ratios[-1], 4),
        "models": len(rows),
    }
    return {
        "what": "peak of one SGD step with momentum, PyTorch's allocations on the CPU",
        "error": error,
        "rows": rows,
    }


def _row(entry: Entry) -> dict[str, Any]:
    formula = estimate_memory(features_of(entry.build(), example_inputs(entry)), "momentum")
    return {
        "model": entry.name,
        "formula_mib": round(formula.allocated_gib * GIB / MIB, 3),
        "measured_mib": round(peak_bytes(entry) / MIB, 3),
    }


def peak_bytes(entry: Entry) -> int:
    """Peak of a training step: what stays, and the most that the step allocates beside it."""
    torch.manual_seed(6)
    model = entry.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs = _inputs(entry)
    _step(model, optimizer, inputs)  # makes the optimizer's state
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _step(model, optimizer, inputs)
    stays = [*model.parameters(), *model.buffers(), inputs]
    stays += [state["momentum_buffer"] for state in optimizer.state.values()]
    return sum(item.numel() * item.element_size() for item in stays) + _most(recorded)


def _most(recorded: Any) -> int:
    """The most that was allocated at once, from the profiler's record of each allocation and release."""
    events = [item for item in recorded.profiler.kineto_results.events() if item.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda item: item.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _inputs(entry: Entry) -> Tensor:
    (example,) = example_inputs(entry)
    generator = torch.Generator().manual_seed(6)
    if example.is_floating_point():
        return torch.randn(example.shape, generator=generator)
    return torch.randint(0, VOCABULARY, example.shape, generator=generator)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(inputs).square().mean().backward()
    optimizer.step()
