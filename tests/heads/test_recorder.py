import copy
import functools
import inspect

import pytest
import torch
from forms import COMPILED, checkpoint_, converted, in_pairs, in_turns, projected_heads
from transformers import MarianMTModel

from collab_compress import Compression, compress
from collab_compress.attention.run import AttentionConfig
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.heads import Recorder


@pytest.fixture
def model(family, form, make_tiny):
    return converted(make_tiny, family, form)


@in_turns
def test_probabilities_and_values_make_the_outputs_that_are_projected(model, batch, implementation, set_dropout_):
    model.set_attn_implementation(implementation)
    eager = implementation == "eager"
    with Recorder(model, ("outputs",)) as recorder:
        _, expected = projected_heads(model, batch)
        alone = recorder.take()
    with Recorder(model, ("outputs", "probs", "values")) as recorder:
        output = model(**batch, output_attentions=eager)
        records = recorder.take()
    assert len(records) == len(alone) == len(expected)
    for record, other, inputs in zip(records, alone, expected, strict=True):
        real = record.masks.query
        for outputs in (record.outputs, other.outputs):
            torch.testing.assert_close(outputs[real], inputs[real], atol=2e-5, rtol=1e-4)
        assert not record.probs[~_keys(record)].any()  # padding gets no attention
        products = torch.einsum("bhts,bshd->bthd", record.probs, record.values)
        torch.testing.assert_close(products, record.outputs, atol=1e-5, rtol=1e-4)
    for kind in ("encoder", "decoder", "cross") if eager else ():
        name = f"{kind}_attentions" if f"{kind}_attentions" in output else "attentions"
        actual = [record.probs for record in records if record.site.kind == kind]
        for one, other in zip(actual, output[name] if actual else (), strict=True):
            assert torch.equal(one, other)  # those that the model returns

    set_dropout_(model, 0.5)
    with Recorder(model, ("probs", "outputs", "values")) as recorder:
        model.train()(**batch)
        records = recorder.take()
    for record in records:  # from before dropout
        torch.testing.assert_close(record.probs.sum(-1), torch.ones_like(record.probs[..., 0]))
    products = torch.einsum("bhts,bshd->bthd", records[0].probs, records[0].values)
    assert not torch.allclose(products, records[0].outputs, atol=1e-3)


def _keys(record):
    """Return the mask (B, H, T, S) of unpadded keys, True throughout for padded queries."""
    query, key = record.masks
    entries = key[:, None, None, :] | ~query[:, None, :, None]
    return entries.expand_as(record.probs)


def test_queries_and_keys_make_the_probabilities_between_the_masks_of_the_kind(family, make_tiny, batch):
    model = make_tiny(family)
    source = batch["attention_mask"].bool()
    target = batch.get("decoder_attention_mask", source).bool()
    masks = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    with Recorder(model, ("queries", "keys", "probs")) as recorder:
        model(**batch)
        records = recorder.take()
    for record in records:
        scores = torch.einsum("bthd,bshd->bhts", record.queries, record.keys) * record.site.scaling
        allowed = record.probs > 0
        rows = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        torch.testing.assert_close(rows, record.probs, atol=1e-5, rtol=1e-4)
        for actual, mask in zip(record.masks, masks[record.site.kind], strict=True):
            assert torch.equal(actual, mask)


def test_queries_of_collaborative_heads_are_mixed(make_tiny, batch):
    model = make_tiny("bert")
    compress(model, Compression(dk=13), calibration=None)
    module = model.encoder.layer[0].attention.self
    with Recorder(model, ("queries",)) as recorder:
        model(**batch)
        queries = recorder.take()[0].queries
    shared = module.qkv(model.embeddings(batch["input_ids"]))[..., :13]  # (B, T, R)
    for head in range(3):
        row = torch.zeros(13).scatter(0, module.qk.channels[head], module.qk.mixing[head])
        torch.testing.assert_close(queries[:, :, head], shared * row)


def test_a_mask_is_found_by_position_may_be_absent_and_may_not_hide_padding(make_tiny, batch):
    mask = batch["attention_mask"][:, None, None, :].expand(-1, 1, 9, -1)
    with Recorder(model := make_tiny("bert")) as recorder:
        model(batch["input_ids"], batch["attention_mask"])
        assert torch.equal(recorder.take()[0].masks.query, batch["attention_mask"].bool())
        model(batch["input_ids"])
        assert recorder.take()[0].masks == (None, None)
        with pytest.raises(HeadError, match=r"attention_mask has shape \(3, 1, 9, 9\)"):
            model(batch["input_ids"], attention_mask=mask)


def test_labels_tell_a_decoders_padding(make_tiny, batch):
    model = make_tiny("marian", MarianMTModel)
    labels = torch.tensor([[7, 8, 9, 1], [7, 1, -100, -100], [8, 9, 1, -100]])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with Recorder(model, kinds=("decoder",)) as recorder:
        expected = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()  # what the decoder reads
        model(**inputs, labels=labels)
        assert torch.equal(recorder.take()[0].masks.query, expected)
        shifted = model.prepare_decoder_input_ids_from_labels(labels)
        model(**inputs, decoder_input_ids=shifted)
        assert torch.equal(recorder.take()[0].masks.query, expected)
        model(**inputs, decoder_input_ids=shifted, labels=labels)
        assert torch.equal(recorder.take()[0].masks.query, expected)


def test_readings_are_taken_once_by_each_recorder(make_tiny, batch):
    model = make_tiny("bert")
    with Recorder(model) as recorder, Recorder(model, training=True) as trained:
        with Recorder(model, ("probs",)) as other:
            model(**batch)
            assert len(recorder.take()) == len(other.take()) == 2
            assert recorder.take() == trained.take() == []
        model.train()(**batch)
        model(**batch)
        assert len(recorder.take()) == len(trained.take()) == 2
        assert other.take() == []
    assert recorder.take() == []


def test_the_model_is_left_as_it_was(family, make_tiny, batch):
    model = make_tiny(family)
    stock = copy.deepcopy(model)
    before = model(**batch)[0]
    with Recorder(model, ("probs",)):
        pass
    for module, other in zip(model.modules(), stock.modules(), strict=True):
        assert not isinstance(getattr(module, "config", None), AttentionConfig)
        assert set(vars(module)) == set(vars(other))
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert torch.equal(model(**batch)[0], before)


def test_a_pass_that_fails_ends_the_reading(make_tiny, batch):
    model = make_tiny("bert")
    handle = model.encoder.layer[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with Recorder(model) as recorder:
        with pytest.raises(ZeroDivisionError):
            model(**batch)
        handle.remove()
        recorder.take()
        model.encoder.layer[0](torch.randn(1, 4, 24))
        assert recorder.take() == []


def penalised_gradients(model, batch):
    with Recorder(model, ("outputs", "probs")) as recorder:
        loss = model(**batch)[0].square().mean()
        penalty = sum(record.outputs.square().mean() + record.probs.square().sum() for record in recorder.take())
        (loss + penalty).backward()
        assert recorder.take() == []  # a repeated forward pass in backward is not read
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return gradients


@in_pairs
def test_gradient_checkpointing_changes_nothing(model, batch, set_dropout_):
    if not model.supports_gradient_checkpointing:
        pytest.skip("stock model does not support it")
    set_dropout_(model.double().train(), 0.0)  # gradients are summed in another order
    expected = penalised_gradients(model, batch)
    checkpoint_(model, use_reentrant=False)
    actual = penalised_gradients(model, batch)
    assert expected.keys() == actual.keys()
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), COMPILED)
def test_compiles_without_graph_breaks(family, form, make_tiny, batch, set_dropout_):
    model = converted(make_tiny, family, form)
    set_dropout_(model.train(), 0.0)
    expected = penalised_gradients(model, batch)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # nothing is left over from the first
        actual = penalised_gradients(compiled, batch)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[f"_orig_mod.{name}"], gradient, atol=1e-5, rtol=1e-4)


def test_calls_of_forward_are_read_and_the_model_gets_its_own_back(make_tiny, batch):
    """Sentence Transformers and PEFT call `forward` of the model inside."""
    model = make_tiny("bert")
    expected = model(**batch)[0]
    first = Recorder(model)
    with Recorder(model, "probs") as second:
        assert "attention_mask" in inspect.signature(model.forward).parameters
        for call in (model, model.forward):
            for _ in range(2):  # a recorder holds the last pass alone
                output = call(batch["input_ids"], batch["attention_mask"])[0]
                torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
            records = first.take()
            assert len(records) == len(second.take()) == 2
            assert torch.equal(records[0].mask_of("outputs"), batch["attention_mask"].bool())
        first.remove()
        assert len(model.forward(**batch)[0]) == len(second.take()[0].probs)
        assert not first.take()
    assert "forward" not in vars(model)
    model.forward = functools.partial(model.forward, return_dict=True)
    with Recorder(model) as recorder:
        model(**batch)
        assert len(recorder.take()) == 2
    assert isinstance(vars(model)["forward"], functools.partial)


def test_refusals(make_tiny, batch):
    marian = make_tiny("marian", MarianMTModel)
    with Recorder(marian), pytest.raises(HeadError, match="call the model with use_cache=False"):
        marian.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=5)
    model = make_tiny("bert").train()
    checkpoint_(model, use_reentrant=True)
    with Recorder(model), pytest.raises(HeadError, match=r"'use_reentrant': False"):
        model(**batch)
    model = make_tiny("bert")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="runs with attn_implementation 'eager' or 'sdpa'"):
        Recorder(model)
    assert not any("head_hooks" in vars(module) for module in model.modules())
