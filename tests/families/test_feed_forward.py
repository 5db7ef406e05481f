"""Narrower feed-forward blocks in every family: a stock model comes out, or a refusal of one line."""

import copy

import pytest
import torch
from tiny_families import build, inputs, make_rotary, run
from transformers import BertConfig, BertModel

from collab_compress import Compression, Solver, UnsupportedModelError, compress, expand
from collab_compress.architectures import find_attention
from collab_compress.conversion.feed_forward import cut_, narrower_config
from collab_compress.conversion.inventory import find_feed_forward

NO_WIDTH = {"segformer"}  # convolutions between


@pytest.mark.structures
def test_a_narrower_model_is_a_stock_model(kin, tmp_path):
    dense, batch = build(kin), inputs(kin)
    if kin in NO_WIDTH:
        with pytest.raises(UnsupportedModelError, match=r"sets the width of all \d+ feed-forward blocks"):
            compress(dense, Compression(dff=16), [batch, batch])
        return
    model = copy.deepcopy(dense)
    report = compress(model, Compression(dff=16), [batch, batch])
    assert model.num_parameters() == report.parameters_after < dense.num_parameters()
    saved = report.parameters_before - report.parameters_after
    assert saved == sum(block.parameters_before - block.parameters_after for block in report.of("dff"))
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    loaded = type(dense).from_pretrained(tmp_path)
    torch.testing.assert_close(run(loaded, batch), run(model, batch))
    fresh = type(dense)(copy.deepcopy(model.config))
    assert {name: part.shape for name, part in fresh.named_parameters()} == {
        name: part.shape for name, part in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["albert", "clip", "gpt2", "llama", "t5", "wav2vec2"])
def test_attention_of_a_narrower_model_can_be_converted(name, tmp_path):
    model, batch = build(name), inputs(name)
    narrower = compress(model, Compression(dff=16), [batch, batch]).parameters_after
    widths = Compression(dk=7, dv=find_attention(model)[0].key_value_width // 2, solver=Solver(sweeps=3))
    compress(model, widths, calibration=None)
    model.save_pretrained(tmp_path)
    expected = run(model, batch)
    torch.testing.assert_close(run(type(model).from_pretrained(tmp_path), batch), expected)
    expand(model)
    torch.testing.assert_close(run(model, batch), expected, atol=1e-4, rtol=1e-3)
    assert model.num_parameters() == narrower  # neurons do not come back


def test_each_block_is_searched_in_its_own_layer():
    runs = []
    for count in (1, 2, 3):
        model = BertModel(BertConfig(**{**build("bert").config.to_dict(), "num_hidden_layers": count}))
        model.register_forward_pre_hook(lambda *_, count=count: runs.append(count))
        assert len(find_feed_forward(model, inputs("bert"))) == count
    assert runs.count(3) - runs.count(2) == runs.count(2) - runs.count(1)


@pytest.mark.structures
def test_neurons_are_cut_where_they_are_silenced(kin):
    model, batch = build(kin), inputs(kin)
    if kin in NO_WIDTH:
        return
    blocks = find_feed_forward(model, batch)
    kept = torch.arange(0, blocks[0].width, 3)
    handles = []
    for block in blocks:
        mask = torch.zeros(block.width)
        mask[kept] = 1
        down = model.get_submodule(block.down)
        handles.append(down.register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask,)))
    expected = run(model, batch)
    for handle in handles:
        handle.remove()
    narrower_config(model, blocks, len(kept))
    for block in blocks:
        cut_(model, block, kept)
    torch.testing.assert_close(run(model, batch), expected, atol=1e-5, rtol=1e-4)


def test_batches_that_cannot_be_divided_are_run_whole():
    """Such as positions (3, sequences, tokens) of models of images and texts."""
    model = make_rotary("qwen3_vl_text")
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(9).expand(3, 6, 9)
    batches = [
        {"input_ids": torch.randint(5, 20, (6, 9), generator=generator), "position_ids": positions} for _ in range(4)
    ]
    assert compress(model, Compression(dff=16), batches).refits
