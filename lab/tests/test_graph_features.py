"""Features of a model's graph: by hand where that can be done, and what happens where they can't be told."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from muri_lab.prediction.features import OPERATOR_CLASSES, GraphFeatures, estimate_memory
from muri_lab.prediction.graph import GraphError, features_of

FLOAT_BYTES = 4


def of(module, *shape, integer=False):
    return features_of(module, [torch.empty(shape, dtype=torch.int64 if integer else torch.float32, device="meta")])


def operators(features):
    counts = {name: getattr(features, name) for name in OPERATOR_CLASSES}
    return {name: number for name, number in counts.items() if number}


class TestByHand:
    def test_a_linear_layer(self):
        features = of(nn.Linear(8, 4), 2, 8)
        assert features.forward_flops == 2 * 2 * 8 * 4  # a multiplication and an addition each
        assert features.training_flops == 2 * features.forward_flops  # the batch needs no gradient, the weights do
        assert features.parameters == 8 * 4 + 4
        assert features.parameter_bytes == features.gradient_bytes == 36 * FLOAT_BYTES
        assert (features.batch_size, features.input_elements, features.input_bytes) == (2, 8, 2 * 8 * FLOAT_BYTES)
        assert operators(features) == {"matmuls": 1}
        assert features.depth == 1

    def test_fused_attention(self):
        class Attention(nn.Module):
            def forward(self, x):
                return functional.scaled_dot_product_attention(x, x, x)

        features = of(Attention(), 2, 4, 10, 16)  # batch, heads, length, width
        assert features.forward_flops == 2 * (2 * 2 * 4 * 10 * 10 * 16)  # scores and weighted values
        assert operators(features) == {"attentions": 1}

    def test_what_autograd_keeps(self):
        features = of(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 10, 8)
        hidden, scores = 10 * 16, 10 * 4  # the ReLU's output, for the second layer; the result, for the loss
        assert features.activation_bytes == (hidden + scores) * FLOAT_BYTES
        assert features.depth == 2

    def test_tied_and_frozen_parameters(self):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        model[2].weight.requires_grad_(False)
        features = of(model, 2, 4)
        assert (features.parameter_bytes, features.gradient_bytes) == (2 * 16 * FLOAT_BYTES, 16 * FLOAT_BYTES)


class TestGraph:
    def test_the_module_stays_as_it_is(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        of(model, 8, 4)
        assert not model.training
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_what_cannot_be_exported_is_told_from_the_calls(self):
        class Stubborn(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                if torch.compiler.is_exporting():
                    raise RuntimeError("not exportable")
                return functional.relu(self.layer(x))

        features = of(Stubborn(), 2, 4)
        assert features.method == "hooks"
        assert operators(features) == {"matmuls": 1, "elementwise": 1}
        assert features.forward_flops == 2 * 2 * 16

    def test_a_forward_pass_that_depends_on_data(self):
        class Branch(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        with pytest.raises(GraphError, match=r"depends on its data.*muri profile run"):
            of(Branch(), 2, 4)

    def test_inputs_that_do_not_fit(self, capfd):
        with pytest.raises(GraphError, match=r"fails for these inputs.*2, 5.*shapes and types"):
            of(nn.Linear(4, 4), 2, 5)
        assert capfd.readouterr() == ("", "")
        with pytest.raises(GraphError, match="first input must be a tensor"):
            features_of(nn.Linear(4, 4), [])

    def test_several_inputs_and_a_dictionary_as_output(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)

            def forward(self, tokens, numbers):
                return {"loss": self.layer(self.embed(tokens) + numbers), "note": "text"}

        tokens = torch.empty((3,), dtype=torch.int64)
        features = features_of(Two(), [tokens, torch.empty((3, 4))])
        assert (features.embeddings, features.matmuls, features.input_elements) == (1, 1, 5)
        assert features.training_flops > features.forward_flops


class TestMemory:
    FEATURES = GraphFeatures(
        batch_size=8,
        input_elements=1,
        input_bytes=1 * 2**30,
        parameters=1,
        parameter_bytes=4 * 2**30,
        gradient_bytes=3 * 2**30,
        activation_bytes=7 * 2**30,
        working_bytes=5 * 2**30,
        forward_flops=1,
        training_flops=3,
    )

    @pytest.mark.parametrize(("optimizer", "states_gib"), [("sgd", 0), ("momentum", 3), ("adam", 6)])
    def test_by_hand(self, optimizer, states_gib):
        memory = estimate_memory(self.FEATURES, optimizer)
        assert memory.allocated_gib == (7 + 1) + 4 + 5 + states_gib
        assert memory.total_gib == memory.allocated_gib + memory.framework_gib

    def test_the_optimizers_step_may_be_the_peak(self):
        few = GraphFeatures.from_dict(self.FEATURES.to_dict() | {"activation_bytes": 2**30, "working_bytes": 2**30})
        assert estimate_memory(few, "sgd").allocated_gib == 1 + 4 + 3
