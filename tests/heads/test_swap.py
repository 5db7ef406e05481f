"""Swapping heads: what moves, what stays, and that it can be undone to the bit."""

import copy
import re

import pytest
import torch
from accelerate import Accelerator
from forms import converted, hidden, in_pairs, value_size
from torch.nn.utils import parametrizations

from collab_compress import Compression, compress
from collab_compress.architectures import find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import swap_heads_
from collab_compress.heads.swap import head_blocks

FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"
WIDTH = 8  # of a head of the tiny models


def train(model, optimizer, batch, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        mask = batch.get("decoder_attention_mask", batch["attention_mask"]).bool()
        model(**batch).last_hidden_state[mask].sin().sum().backward()
        optimizer.step()


def everything(model, optimizer):
    """Return every tensor of a training: weights, gradients, optimizer state."""
    actual = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            actual[f"{name} grad"] = parameter.grad.clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                actual[f"{name} {key}"] = value.clone()
    return actual


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def permute_output_(site, i, j, state=None):
    """Exchange by hand the output projection's columns of heads i and j."""
    weight = site.part(site.paths.output).weight
    columns = list(torch.arange(weight.shape[1]).split(value_size(site)))
    columns[i], columns[j] = columns[j], columns[i]
    columns = torch.cat(columns).tolist()
    moments = [] if state is None else [t for t in state[weight].values() if t.dim()]
    with torch.no_grad():
        for tensor in [weight, *moments]:
            tensor.copy_(tensor[:, columns].clone())


@in_pairs
def test_training_goes_on_as_if_nothing_had_happened(family, form, make_tiny, batch):
    """Weights and moments move together: a relabelled training stays the relabelled training."""
    straight = converted(make_tiny, family, form).double()
    site = find_attention(straight)[0]
    optimizer = torch.optim.AdamW(straight.parameters(), lr=1e-2)
    train(straight, optimizer, batch)
    swapped = copy.deepcopy(straight)
    other = torch.optim.AdamW(swapped.parameters(), lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair = (0, 2)
    swap_heads_(swapped, [tuple((site.name, head) for head in pair)], other)
    permute_output_(find_attention(swapped)[0], *pair, other.state)
    train(straight, optimizer, batch)
    train(swapped, other, batch)
    torch.testing.assert_close(hidden(swapped, batch), hidden(straight, batch), atol=1e-9, rtol=1e-7)


def test_weights_go_where_the_paper_says(make_tiny):
    model = make_tiny("bert")
    before = copy.deepcopy(model.state_dict())
    swap_heads_(model, [((FIRST, 2), (SECOND, 1))])
    expected = copy.deepcopy(before)
    for part in ("query", "key", "value"):
        for name in ("weight", "bias"):
            for row in range(WIDTH):
                one, other = f"{FIRST}.{part}.{name}", f"{SECOND}.{part}.{name}"
                expected[one][2 * WIDTH + row] = before[other][WIDTH + row]
                expected[other][WIDTH + row] = before[one][2 * WIDTH + row]
    assert same(model.state_dict(), expected)
    assert not same(expected, before)


def test_a_collaborative_head_is_its_mixing_row_its_content_bias_and_its_values(make_tiny):
    model = converted(make_tiny, "bert", "collaborative")
    before = copy.deepcopy(model.state_dict())
    swap_heads_(model, [((FIRST, 0), (FIRST, 2))])
    expected = copy.deepcopy(before)
    assert not torch.equal(*before[f"{FIRST}.qk.channels"][[0, 2]])
    rows = {name: [(0, 2)] for name in ("qk.mixing", "qk.channels")}
    content, value = 2 * 13, 2 * 13 + 3  # behind 13 queries and 13 keys
    values = [(value + row, value + 16 + row) for row in range(WIDTH)]
    rows |= {"qkv.weight": [(content, content + 2), *values], "qkv.bias": values}
    for name, pairs in rows.items():
        for i, j in pairs:
            expected[f"{FIRST}.{name}"][i] = before[f"{FIRST}.{name}"][j]
            expected[f"{FIRST}.{name}"][j] = before[f"{FIRST}.{name}"][i]
    assert same(model.state_dict(), expected)


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "accelerate": lambda parameters: Accelerator(cpu=True).prepare(torch.optim.AdamW(parameters)),
}


@pytest.mark.parametrize(
    ("family", "form", "kind"),
    [
        ("bert", "dense", "adamw"),
        ("bert", "collaborative", "momentum"),
        ("albert", "collaborative", "adamw"),
        ("distilbert", "dense", "momentum"),
        ("marian", "dense", "accelerate"),
    ],
)
def test_swapping_again_restores_every_bit(family, form, kind, make_tiny, batch):
    model = converted(make_tiny, family, form)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, batch)
    sites = find_attention(model)
    last = next(site for site in reversed(sites) if site.kind == sites[0].kind)
    other = last if form == "dense" and last is not sites[0] else sites[0]
    pairs = [((sites[0].name, 0), (other.name, 1)), ((sites[0].name, 2), (other.name, 0 if other is last else 1))]
    pairs = pairs if other is not sites[0] else pairs[:1]
    before = everything(model, optimizer)
    swap_heads_(model, pairs, optimizer)
    after = everything(model, optimizer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    moment = "momentum_buffer" if kind == "momentum" else "exp_avg_sq"
    for part in ("weight", "grad", moment):
        assert any(name.endswith(part) for name in moved)
    output = sites[0].path(sites[0].paths.output)
    assert not any(name.startswith(output) for name in moved)
    swap_heads_(model, pairs, optimizer)
    assert same(everything(model, optimizer), before)


def test_an_optimizer_that_has_made_no_step_yet_is_left_empty(make_tiny):
    model = make_tiny("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    swap_heads_(model, [((FIRST, 0), (SECOND, 0))], optimizer)
    assert not optimizer.state


def test_blocks_of_all_heads_cover_what_heads_own_once(family, make_tiny):
    model = make_tiny(family)
    for site in find_attention(model):
        covered = {}
        for head in range(site.heads):
            for block in head_blocks(site, head):
                count = covered.setdefault(block.parameter, torch.zeros(block.parameter.shape))
                block.of(count).add_(1)
        owned = {
            p for path in (site.paths.query, site.paths.key, site.paths.value) for p in site.part(path).parameters()
        }
        assert set(covered) == owned
        assert all((count == 1).all() for count in covered.values())


def test_kinds_never_mix(make_tiny):
    model = make_tiny("marian")
    names = {site.kind: site.name for site in find_attention(model)}
    for one, other in [("encoder", "decoder"), ("decoder", "cross"), ("encoder", "cross")]:
        with pytest.raises(HeadError, match=f"one is {one} attention, the other {other}"):
            swap_heads_(model, [((names[one], 0), (names[other], 0))])


def narrow_(model, **options):
    compress(model, Compression(**options), calibration=None)


ALTERED = {  # what is done to the model, which heads cannot be swapped, and why
    "fewer values": (
        lambda model: narrow_(model, dv=9, modules="*layer.0*"),
        ((FIRST, 0), (SECOND, 1)),
        re.escape("float32[3, 24], float32[3] against") + ".*pair heads of",
    ),
    "collaborative": (
        lambda model: narrow_(model, dk=8, modules="*layer.1*"),
        ((SECOND, 0), (FIRST, 1)),
        "heads of a collaborative module share its queries and keys",
    ),
    "type": (
        lambda model: model.get_submodule(SECOND).bfloat16(),
        ((FIRST, 0), (SECOND, 0)),
        re.escape("differ, float32[8, 24], float32[8]") + ".* against bfloat16",
    ),
    "bias": (
        lambda model: setattr(model.get_submodule(SECOND).value, "bias", None),
        ((FIRST, 0), (SECOND, 0)),
        "pair heads of modules with the same widths, biases and types",
    ),
    "sharded": (
        lambda model: setattr(model.get_submodule(SECOND).key.weight, "data", torch.empty(0)),
        ((SECOND, 0), (SECOND, 1)),
        r"weights of shape \(0,\) .* gather sharded parameters",
    ),
    "parametrized": (
        lambda model: parametrizations.spectral_norm(model.get_submodule(SECOND).value),
        ((SECOND, 0), (SECOND, 1)),
        "remove parametrizations first",
    ),
}


@pytest.mark.parametrize("case", ALTERED)
def test_heads_that_do_not_fit_are_refused(case, make_tiny):
    alter_, pair, message = ALTERED[case]
    model = make_tiny("bert")
    alter_(model)
    before = copy.deepcopy(model.get_submodule(FIRST).state_dict())
    with pytest.raises(HeadError, match=message):
        swap_heads_(model, [pair])
    assert same(model.get_submodule(FIRST).state_dict(), before)
    swap_heads_(model, [((FIRST, 1), (FIRST, 2))])


def test_one_sided_gradients_and_states_are_refused(make_tiny, batch):
    model = make_tiny("bert")
    model.encoder.layer[0].attention.self.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, batch)
    before = everything(model, optimizer)
    with pytest.raises(HeadError, match="only one of two heads to swap has a gradient, optimizer state 'exp_avg'"):
        swap_heads_(model, [((FIRST, 0), (FIRST, 1)), ((FIRST, 2), (SECOND, 2))], optimizer)
    optimizer.zero_grad()
    with pytest.raises(HeadError, match="train or freeze both modules alike"):
        swap_heads_(model, [((FIRST, 2), (SECOND, 2))], optimizer)
    swap_heads_(model, [((FIRST, 2), (SECOND, 2)), ((FIRST, 0), (FIRST, 1))])
    swap_heads_(model, [((FIRST, 2), (SECOND, 2)), ((FIRST, 0), (FIRST, 1))])
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(model, optimizer).items())


def test_state_that_mixes_heads_is_refused(make_tiny, batch):
    model = make_tiny("bert")
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, batch, steps=1)
    with pytest.raises(HeadError, match=r"keeps 'row_var' of shape \(24, 1\) .* such as AdamW"):
        swap_heads_(model, [((FIRST, 0), (FIRST, 1))], optimizer)
    swap_heads_(model, [((FIRST, 0), (FIRST, 1))])


def test_an_optimizer_of_other_weights_is_refused(make_tiny):
    """Another model's optimizer, or one of master copies, whose step would put back the weights that it holds."""
    model = make_tiny("bert")
    before = copy.deepcopy(model.state_dict())
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    for others in (make_tiny("bert").parameters(), masters):
        with pytest.raises(HeadError, match=r"SGD does not step 12 of 12 parameters .* \(24, 24\).* master copies"):
            swap_heads_(model, [((FIRST, 0), (SECOND, 1))], torch.optim.SGD(others))
    values = [module.attention.self.value for module in model.encoder.layer]
    some = torch.optim.SGD([parameter for value in values for parameter in value.parameters()])
    with pytest.raises(HeadError, match=r"does not step 8 of 12 .* freeze those that no optimizer steps"):
        swap_heads_(model, [((FIRST, 0), (SECOND, 1))], some)
    assert same(model.state_dict(), before)
    model.requires_grad_(False)
    for value in values:
        value.requires_grad_(True)
    swap_heads_(model, [((FIRST, 0), (SECOND, 1))], some)
    assert not same(model.state_dict(), before)
