"""What every form of score maps does: one contract, on a tiny module."""

import json

import pytest
import torch
from transformers import Trainer, TrainingArguments

from collab_compress import Compression, Factors, compress
from collab_compress.attention import FORM_KINDS, FormEdit, install_, is_converted, uninstall_
from collab_compress.attention.forms import from_stored
from collab_compress.checkpoint import EDITS

DK, HEADS, HEAD_WIDTH, WIDTH = 10, 3, 8, 24
NAME = "encoder.layer.0.attention.self"


@pytest.fixture(params=[4, None, DK])
def module(request, make_tiny):
    """Return BERT's attention with heads of a width, in float64."""
    model = make_tiny("bert").double()
    compress(model, Compression(dk=DK, head_dim=request.param), calibration=None)
    return model.get_submodule(NAME)


def products(module):
    """Return T̂_i and v_i of every head, (H, D + 1, D)."""
    factors = Factors(*module.score_form.read(NAME, module))
    slices = (factors.query * factors.mixing[:, None]) @ factors.key.mT  # (H, D, D)
    return torch.cat([slices, factors.content_bias[:, None]], 1).detach()


def test_the_table_is_complete():
    assert all(EDITS[kind] is FormEdit for kind in FORM_KINDS)
    assert all(form.kind == kind for kind, form in FORM_KINDS.items())


def test_trainer_exempts_content_biases_from_weight_decay(make_tiny, tmp_path):
    model = make_tiny("bert")
    compress(model, Compression(dk=DK), calibration=None)
    arguments = TrainingArguments(str(tmp_path), weight_decay=0.5, learning_rate=0.1, use_cpu=True, report_to=[])
    trainer = Trainer(model, arguments)
    decayed = set(trainer.get_decay_parameter_names(model))
    key = model.get_submodule(f"{NAME}.key")
    assert key.content_bias.shape == (HEADS, WIDTH)
    assert f"{NAME}.key.content_bias" not in decayed
    assert f"{NAME}.key.proj.weight" in decayed
    content, weight = (parameter.detach().clone() for parameter in (key.content_bias, key.proj.weight))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.create_optimizer().step()
    assert torch.equal(key.content_bias, content)
    torch.testing.assert_close(key.proj.weight, weight * 0.95)


def test_is_stored_in_json_and_rebuilt(module):
    form = module.score_form
    stored = json.loads(json.dumps(form.to_dict()))
    assert from_stored(type(form), stored, "attention") == form
    edit = FormEdit(form.kind, {NAME: form})
    assert FormEdit.from_dict({"kind": form.kind, **json.loads(json.dumps(edit.to_dict()))}) == edit


def test_moves_into_another_module_and_back(module, make_tiny):
    form = module.score_form
    dense = make_tiny("bert").double()
    other = dense.get_submodule(NAME)
    query, key, before = other.query, other.key, set(dense.state_dict())
    parts = form.build(other, None)
    form.load_(parts, *form.read(NAME, module))
    install_(other, form, parts)
    form.finish_(other)
    assert is_converted(other)
    torch.testing.assert_close(products(other), products(module))
    assert torch.equal(other.mixing_channels, module.mixing_channels)
    assert other.mixing.requires_grad == module.mixing.requires_grad
    uninstall_(other, form.at, (query, key))
    assert not is_converted(other)
    assert set(dense.state_dict()) == before


def test_a_head_owns_its_rows_and_nothing_else(module):
    form = module.score_form
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    described = form.head_rows()
    assert list(described) == ["mixing", "mixing_channels", "key.content_bias"]
    for head in range(HEADS):
        before = products(module)
        for path, count in described.items():
            assert count * HEADS == len(tensors[path])
            with torch.no_grad():
                own = tensors[path][head * count : (head + 1) * count]
                own.copy_(2 * own if own.is_floating_point() else own.roll(1, 1))
        moved = (products(module) != before).flatten(1).any(1)
        assert moved.tolist() == [other == head for other in range(HEADS)]


def test_counts_parameters(module):
    form = module.score_form
    parameters = [*module.query.parameters(), *module.key.parameters(), module.mixing]
    assert form.parameters((WIDTH, WIDTH)) == sum(parameter.numel() for parameter in parameters)
    assert form.key_width == module.key.width
