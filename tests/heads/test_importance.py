"""Confidence and average distance of heads, against loops over positions of the stock model's own attentions."""

import copy

import pytest
import torch
from forms import converted, in_turns
from recorded import recorded_inputs
from transformers import BertLMHeadModel, BertModel, MarianMTModel

from collab_compress import UnsupportedModelError
from collab_compress.architectures import find_attention
from collab_compress.attention.run import head_hooks
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.heads import average_distance, confidence

END = 7  # a token that counts as the end of a sequence here


def attentions_of(model, batch):
    """Map module paths to the attention probabilities (B, H, T, S) of each call, by stock eager attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    if model.config.is_encoder_decoder:
        rows = {
            "encoder": output.encoder_attentions,
            "decoder": output.decoder_attentions,
            "cross": output.cross_attentions,
        }
    else:
        rows = {"encoder": output.attentions}
    sites = find_attention(model)
    shared = model.config.model_type == "albert"
    return {site.name: rows[site.kind] if shared else rows[site.kind][site.layer : site.layer + 1] for site in sites}


def outputs_of(model, batch):
    """Map module paths to the inputs (B, T, H, dv) of the output projection in each call."""
    sites = find_attention(model)
    inputs = recorded_inputs(model, batch, {site.name: site.part(site.paths.output) for site in sites})
    return {site.name: [call.unflatten(-1, (site.heads, -1)) for call in inputs[site.name]] for site in sites}


def counting(batch, kind, exclude):
    """Return the positions that count as queries, as (sample, position)."""
    prefix = "" if kind == "encoder" or "decoder_input_ids" not in batch else "decoder_"
    ids, mask = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
    return [
        (b, t) for b in range(len(ids)) for t in range(ids.shape[1]) if mask[b, t] and int(ids[b, t]) not in exclude
    ]


def words(batch, kind, b, exclude):
    """Places of the keys that are none of `exclude`, padding included, whose weight is 0."""
    prefix = "decoder_" if kind == "decoder" and "decoder_input_ids" in batch else ""
    return [s for s, token in enumerate(batch[f"{prefix}input_ids"][b].tolist()) if token not in exclude]


def oracle(model, batches, of, exclude=()):
    """Confidence (of="confidence") or AVG_L2 of "outputs" or "probs", one head at one position at a time."""
    values = {}
    for batch in batches:
        parts = outputs_of(model, batch) if of == "outputs" else attentions_of(model, batch)
        for site in find_attention(model):
            for call in parts[site.name]:
                for b, t in counting(batch, site.kind, exclude):
                    heads = [call[b, t, h] if of == "outputs" else call[b, h, t] for h in range(site.heads)]
                    if of == "confidence":
                        measured = [float(row[words(batch, site.kind, b, exclude)].max()) for row in heads]
                    else:
                        measured = [
                            sum(float((other - head).norm()) for other in heads if other is not head)
                            / (site.heads - 1)
                            for head in heads
                        ]
                    values.setdefault(site.name, []).append(measured)
    return {name: torch.tensor(rows, dtype=torch.float64).mean(0) for name, rows in values.items()}


def assert_close(actual, expected):
    assert list(actual) == list(expected)
    for name in expected:
        assert actual[name].dtype == torch.float64
        torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)


def with_ends(batches):
    """Put the end token in the middle of every text, where it is not padding."""
    for batch in batches:
        batch["input_ids"][:, 2] = END
        if "decoder_input_ids" in batch:
            batch["decoder_input_ids"][:, 1] = END
    return batches


@in_turns
def test_confidence_is_the_mean_of_each_rows_largest_weight(family, form, implementation, make_tiny, calibration):
    model = converted(make_tiny, family, form)
    model.set_attn_implementation(implementation)
    actual = confidence(model, calibration[:2])
    assert_close(actual, oracle(model, calibration[:2], "confidence"))
    assert all(((one > 0) & (one <= 1)).all() for one in actual.values())


@pytest.mark.parametrize(
    ("family", "of"), [("bert", "outputs"), ("albert", "probs"), ("marian", "outputs"), ("distilbert", "probs")]
)
def test_distance_is_that_of_the_paper(family, of, make_tiny, calibration):
    model = make_tiny(family)
    assert_close(average_distance(model, calibration[:2], of=of), oracle(model, calibration[:2], of))


@pytest.mark.parametrize(("family", "as_argument"), [("bert", True), ("albert", False), ("marian", False)])
def test_ends_of_sequences_do_not_count(family, as_argument, make_tiny, calibration):
    model, batches = make_tiny(family), with_ends(calibration[:2])
    model.config.eos_token_id = None if as_argument else [END, 8]
    arguments = {"exclude": {END, 8}} if as_argument else {}
    for actual, of in [
        (confidence(model, batches, **arguments), "confidence"),
        (average_distance(model, batches, **arguments), "outputs"),
    ]:
        assert_close(actual, oracle(model, batches, of, exclude=(END, 8)))
        everywhere = oracle(model, batches, of)
        assert not any(torch.allclose(actual[name], everywhere[name], rtol=1e-4) for name in actual)
    assert_close(average_distance(model, batches, exclude=()), everywhere)  # in place of the config's


def test_targets_are_read_from_labels(make_tiny, calibration):
    model = make_tiny("marian", MarianMTModel)
    ids = calibration[0]["input_ids"]
    labels = torch.full((4, 7), -100)
    labels[:, :5] = ids[:, :5]
    labels[:, 2] = END
    read = torch.cat([torch.zeros(4, 1, dtype=torch.long), labels[:, :6]], 1)  # what the decoder reads
    shifted = {"decoder_input_ids": read.where(read != -100, 0), "decoder_attention_mask": (read != -100).long()}
    source = {name: calibration[0][name] for name in ("input_ids", "attention_mask")}
    assert_close(
        confidence(model, [{**source, "labels": labels}], exclude=[END]),
        oracle(model, [{**source, **shifted}], "confidence", exclude=[END]),
    )


def test_only_the_wanted_kinds_are_measured(make_tiny):
    ids = torch.arange(5, 13).view(1, 8)
    batch = {"input_ids": ids, "decoder_input_ids": ids}
    actual = confidence(make_tiny("marian"), [batch], kinds=("cross",))
    assert list(actual) == [f"decoder.layers.{layer}.encoder_attn" for layer in range(2)]
    with pytest.raises(UnsupportedModelError, match="cross"):
        confidence(make_tiny("bert"), [batch], kinds=("cross",))


def test_the_model_is_left_as_it_was(make_tiny, calibration):
    model = make_tiny("bert").train()
    model.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    confidence(model, iter(calibration))
    with pytest.raises(CalibrationError, match="cannot run"):
        average_distance(model, [{"nonsense": torch.ones(1)}])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(head_hooks(site.module) for site in find_attention(model))


def test_heads_that_nearly_agree_are_near():
    """Computed from products instead of differences, float32 would give about 0.05."""
    from collab_compress.heads.hooks import HeadRecord
    from collab_compress.heads.importance import _distances

    class Site:
        name, heads = "site", 32

    outputs = torch.full((1, 1, 32, 64), 100.0)
    outputs[0, 0, 1, 0] += 1e-3
    actual = _distances(HeadRecord(Site(), masks=None, outputs=outputs))
    torch.testing.assert_close(actual[0, 0, 1], torch.tensor(1e-3), rtol=0.05, atol=0)
    torch.testing.assert_close(actual[0, 0, 0], torch.tensor(1e-3 / 31), rtol=0.05, atol=0)


def test_a_causal_decoder_counts_its_own_tokens(make_tiny, calibration):
    model = make_tiny("bert", BertLMHeadModel)
    model.config.is_decoder = True
    model = BertLMHeadModel(model.config).eval()
    batch = {**with_ends(calibration[:1])[0], "use_cache": False}
    (first, *_) = confidence(model, [batch], exclude=[END]).values()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        rows = eager(**batch, output_attentions=True).attentions[0]
    per_sequence = [
        rows[b, :, t, words(batch, "decoder", b, [END])].amax(-1).double()
        for b, t in counting(batch, "decoder", [END])
    ]
    torch.testing.assert_close(first, torch.stack(per_sequence).mean(0), atol=1e-6, rtol=1e-5)


def test_a_single_head_and_weights_that_are_not_finite_are_errors(make_tiny, batch):
    model = make_tiny("bert")
    model.encoder.layer[1].attention.self.value.weight.data[0, 0] = float("nan")
    with pytest.raises(HeadError, match=r"layer\.1\.attention\.self: the importance of its heads is not finite"):
        average_distance(model, [batch])
    config = copy.deepcopy(model.config)
    config.num_attention_heads = 1
    model = BertModel(config).eval()
    with pytest.raises(HeadError, match=r"layer\.0\.attention\.self has a single head"):
        average_distance(model, [batch])
    assert confidence(model, [batch])["encoder.layer.0.attention.self"].shape == (1,)
