"""Scores with terms of relative embeddings, in every kind of DeBERTa v2, against plain loops and the stock model."""

import copy
import itertools
import math

import pytest
import torch
from tiny_families import build, inputs
from torch import nn
from transformers import (
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForQuestionAnswering,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    DebertaV2Model,
    PretrainedConfig,
    PreTrainedModel,
)

from collab_compress import (
    Compression,
    HeadMask,
    UnsupportedModelError,
    compress,
    expand,
    prune_heads_,
)
from collab_compress.analysis import plan
from collab_compress.architectures import find_attention, find_dense_attention
from collab_compress.calibration import gather_moments
from collab_compress.conversion.cost import part_costs
from collab_compress.errors import HeadError
from collab_compress.factorization import Moments
from collab_compress.heads.swap import swap_heads_

KINDS = {
    "v3": {},
    "one term": {"pos_att_type": ["c2p"]},
    "the other term": {"pos_att_type": "p2c"},
    "embeddings that take no part": {"pos_att_type": None},
    "without buckets": {"position_buckets": -1},
    "few distances": {"position_buckets": -1, "max_relative_positions": 4},
    "no norm": {"norm_rel_ebd": "none"},
    "a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "absolute": {"relative_attention": False, "position_biased_input": True},
}
OWN = {
    "own": {"share_att_key": False},
    "own, one term": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "own, the other term": {"share_att_key": False, "pos_att_type": ["p2c"]},
}
DATA = [inputs("deberta-v2", seed) for seed in range(1, 9)]


def make(kind="v3"):
    """Return a tiny model of a kind, with biases that are not zero."""
    config = DebertaV2Config(**{**build("deberta-v2").config.to_diff_dict(), **(KINDS | OWN)[kind]})
    torch.manual_seed(0)
    model = DebertaV2Model(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("proj.bias"):
                parameter.normal_(std=0.5)
    return model


@torch.no_grad()
def run(model, batch=None, **options):
    batch = inputs("deberta-v2") if batch is None else batch
    return model(**batch, **options)[0][batch["attention_mask"].bool()]


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS | OWN)
def test_full_widths_are_exact_and_expand(kind):
    dense, converted = make(kind), make(kind)
    expected = run(dense)
    assert_same(run(dense, output_attentions=True), expected)
    with HeadMask(dense):
        assert_same(run(dense), expected)
    for compression in [Compression(dv=24)] + [Compression(dk=24)] * (kind in KINDS):
        compress(converted, compression, calibration=None)
        assert_same(run(converted), expected)
        assert_same(run(converted, output_attentions=True), expected)
    long = {"input_ids": torch.randint(5, 61, (1, 30)), "attention_mask": torch.ones(1, 30, dtype=torch.long)}
    assert_same(run(converted, long), run(dense, long))
    one = {name: tensor[:, :1] for name, tensor in long.items()}
    assert_same(run(converted, one), run(dense, one))
    expand(converted)
    assert_same(run(converted), expected)


def scores_by_loops(module, hidden, embeddings, distances):
    """Return scores (B, H, T, S) from the stored projections, one product of three or more numbers at a time."""
    qk, rank = module.qk, module.qk.config.rank
    weight, bias = module.qkv.weight, module.qkv.bias
    queries, keys, contents = weight[:rank], weight[rank : 2 * rank], weight[2 * rank : 2 * rank + 3]
    span, terms = module.pos_ebd_size, module.pos_att_type
    scale = 1 / math.sqrt(8 * (1 + len(terms)))
    batch, length, _ = hidden.shape
    scores = torch.zeros(batch, 3, length, length, dtype=hidden.dtype)

    def product(head, x, y):
        """Return what a head makes of a query's input x and a key's input y."""
        total = contents[head] @ y
        for weight, channel in zip(qk.mixing[head], qk.channels[head].tolist(), strict=True):
            total = total + weight * (queries[channel] @ x) * (keys[channel] @ y + bias[rank + channel])
        return total

    for b, head, t, s in itertools.product(range(batch), range(3), range(length), range(length)):
        x, y = hidden[b, t], hidden[b, s]
        r = embeddings[min(max(int(distances[t, s]) + span, 0), 2 * span - 1)]
        score = product(head, x, y)
        if "c2p" in terms:
            score = score + product(head, x, r)
        if "p2c" in terms:
            score = score + product(head, r, y)
        scores[b, head, t, s] = score * scale
    return scores


@pytest.mark.parametrize("kind", ["v3", "one term", "the other term", "few distances"])
@pytest.mark.parametrize("dv", [None, 9])
@torch.no_grad()
def test_converted_scores_are_those_of_loops_over_heads_queries_and_keys(kind, dv):
    model, batch = make(kind), {name: part[:2, :8] for name, part in inputs("deberta-v2").items()}
    compress(model, Compression(dk=8, dv=dv), DATA)
    model.double()
    read = []
    module = model.encoder.layer[1].attention.self
    module.register_forward_pre_hook(lambda _, args, kwargs: read.append((args[0], kwargs)), with_kwargs=True)
    probs = model(**batch, output_attentions=True).attentions[1]
    (hidden, call), mask = read[0], batch["attention_mask"].bool()
    assert bool((module.qkv.bias[8:16] != 0).all())  # the keys' bias takes part
    scores = scores_by_loops(module, hidden, call["rel_embeddings"], call["relative_pos"][0])
    expected = scores.masked_fill(~mask[:, None, None], -math.inf).softmax(-1)
    unpadded = mask[:, None].expand(-1, 3, -1)
    torch.testing.assert_close(probs[unpadded], expected[unpadded], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", ["v3", "one term", "few distances"])
def test_moments_are_those_of_contents_and_of_embeddings_as_often_as_they_stand_between_tokens(kind):
    model = make(kind)
    sites = find_dense_attention(model)
    contents, batches = [], DATA[:2]
    sites[1].module.register_forward_pre_hook(lambda _, args: contents.append(args[0]))
    (query, key), other = gather_moments(model, sites, batches)[1], gather_moments(model, sites, batches)[0]
    assert other[0].count == query.count == key.count
    embeddings, span = model.encoder.get_rel_embedding(), sites[1].module.pos_ebd_size
    vectors, as_keys = [], []
    for batch, hidden in zip(batches, contents, strict=False):
        distances = model.encoder.get_rel_pos(hidden)[0]
        for mask, states in zip(batch["attention_mask"].bool(), hidden, strict=True):
            vectors += states[mask]
            length = int(mask.sum())
            for t, s in itertools.product(range(length), range(length)):
                as_keys.append(embeddings[min(max(int(distances[t, s]) + span, 0), 2 * span - 1)])
    of_contents, of_positions = Moments.of(torch.stack(vectors)), Moments.of(torch.stack(as_keys))
    expected = of_contents.combined(of_positions)
    for actual, wanted in ((key, expected), (query, of_contents if kind == "one term" else expected)):
        torch.testing.assert_close(actual.mean, wanted.mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(actual.second, wanted.second, atol=1e-5, rtol=1e-4)


def test_costs_count_products_with_as_many_embeddings_as_a_text_needs():
    short, long = (part_costs(make("without buckets"), length, dk=8)[0] for length in (10, 1000))
    assert short.macs_before == 10 * 48 * 24 + 10**2 * 24 + 2 * 10 * 19 * 24
    assert long.macs_before == 1000 * 48 * 24 + 1000**2 * 24 + 2 * 1000 * 160 * 24
    assert short.macs_after == 10 * (48 * 8 + 3 * 7 + 24 * 3) + 10**2 * 3 * 7 + 2 * 10 * 19 * 3 * 8
    own, absolute = (part_costs(make(kind), 10)[0] for kind in ("embeddings that take no part", "absolute"))
    assert own.macs_before == absolute.macs_before == 10 * 48 * 24 + 10**2 * 24


@pytest.mark.parametrize("kind", OWN)
def test_projections_of_positions_alone_keep_queries_keys_and_the_number_of_heads(kind, tmp_path):
    model = make(kind)
    name, other = (site.name for site in find_attention(model))
    reason = r"relative positions have projections of their own \(share_att_key is false\)"
    with pytest.raises(UnsupportedModelError, match=f"queries and keys cannot be converted, because {reason}"):
        compress(model, Compression(dk=12), DATA)
    with pytest.raises(HeadError, match=f"heads cannot be removed, because {reason}"):
        prune_heads_(model, {name: [0]})
    with pytest.raises(HeadError, match=f"{reason}, so heads cannot be swapped"):
        swap_heads_(model, [((name, 0), (other, 1))])
    assert {row.part for row in plan(model, DATA).rows} == {"dv", "dff"}
    report = compress(model, Compression(keep=0.5), DATA)
    assert report.of("dv")
    assert report.of("dff")
    assert not report.of("dk")
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(run(DebertaV2Model.from_pretrained(tmp_path)), run(model))


def test_layers_before_a_convolution_stay():
    with pytest.raises(UnsupportedModelError, match=r"layer\.1 does not read what the layer before it returned"):
        compress(make("a convolution"), Compression(layers=1), DATA)


def test_the_first_deberta_loses_layers_and_neurons():
    model, batches = build("deberta"), [inputs("deberta", seed) for seed in range(4)]
    report = compress(model, Compression(layers=1, dff=16), batches)
    assert len(model.encoder.layer) == 1
    assert model.config.intermediate_size == 16
    assert bool(run(model, batches[0]).isfinite().all())
    assert report.parameters_after == model.num_parameters()


def test_queries_of_other_inputs_are_refused():
    model = make()
    compress(model, Compression(dk=8), calibration=None)
    states, mask = torch.randn(1, 4, 24), torch.ones(1, 4)
    with pytest.raises(UnsupportedModelError, match="called with query_states, which is not implemented"):
        model.encoder(states, mask, query_states=states)


def test_other_distances_than_the_encoders_are_followed():
    """They may be farther apart than the text is long."""
    dense, converted = make(), make()
    compress(converted, Compression(dk=24, dv=24), calibration=None)
    states, mask = torch.randn(2, 5, 24), torch.ones(2, 5)
    distances = torch.randint(-9, 9, (1, 5, 5))
    for sign in (1, -1):
        with torch.no_grad():
            outputs = [model.encoder(states, mask, relative_pos=sign * distances)[0] for model in (dense, converted)]
        assert_same(outputs[1], outputs[0])


@torch.no_grad()
def test_it_is_exported_for_any_length():
    model, batch = make(), inputs("deberta-v2")
    compress(model, Compression(dk=8, dv=9), calibration=None)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (), batch, dynamic_shapes=dict.fromkeys(batch, free)).module()
    long = {"input_ids": torch.randint(5, 61, (2, 23)), "attention_mask": torch.ones(2, 23, dtype=torch.long)}
    for other in (batch, long):
        assert_same(run(program, other), run(model, other))


@pytest.mark.parametrize(
    "class_",
    [
        DebertaV2ForMaskedLM,
        DebertaV2ForQuestionAnswering,
        DebertaV2ForSequenceClassification,
        DebertaV2ForTokenClassification,
    ],
)
def test_models_with_heads_are_compressed_saved_loaded_and_expanded(class_, tmp_path, load_cleanly):
    torch.manual_seed(0)
    model, batch = class_(make().config).eval(), inputs("deberta-v2")
    count = model.num_parameters()
    report = compress(model, Compression(keep=0.5), DATA)
    assert model.num_parameters() == report.parameters_after < count
    unpadded = ... if class_ is DebertaV2ForSequenceClassification else batch["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**batch)[0]
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(load_cleanly(class_, tmp_path)(**batch)[0], expected)
        expand(model)
        assert_same(model(**batch)[0][unpadded], expected[unpadded])


class Tagger(nn.Module):
    """A model that holds DeBERTa, as GLiNER does."""

    def __init__(self, config):
        super().__init__()
        self.encoder, self.head = DebertaV2Model(config), nn.Linear(24, 2)

    def forward(self, **batch):
        return self.head(self.encoder(**batch)[0])


class HolderConfig(PretrainedConfig):
    """The config of `Holder`, which has that of the model inside."""

    model_type = "holder"

    def __init__(self, inner=None, **others):
        super().__init__(**others)
        self.inner = inner


class Holder(PreTrainedModel):
    """A Transformers model of another type that holds DeBERTa."""

    config_class = HolderConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = DebertaV2Model(DebertaV2Config(**config.inner))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


def test_a_module_that_holds_it_is_compressed_by_the_model_inside(tmp_path):
    tagger, batch = Tagger(make().config).eval(), inputs("deberta-v2")
    dense = copy.deepcopy(tagger)
    compress(tagger.encoder, Compression(dk=24, dv=24), calibration=None)
    with torch.no_grad():
        mask = batch["attention_mask"].bool()
        assert_same(tagger(**batch)[mask], dense(**batch)[mask])
        compress(dense.encoder, Compression(keep=0.5), DATA)
        torch.save(dense.state_dict(), tmp_path / "tagger.pt")
        dense.encoder.save_pretrained(tmp_path)
        again = Tagger(make().config).eval()
        again.encoder = DebertaV2Model.from_pretrained(tmp_path)
        again.load_state_dict(torch.load(tmp_path / "tagger.pt"))
        torch.testing.assert_close(again(**batch), dense(**batch))


def test_a_transformers_model_of_another_type_that_holds_it_is_compressed(tmp_path):
    model = Holder(HolderConfig(make().config.to_diff_dict(), attn_implementation="eager")).eval()
    expected = run(model)
    names = [site.name for site in find_attention(model)]
    assert names == [f"inner.encoder.layer.{number}.attention.self" for number in (0, 1)]
    compress(model, Compression(dk=24), calibration=None)
    assert_same(run(model), expected)
    expand(model)
    compress(model, Compression(dk=8, dv=9), DATA)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(run(Holder.from_pretrained(tmp_path, attn_implementation="eager")), run(model))
