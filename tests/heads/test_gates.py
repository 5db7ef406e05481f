"""Learned head gates, against their distribution written out, masks, and a task that needs one head."""

import math

import pytest
import torch
from forms import outputs, randomise_

from collab_compress import Compression, HeadMask, compress, mix_heads_, prune_heads_
from collab_compress.attention.run import add_head_hook_, head_hooks
from collab_compress.errors import HeadError
from collab_compress.heads import HeadGates, hooks
from collab_compress.heads.gates import STRETCH, TEMPERATURE


def hard_concrete(u, log_alpha, temperature=TEMPERATURE):
    s = 1 / (1 + math.exp(-(math.log(u) - math.log(1 - u) + log_alpha) / temperature))
    return min(1.0, max(0.0, s * (STRETCH[1] - STRETCH[0]) + STRETCH[0]))


def spread_(gates, seed=0):
    """Give the gates different values, some of them closed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for log_alpha in gates.parameters():
            log_alpha.copy_(torch.randn(log_alpha.shape, generator=generator) * 3)
            log_alpha[0] = -4.0
    return gates


def test_gates_of_evaluation_are_masks(family, make_tiny, batch):
    model = make_tiny(family)
    with spread_(HeadGates(model)) as gates:
        actual, masks = outputs(model, batch), gates.values()
        for name, log_alpha in gates.log_alphas.items():
            right = [hard_concrete(0.5, float(value), 1.0) for value in log_alpha.tolist()]
            assert masks[name].tolist() == pytest.approx(right, abs=1e-6)
            assert gates.closed()[name] == [head for head, value in enumerate(right) if value == 0]
    with HeadMask(model, masks):
        torch.testing.assert_close(outputs(model, batch), actual)


def test_gates_of_training_are_drawn_for_each_sequence(make_tiny, batch, set_dropout_):
    model = set_dropout_(make_tiny("bert"), 0.0).train()
    gates = spread_(HeadGates(model))
    torch.manual_seed(3)
    actual = outputs(model, batch)
    gates.remove()
    torch.manual_seed(3)
    masks = {}
    for name, log_alpha in gates.log_alphas.items():
        draws = torch.rand(len(batch["input_ids"]), 3)
        rows = [
            [hard_concrete(float(u), float(a)) for u, a in zip(row, log_alpha.tolist(), strict=True)] for row in draws
        ]
        masks[name] = torch.tensor(rows)
    with HeadMask(model, masks):
        torch.testing.assert_close(outputs(model, batch), actual, rtol=1e-4, atol=1e-5)


def test_the_penalty_is_the_expected_number_of_open_heads(make_tiny):
    gates = spread_(HeadGates(make_tiny("bert")))
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    count = 0.0
    for log_alpha in torch.cat([parameter.detach() for parameter in gates.parameters()]).tolist():
        count += sum(hard_concrete(u, log_alpha) > 0 for u in draws) / len(draws)
    assert gates.penalty().item() == pytest.approx(count, abs=0.05)
    gates.penalty().backward()
    assert all((parameter.grad > 0).all() for parameter in gates.parameters())


@pytest.mark.parametrize(
    ("family", "edit"),
    [("bert", "stock"), ("albert", "values"), ("distilbert", "mixed"), ("marian", "stock"), ("marian", "values")],
)
def test_folded_gates_compute_the_same_and_closed_heads_can_be_pruned(edit, family, make_tiny, batch):
    model = make_tiny(family)
    if edit == "values":
        compress(model, Compression(dk=9, dv=12), None)
    if edit == "mixed":
        mix_heads_(model)
        randomise_(model)
    gates = spread_(HeadGates(model))
    actual, closed = outputs(model, batch), gates.closed()
    gates.fold_()
    torch.testing.assert_close(outputs(model, batch), actual, rtol=1e-4, atol=1e-5)
    if edit != "mixed":
        prune_heads_(model, {name: heads for name, heads in closed.items() if len(heads) < 3})
        torch.testing.assert_close(outputs(model, batch), actual, rtol=1e-4, atol=1e-5)


def test_the_recipe_of_the_docstring_when_all_heads_of_a_layer_close(make_tiny, batch):
    model = make_tiny("bert")
    gates = spread_(HeadGates(model))
    first = next(iter(gates.log_alphas))
    with torch.no_grad():
        gates.log_alphas[first].copy_(torch.tensor([-9.0, -5.0, -7.0]))
    assert gates.closed()[first] == [0, 1, 2]
    actual, closed = outputs(model, batch), gates.closed(keep_one=True)
    assert closed[first] == [0, 2]
    gates.fold_()
    prune_heads_(model, closed)
    torch.testing.assert_close(outputs(model, batch), actual, rtol=1e-4, atol=1e-5)


def test_gates_fold_once_and_not_after_removal(make_tiny):
    model = make_tiny("bert")
    for end in (HeadGates.remove, HeadGates.fold_):
        gates = HeadGates(model)
        end(gates)
        weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with pytest.raises(HeadError, match="this HeadGates has been removed from the model; make a new one"):
            gates.fold_()
        assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def test_gates_close_heads_that_the_task_does_not_need(make_tiny, batch, set_dropout_):
    """The target is the model's output with one head of each layer; its gate stays open and the others close."""
    torch.manual_seed(0)
    model = make_tiny("bert")
    names = [f"encoder.layer.{layer}.attention.self" for layer in range(2)]
    with HeadMask(model, {name: torch.tensor([0.0, 1.0, 0.0]) for name in names}):
        target = outputs(model, batch)
    model.requires_grad_(False)
    gates = HeadGates(set_dropout_(model, 0.0).train())
    optimizer = torch.optim.Adam(gates.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(**batch)[0] - target).square().mean() + 0.01 * gates.penalty()
        loss.backward()
        optimizer.step()
    assert gates.closed() == {name: [0, 2] for name in names}
    assert all(values[1] > 0.9 for values in gates.values().values())


def test_an_error_leaves_no_hook_behind(make_tiny, monkeypatch):
    model = make_tiny("bert")
    last = model.encoder.layer[1].attention.self

    def fail(module, hook, *, first=False):
        if module is last:
            raise HeadError("no")
        add_head_hook_(module, hook, first=first)

    monkeypatch.setattr(hooks, "add_head_hook_", fail)
    with pytest.raises(HeadError, match="no"):
        HeadGates(model)
    assert not any(head_hooks(layer.attention.self) for layer in model.encoder.layer)
    assert model.encoder.layer[0].attention.self.config is model.config


def test_folding_that_is_interrupted_changes_nothing(make_tiny, batch, monkeypatch):
    model = make_tiny("bert")
    gates = spread_(HeadGates(model))
    before, remove, removed = outputs(model, batch), hooks.remove_head_hook_, []

    def interrupted(module, hook):
        if removed:
            raise KeyboardInterrupt
        removed.append(module)
        remove(module, hook)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "remove_head_hook_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gates.fold_()
    assert removed
    assert torch.equal(outputs(model, batch), before)
    gates.fold_()
    torch.testing.assert_close(outputs(model, batch), before, atol=1e-5, rtol=1e-4)
    assert not any(map(head_hooks, model.modules()))
