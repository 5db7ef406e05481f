import pytest
import torch
from recorded import recorded_inputs
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
)

from collab_compress import Compression, compress
from collab_compress.analysis import plan
from collab_compress.architectures import find_dense_attention
from collab_compress.calibration import gather_moments, run_batch
from collab_compress.calibration.gather import batch_masks, unpadded
from collab_compress.errors import CalibrationError
from collab_compress.heads import Tap
from collab_compress.transformers_parts import CACHE_NAME


def unpadded_inputs(model, site, side, batches):
    """Return the inputs of the query or key projection at all unpadded tokens."""
    target = site.kind == "decoder" or (site.kind == "cross" and side == "query")
    name = "decoder_attention_mask" if target else "attention_mask"
    inputs = []
    for batch in batches:
        calls = recorded_inputs(model, batch, {side: getattr(site, side)})[side]
        inputs += [hidden[batch[name].bool()] for hidden in calls]
    return torch.cat(inputs).double()


def test_moments_are_those_of_all_real_tokens(family, make_tiny, calibration):
    model = make_tiny(family)
    sites = find_dense_attention(model)
    moments = dict(zip([site.name for site in sites], gather_moments(model, sites, calibration), strict=True))
    for site in sites:
        for moment, side in zip(moments[site.name], ("query", "key"), strict=True):
            tokens = unpadded_inputs(model, site, side, calibration)
            assert moment.count == len(tokens)
            torch.testing.assert_close(moment.mean, tokens.mean(0))
            torch.testing.assert_close(moment.second, tokens.T @ tokens / len(tokens))


def test_mode_and_hooks_are_left_as_they_were(make_tiny, calibration):
    model = make_tiny("bert").train()
    model.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    gather_moments(model, find_dense_attention(model), calibration)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_queries_and_keys_that_read_different_inputs_have_their_own_moments(make_tiny, calibration):
    model = make_tiny("bert")
    (site,) = find_dense_attention(model, "*layer.0*")
    handle = site.key.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    query, key = gather_moments(model, [site], calibration)[0]
    handle.remove()
    torch.testing.assert_close(key.mean, 2 * query.mean)
    torch.testing.assert_close(key.second, 4 * query.second)


def test_only_padding_is_an_error(make_tiny, batch):
    model = make_tiny("bert")
    masked = {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    with pytest.raises(CalibrationError, match=r"layer\.0\.attention\.self saw no token"):
        gather_moments(model, find_dense_attention(model), [masked])


def test_inputs_that_are_not_finite_are_an_error(make_tiny, batch):
    model = make_tiny("bert")
    with torch.no_grad():
        model.embeddings.LayerNorm.weight.fill_(float("inf"))
    with pytest.raises(CalibrationError, match="inputs are not finite"):
        gather_moments(model, find_dense_attention(model), [batch])


def test_an_argument_that_is_none_is_left_out(make_tiny, batch):
    """Without encoder states, cross-attention is not called, which says nothing of batches that have them."""
    config = make_tiny("bert").config
    config.is_decoder = config.add_cross_attention = True
    model = BertModel(config).eval()
    states = torch.randn(*batch["input_ids"].shape, 24, generator=torch.Generator().manual_seed(0))
    batches = [{**batch, "encoder_hidden_states": value} for value in (None, states)]
    sites = find_dense_attention(model)
    for moments, expected in zip(
        gather_moments(model, sites, batches), gather_moments(model, sites, batches[::-1]), strict=True
    ):
        assert [moment.count for moment in moments] == [moment.count for moment in expected]


GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": None}


def test_decoders_run_without_a_cache():
    model, batch = GPT2LMHeadModel(GPT2Config(**GPT2)), {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    assert getattr(run_batch(model, batch), CACHE_NAME) is None
    assert getattr(run_batch(model, {**batch, "use_cache": True}), CACHE_NAME) is not None


class Plain(BertModel):
    """A model whose forward pass takes two arguments alone."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


class Tensors(BertModel):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


@pytest.mark.parametrize(("model_class", "output"), [(Plain, "last_hidden_state"), (Tensors, "output 0")])
def test_a_forward_pass_need_not_take_return_dict(model_class, output, make_tiny, calibration):
    drifts = []
    for kind in (BertModel, model_class):
        report = compress(make_tiny("bert", kind), Compression(dk=8, dv=12, dff=16), calibration)
        drifts.append(report.drift)
    assert drifts[1].output == output
    assert drifts[1].relative_error == drifts[0].relative_error


def ids(rows, length, **others):
    return {"input_ids": torch.ones(rows, length, dtype=torch.long), **others}


@pytest.mark.parametrize(
    ("model_class", "batch", "message"),
    [
        (
            GPT2Model,
            ids(3, 17),
            r"in self\); its sequences have 17 tokens, and the model has 16 positions",
        ),
        (
            GPT2ForSequenceClassification,
            ids(3, 5),
            r"padding token is defined\.\); set model\.config\.pad_token_id",
        ),
        (
            GPT2Model,
            ids(3, 5, attention_mask=torch.ones(2, 5, dtype=torch.long)),
            r"different numbers of sequences: input_ids \(3, 5\), attention_mask \(2, 5\)$",
        ),
        (
            GPT2Model,
            {"pixel_values": torch.ones(1, 3)},
            r"reads input_ids, and the batch holds pixel_values \(1, 3\)",
        ),
    ],
)
def test_an_error_of_the_model_is_passed_on_with_its_cause(model_class, batch, message):
    with pytest.raises(CalibrationError, match=message):
        run_batch(model_class(GPT2Config(**GPT2)), batch)


def test_a_mask_of_other_positions_is_refused_where_there_is_padding():
    values, mask = torch.arange(24.0).view(2, 6, 2), torch.ones(2, 4, dtype=torch.bool)
    assert len(unpadded(values, mask)) == 12
    mask[1, 2:] = False
    with pytest.raises(CalibrationError, match=r"have shape \(2, 6, 2\), and the mask .* shape \(2, 4\)"):
        unpadded(values, mask)


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_the_pad_token_of_an_encoder_decoder_may_be_its_decoders(kind, make_tiny):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=61, pad_token_id=0, is_decoder=True, add_cross_attention=True, **sizes)
    decoder, ids = BertLMHeadModel(config), torch.randint(5, 61, (4, 8))
    ids[:, 5:] = 0
    if kind == "texts":
        model, batch = EncoderDecoderModel(encoder=make_tiny("bert"), decoder=decoder).eval(), {"input_ids": ids}
    else:
        images = ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes))
        model = VisionEncoderDecoderModel(encoder=images, decoder=decoder).eval()
        batch = {"pixel_values": torch.randn(4, 3, 8, 8)}
    batch["decoder_input_ids"] = ids
    assert batch_masks(model, batch)["decoder"].query.sum() == 4 * 5
    with Tap(model, ("outputs",)), torch.no_grad():
        model(**batch)
    assert plan(model, [batch] * 4).rows
    assert compress(model, Compression(dff=16), [batch] * 8).refits
