"""Half precision: attention is no further from float64 than what the stock model computes in the same dtype."""

import copy

import pytest
import torch
from kernel_inputs import draw_inputs
from torch.nn.functional import scaled_dot_product_attention

from collab_compress import Compression, compress

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@HALVES
@pytest.mark.parametrize("content", [True, False])
def test_outputs_and_probabilities(dtype, content):
    """The stock model gets queries, keys and values of each head, rounded once."""
    shape = {"heads": 4, "rank": 12, "reads": 7, "length": 48, "keys": 48, "width": 16, "content": content}
    rounded = draw_inputs(**shape).to(dtype)
    ours = {implementation: rounded.call(implementation) for implementation in ("sdpa", "eager")}
    exact = rounded.to(torch.float64)
    outputs, probs = exact.call("eager")
    module, scaling = exact.module, exact.module.scaling
    heads = module.qk.heads(*exact.projected, 1.0)
    query, key, value = (part.to(dtype) for part in (*heads, exact.value))
    rows = torch.softmax(query @ key.mT * scaling, -1)
    fused = scaled_dot_product_attention(query, key, value, scale=scaling)
    ceilings = {"sdpa": error(fused.transpose(1, 2), outputs)}
    ceilings["eager"] = error((rows @ value).transpose(1, 2), outputs)
    for implementation, (found, _) in ours.items():
        assert found.dtype == dtype
        assert error(found, outputs) <= 1.5 * ceilings[implementation]  # projections are rounded too
    assert error(ours["eager"][1], probs) <= 1.5 * error(rows, probs)


def test_mixed_precision(make_tiny, batch):
    dense = make_tiny("bert")
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=24), calibration=None)
    expected = dense(**batch).last_hidden_state.detach().double()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            states, stock = (one(**batch).last_hidden_state.detach() for one in (model, dense))
        assert error(states, expected) < 1.5 * error(stock, expected)
