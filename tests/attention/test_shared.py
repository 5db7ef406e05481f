"""Heads that read some of the shared channels, by every attention function, against the formula."""

import pytest
import torch
from hypothesis import given, settings
from kernel_inputs import HEAD_WIDTH, MASKS, SCALING, WIDTH, Attention, Inputs, draw_inputs, inputs_strategy, oracle
from torch import nn

from collab_compress import CompressionError, compress
from collab_compress.architectures import find_dense_attention
from collab_compress.attention import SharedConfig, SharedQK
from collab_compress.attention.run import prepare_
from collab_compress.factorization import Factors
from collab_compress.heads.pruning import KeptHeads, _converted_cuts
from collab_compress.options import Compression

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def check(inputs):
    probs, outputs = oracle(inputs)
    with torch.no_grad():  # one query is decoded from a cache
        torch.testing.assert_close(inputs.call()[0].reshape(outputs.shape), outputs, rtol=1e-9, atol=1e-11)
    trained = inputs._replace(x=inputs.x.clone().requires_grad_())
    torch.testing.assert_close(trained.call()[0], outputs, rtol=1e-9, atol=1e-11)
    found = inputs.call("eager")
    torch.testing.assert_close(found[0], outputs, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found[1], probs, rtol=1e-9, atol=1e-11)


@settings(max_examples=25)
@given(inputs_strategy)
def test_attention_follows_the_formula(inputs):
    check(inputs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 4])
def test_every_mask_and_a_single_query(mask, length):
    check(draw_inputs(mask=mask, length=length, keys=4, causal=True))


@IMPLEMENTATIONS
@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize(("mask", "causal"), [("none", True), ("bool", False), ("position bias", False)])
def test_gradients_are_those_of_the_formula(implementation, content, mask, causal):
    inputs = draw_inputs(batch=1, heads=2, length=3, keys=3, content=content, mask=mask, causal=causal)
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    ours = torch.autograd.grad(inputs.call(implementation)[0].sin().sum(), inputs.leaves)
    theirs = torch.autograd.grad(oracle(inputs)[1].sin().sum(), inputs.leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("heads", [[2, 1, 0], [1, 2, 0], [0, 2], [1]])
def test_heads_that_move_or_go_take_their_channels_along(heads):
    inputs = draw_inputs()
    module, expected = inputs.module, oracle(inputs)[1][:, :, heads]
    assert len({tuple(row) for row in module.qk.channels.tolist()}) == 3
    if len(heads) < 3:
        kept = KeptHeads(tuple(heads), 3, HEAD_WIDTH, HEAD_WIDTH, "", "query", "key", "value", "")
        for cut in _converted_cuts(module, kept):
            setattr(cut.owner, cut.name, cut.value)
        prepare_(module)
    else:
        for path, start, size in module.qk.head_rows(module):
            assert size == 1
            tensor = module.state_dict()[path][start : start + 3]
            tensor.copy_(tensor[heads])
    found = inputs._replace(value=inputs.value[:, heads])
    torch.testing.assert_close(found.call()[0], expected)
    torch.testing.assert_close(oracle(found)[1], expected)


@pytest.mark.parametrize("own", [1.0, 0.7])
def test_a_module_that_scales_its_queries_passes_another_factor(own):
    """OPT multiplies queries by its scale and calls with 1; content biases are in the keys, which nothing scales."""
    inputs = draw_inputs()
    expected = oracle(inputs)[1]
    inputs.module.query.proj.weight.data.mul_(SCALING / own)
    torch.testing.assert_close(inputs.call(scaling=own)[0], expected)
    last = inputs._replace(x=inputs.x[:, -1:])
    with torch.no_grad():  # from a cache
        torch.testing.assert_close(last.call(scaling=own)[0].view(2, 3, 2), expected[:, -1])


class Model(nn.Module):
    """The attention of a call as a model of its tensors."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, y, value, mask):
        return Inputs(self.attention, x, y, value, mask).call()[0]


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_as_one_graph(dynamic):
    model = Model(draw_inputs().module)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (4, 7):
        tensors = draw_inputs(length=length, keys=length, mask="bool")[1:5]
        torch.testing.assert_close(compiled(*tensors), model(*tensors))


def test_exports_with_dynamic_batch_and_length():
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    along = {0: batch, 1: length}
    dynamic = {"x": along, "y": along, "value": {0: batch, 2: length}, "mask": {0: batch, 2: length, 3: length}}
    example = draw_inputs(length=5, keys=5, mask="bool")
    program = torch.export.export(Model(example.module), example[1:5], dynamic_shapes=dynamic)
    other = draw_inputs(batch=3, length=7, keys=7, mask="bool")._replace(module=example.module)
    torch.testing.assert_close(program.module()(*other[1:5]), oracle(other)[1])


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("length", [1, 4])
def test_functional_gradients_of_samples_are_those_of_autograd(length):
    inputs = draw_inputs(length=length)

    def squared(x, y, value):
        return inputs._replace(x=x[None], y=y[None], value=value[None]).call()[0].square().sum()

    found = torch.func.vmap(torch.func.grad(squared))(inputs.x, inputs.y, inputs.value)
    leaf = inputs.x.requires_grad_()
    (expected,) = torch.autograd.grad(inputs.call()[0].square().sum(), leaf)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("rank", "head_dim", "content", "reads"),
    [
        (13, None, False, 8),  # d, as dense heads
        (13, None, True, 7),  # one of them is the content bias
        (13, 5, True, 4),
        (13, 13, True, 13),  # the paper's form: all channels, and the content bias behind
        (6, None, True, 6),
        (24, None, True, 8),  # exact: d of H·d channels
        (24, 12, True, 8),
        (24, 5, True, 4),
        (24, 24, False, 24),
    ],
)
def test_heads_read_what_their_width_leaves(rank, head_dim, content, reads, make_tiny):
    site = find_dense_attention(make_tiny("bert"))[0]
    form = SharedConfig.of(site, rank, head_dim, content)
    assert (form.reads, form.width) == (reads, reads + content)


def test_a_content_bias_takes_no_heads_only_channel(make_tiny):
    assert SharedConfig.of(find_dense_attention(make_tiny("bert"))[0], 9, 1, False).reads == 1
    with pytest.raises(CompressionError, match=r"layer\.0\.attention\.self: head_dim is 1, .* pass at least 2"):
        compress(make_tiny("bert"), Compression(dk=9, head_dim=1), calibration=None)


def test_the_strongest_entries_are_read_and_the_others_are_zero():
    module = Attention(2, 4, 2, content=False)
    mixing = torch.tensor([[0.0, -3.0, 0.0, 1.0], [0.0, 0.0, 2.0, 0.0]]).double()
    query, key = torch.randn(2, WIDTH, 4).double()
    qk, layers = SharedQK.build(module.qk.config, module, None)
    qk.load_(layers, Factors(query, mixing, key))
    assert qk.channels[0].tolist() == [1, 3]
    assert torch.equal(qk.mixing_matrix(), mixing)
    assert torch.equal(layers["query"].weight, query.T)
    assert torch.equal(layers["key"].weight, key.T)
