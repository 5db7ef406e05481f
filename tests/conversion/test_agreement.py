"""What of the dense model's results stays, against plain loops over what both models compute."""

import copy
import gc
import json
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_families import build, inputs
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MarianMTModel,
)

from collab_compress import Compression, Solver, compress
from collab_compress.calibration.source import read_calibration
from collab_compress.conversion.agreement import _percent, measure
from collab_compress.conversion.reading import POOLINGS, Reading

TOKENIZER = SimpleNamespace(mask_token_id=4, all_special_ids=[0, 1, 2, 3, 4])
GPT2 = GPT2Config(vocab_size=61, n_embd=24, n_head=3, n_layer=2, n_positions=40, initializer_range=0.4)


def padded(count=8, size=4, side="right", longest=12):
    """Return batches of random tokens of several lengths, padded on one side."""
    generator = torch.Generator().manual_seed(count)
    batches = []
    for _ in range(count):
        ids = torch.randint(5, 61, (size, longest), generator=generator)
        lengths = torch.randint(2, longest + 1, (size, 1), generator=generator)
        mask = (torch.arange(longest) < lengths).long()
        batches.append({"input_ids": ids, "attention_mask": mask if side == "right" else mask.flip(1)})
    return batches


def changed(model, amount=0.1):
    """Return a copy of a model whose weights all differ a little."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter.float()) * amount)
    return other


def made(model_class=BertForSequenceClassification, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": 61, "max_position_embeddings": 128, "initializer_range": 0.4}
    return model_class(BertConfig(**sizes | settings)).eval()


def data_of(model, batches):
    return read_calibration(model, batches, None, None, seed=0)


def measured(model, batches, reading=None, converted=None):
    """Return the agreement of a model with changed weights, and the batches that it was measured on."""
    other = changed(model) if converted is None else converted
    data = data_of(model, batches)
    reading = Reading.of(model, model, None) if reading is None else reading
    return measure(other, model, data, reading)[1], other, data


def outputs(model, batch, name="logits"):
    with torch.no_grad():
        return model(**batch)[name].float().numpy().astype(np.float64)


def softmax(row):
    exps = np.exp(row - row.max())
    return exps / exps.sum()


def slowly_pooled(model, batch, pooling):
    """Return the embedding of each sequence of a batch."""
    vectors = []
    for hidden, mask in zip(outputs(model, batch, "last_hidden_state"), batch["attention_mask"], strict=True):
        tokens = [hidden[place] for place in range(len(mask)) if mask[place]]
        pooled = {"cls": tokens[0], "lasttoken": tokens[-1]}
        pooled |= {"mean": sum(tokens) / len(tokens), "max": np.max(tokens, axis=0)}
        vectors.append(pooled[pooling])
    return vectors


def slow_neighbours(queries, texts):
    """Return the ten texts of the largest cosine with each query, which is the text of the same number."""
    found = []
    for number, query in enumerate(queries):
        cosines = []
        for other, text in enumerate(texts):
            if other != number:
                cosines.append((query @ text / np.linalg.norm(query) / np.linalg.norm(text), other))
        found.append({other for _, other in sorted(cosines)[-10:]})
    return found


def slow_shares(dense, converted, data, pooling):
    """Return the shares of neighbours that stay, all texts of the data being searched."""
    batches = [*data.held_back, *data.used]
    one, other = (
        [vector for batch in batches for vector in slowly_pooled(model, batch, pooling)]
        for model in (dense, converted)
    )
    queries = sum(len(batch["input_ids"]) for batch in data.held_back)
    before = slow_neighbours(one[:queries], one)
    after = [slow_neighbours(other[:queries], other), slow_neighbours(other[:queries], one)]
    return [sum(len(a & b) for a, b in zip(before, found, strict=True)) / 10 / queries for found in after]


@pytest.mark.parametrize("pooling", sorted(POOLINGS))
@pytest.mark.parametrize("side", ["left", "right"])
def test_nearest_texts(pooling, side, make_tiny):
    dense = make_tiny("bert")
    agreement, converted, data = measured(dense, padded(side=side), Reading(None, pooling))
    shares = slow_shares(dense, converted, data, pooling)
    assert 0 < min(shares) <= max(shares) < 1
    names = ("nearest_stay", "nearest_stay_in_dense_index")
    assert agreement.numbers == pytest.approx({**dict(zip(names, shares, strict=True)), "texts": 32})
    assert (agreement.kind, agreement.sequences) == ("nearest texts", 4)
    assert agreement.finding == (
        f"For 4 held-back texts {shares[0]:.0%} of the ten nearest among 32 texts stay; {shares[1]:.0%} where only "
        "queries are converted and the index stays the dense model's."
    )
    assert "docs/guides/embedding_model.md#keep-the-index" in agreement.meaning


def test_a_report_compares_with_the_model_as_it_was(make_tiny):
    model, batches = make_tiny("bert"), padded()
    dense = copy.deepcopy(model)
    report = compress(model, Compression(dk=8, dff=8, solver=Solver(sweeps=1)), batches)
    shares = slow_shares(dense, model, data_of(dense, batches), "mean")
    assert list(report.agreement.numbers.values()) == pytest.approx([*shares, 32])
    assert min(shares) < 1
    assert str(report).splitlines()[1:3] == [report.agreement.finding, report.agreement.meaning]
    assert "move by" not in str(report)
    assert json.loads(json.dumps(report.to_dict()))["agreement"]["numbers"] == report.agreement.numbers
    assert report.output_error is not None


def test_no_more_than_256_texts_are_searched(make_tiny):
    agreement, _, data = measured(make_tiny("bert"), padded(count=40, size=16))
    assert sum(len(batch["input_ids"]) for batch in data.held_back) == agreement.sequences == 64
    assert 240 < agreement.numbers["texts"] <= 256


@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 2), (19, 1)])
def test_few_texts_say_nothing_of_neighbours(count, size, make_tiny):
    assert measured(make_tiny("bert"), padded(count, size))[0] is None
    assert measured(make_tiny("bert"), padded(20, 1))[0] is not None


def test_half_precision(make_tiny):
    dense = make_tiny("bert").to(torch.bfloat16)
    agreement, converted, data = measured(dense, padded())
    assert list(agreement.numbers.values())[:2] == pytest.approx(slow_shares(dense, converted, data, "mean"))
    lm = GPT2LMHeadModel(GPT2).eval().to(torch.bfloat16)
    assert measured(lm, padded())[0].numbers["perplexity"] > 1


class Pooling(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        for name, value in settings.items():
            setattr(self, name, value)


class Holder(nn.Module):
    """A module of a SentenceTransformer that holds the model."""

    def __init__(self, model):
        super().__init__()
        self.auto_model = model


POOLED = [
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
    ({"pooling_mode_max_tokens": True}, "max"),
    ({"pooling_mode_lasttoken": True, "include_prompt": False}, "lasttoken"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
    ({"pooling_mode_weightedmean_tokens": True}, None),
    ({"embedding_dimension": 24, "pooling_mode": "cls"}, "cls"),
    ({"pooling_mode": ["max"]}, "max"),
    ({"pooling_mode": ["cls", "mean"]}, None),
    ({"pooling_mode": "mean_sqrt_len_tokens"}, None),
]


@pytest.mark.parametrize(("settings", "expected"), POOLED)
def test_pooling_is_that_of_sentence_transformers(settings, expected, make_tiny, tmp_path):
    model = make_tiny("bert")
    assert Reading.of(nn.Sequential(Holder(model), Pooling(**settings)), model, None).pooling == expected
    model.save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    stored = BertModel.from_pretrained(tmp_path)
    assert Reading.of(stored, stored, None).pooling == expected
    names = ["Transformer", "Pooling", "Dense"]
    listed = [{"type": f"sentence_transformers.models.{name}", "path": ""} for name in names]
    (tmp_path / "modules.json").write_text(json.dumps(listed[:2]), encoding="utf-8")
    assert Reading.of(stored, stored, None).pooling == expected
    (tmp_path / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    assert Reading.of(stored, stored, None).pooling is None
    for broken in ("[", "[1, 2]"):
        (tmp_path / "modules.json").write_text(broken, encoding="utf-8")
        assert Reading.of(stored, stored, None).pooling is None


def test_pooling_that_nothing_says_is_the_mean_of_encoders(make_tiny):
    for model, expected in (
        (make_tiny("bert"), "mean"),
        (GPT2Model(GPT2), None),
        (make_tiny("marian"), None),
        (made(), None),
        (build("vit"), None),
    ):
        assert Reading.of(model, model, None).pooling == expected
    causal = GPT2Model(GPT2)
    assert Reading.of(nn.Sequential(Holder(causal), Pooling(pooling_mode="lasttoken")), causal, None) == (
        None,
        "lasttoken",
    )


def test_a_sentence_transformer_is_asked_for_its_pooling(make_tiny, minilm_path):
    library = pytest.importorskip("sentence_transformers")
    modules = library.SentenceTransformer(str(minilm_path), device="cpu")
    assert Reading.of(modules, modules[0].auto_model, modules.tokenizer).pooling == "mean"
    modules[1] = type(modules[1])(384, "cls")
    assert Reading.of(modules, modules[0].auto_model, modules.tokenizer).pooling == "cls"
    modules.append(library.models.Dense(384, 8))
    assert Reading.of(modules, modules[0].auto_model, modules.tokenizer).pooling is None


def test_compress_passes_the_pooling_on(make_tiny):
    model, batches = make_tiny("bert"), padded()
    dense = copy.deepcopy(model)
    wrapper = nn.Sequential(Holder(model), Pooling(pooling_mode="cls"))
    numbers = compress(wrapper, Compression(dk=6, solver=Solver(sweeps=1)), batches).agreement.numbers
    assert list(numbers.values())[:2] == pytest.approx(slow_shares(dense, model, data_of(dense, batches), "cls"))


@pytest.mark.parametrize("count", [2, 64])
def test_classes(count):
    dense = made(num_labels=3)
    agreement, converted, data = measured(dense, padded(count, 1))
    stay, change, rows = 0, 0.0, 0
    for batch in data.held_back:
        for one, other in zip(outputs(dense, batch), outputs(converted, batch), strict=True):
            stay += one.argmax() == other.argmax()
            change += sum(abs(p - q) for p, q in zip(softmax(one), softmax(other), strict=True)) / 3
            rows += 1
    assert (agreement.kind, agreement.sequences) == ("classes", rows)
    assert rows == max(1, count // 8)
    expected = {"classes_stay": stay / rows, "probability_change": change / rows}
    assert agreement.numbers == pytest.approx(expected, rel=1e-4)
    assert f"of {rows} held-back rows; probabilities move by {change / rows:.3f} on average." in agreement.finding


def test_independent_labels():
    dense = made(num_labels=3, problem_type="multi_label_classification")
    agreement, converted, data = measured(dense, padded())
    stay, change, labels = 0, 0.0, 0
    for batch in data.held_back:
        for one, other in zip(outputs(dense, batch).flat, outputs(converted, batch).flat, strict=True):
            p, q = (1 / (1 + math.exp(-logit)) for logit in (one, other))
            stay += (p > 0.5) == (q > 0.5)
            change += abs(p - q)
            labels += 1
    expected = {"labels_stay": stay / labels, "probability_change": change / labels}
    assert agreement.numbers == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rows", [1, 9, 10, 16])
def test_scores(rows):
    dense = made(num_labels=1)
    agreement, converted, data = measured(dense, padded(rows, 8))
    one, other = (
        [float(score) for batch in data.held_back for score in outputs(model, batch)[:, 0]]
        for model in (dense, converted)
    )
    assert len(one) == rows
    means = [sum(scores) / rows for scores in (one, other)]
    change = sum(abs(a - b) for a, b in zip(one, other, strict=True)) / rows
    deviations = [
        math.sqrt(sum((a - mean) ** 2 for a in scores) / rows)
        for scores, mean in zip((one, other), means, strict=True)
    ]
    expected = {"score_change": change, "score_deviation": deviations[0]}
    if rows >= 10:
        product = sum((a - means[0]) * (b - means[1]) for a, b in zip(one, other, strict=True)) / rows
        expected["correlation"] = product / deviations[0] / deviations[1]
    assert agreement.numbers == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert ("correlate" in agreement.finding) == (rows >= 10)


def test_scores_that_are_all_equal_correlate_with_nothing():
    dense = made(num_labels=1)
    flat = copy.deepcopy(dense)
    nn.init.zeros_(flat.classifier.weight)
    agreement, *_ = measured(dense, padded(16), converted=flat)
    assert "correlation" not in agreement.numbers
    assert measured(made(num_labels=3, problem_type="regression"), padded())[0] is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_tokens(side):
    dense = made(BertForTokenClassification, num_labels=4)
    agreement, converted, data = measured(dense, padded(side=side))
    stay = tokens = 0
    for batch in data.held_back:
        one, other = outputs(dense, batch), outputs(converted, batch)
        for row, mask in enumerate(batch["attention_mask"].tolist()):
            for place in range(len(mask)):
                if mask[place]:
                    stay += one[row, place].argmax() == other[row, place].argmax()
                    tokens += 1
    assert agreement.numbers == {"labels_stay": pytest.approx(stay / tokens), "tokens": tokens}
    assert 0 < stay < tokens


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers(side):
    dense = made(BertForQuestionAnswering)
    agreement, converted, data = measured(dense, padded(32, side=side))
    stay = rows = 0
    for batch in data.held_back:
        ends = []
        for model in (dense, converted):
            starts, stops = outputs(model, batch, "start_logits"), outputs(model, batch, "end_logits")
            of_model = []
            for row, mask in enumerate(batch["attention_mask"].tolist()):
                tokens = [place for place in range(len(mask)) if mask[place]]
                of_model.append([max(tokens, key=logits[row].__getitem__) for logits in (starts, stops)])
            ends.append(of_model)
        stay += sum(a == b for a, b in zip(*ends, strict=True))
        rows += len(ends[0])
    assert agreement.numbers == {"answers_stay": pytest.approx(stay / rows)}
    assert agreement.sequences == rows
    assert 0 < stay < rows


def slow_perplexity(model, batches, ids="input_ids", mask="attention_mask"):
    losses = []
    for batch in batches:
        logits = outputs(model, batch)
        for row, (tokens, real) in enumerate(zip(batch[ids].tolist(), batch[mask].tolist(), strict=True)):
            for place in range(1, len(tokens)):
                if real[place] and real[place - 1]:
                    losses.append(-math.log(softmax(logits[row, place - 1])[tokens[place]]))
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize("side", ["left", "right"])
def test_perplexity_of_a_decoder(side):
    torch.manual_seed(0)
    dense = GPT2LMHeadModel(GPT2).eval()
    agreement, converted, data = measured(dense, padded(side=side))
    (before, tokens), (after, _) = (slow_perplexity(model, data.held_back) for model in (dense, converted))
    expected = {"perplexity": after, "dense_perplexity": before, "tokens": tokens}
    assert agreement.numbers == pytest.approx(expected, rel=1e-4)
    assert agreement.finding.startswith("Perplexity on 4 held-back texts: ")


def test_perplexity_of_targets(make_tiny, make_batch):
    dense = make_tiny("marian", MarianMTModel)
    batches = [make_batch("marian", seed=seed) for seed in range(16)]
    agreement, converted, data = measured(dense, batches)
    names = ("decoder_input_ids", "decoder_attention_mask")
    (before, tokens), (after, _) = (slow_perplexity(model, data.held_back, *names) for model in (dense, converted))
    expected = {"perplexity": after, "dense_perplexity": before, "tokens": tokens}
    assert agreement.numbers == pytest.approx(expected, rel=1e-4)
    for batch in batches:  # the model shifts these itself
        batch["labels"] = torch.where(batch.pop(names[1]) == 0, -100, batch.pop(names[0]))
    agreement, converted, data = measured(dense, batches)
    losses = []
    for batch in data.held_back:
        logits = outputs(dense, batch)
        for row, labels in enumerate(batch["labels"].tolist()):
            losses += [
                -math.log(softmax(logits[row, place])[label]) for place, label in enumerate(labels) if label != -100
            ]
    assert agreement.numbers["tokens"] == len(losses)
    assert agreement.numbers["dense_perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_perplexity_of_masked_tokens(side):
    dense, batches = made(BertForMaskedLM), padded(side=side, longest=30)
    for batch in batches:
        batch["input_ids"][:, [3, 20]] = 2  # special tokens
    agreement, converted, data = measured(dense, batches, Reading(TOKENIZER, None))
    perplexities = []
    for model in (dense, converted):
        losses = []
        for batch in data.held_back:
            ids = batch["input_ids"].clone()
            masked = []
            for row, mask in enumerate(batch["attention_mask"].tolist()):
                ordinary = [place for place in range(30) if mask[place] and int(ids[row, place]) > 4]
                masked += [(row, place) for place in ordinary[3::7]]
            for place in masked:
                ids[place] = 4
            logits = outputs(model, {**batch, "input_ids": ids})
            losses += [-math.log(softmax(logits[place])[batch["input_ids"][place]]) for place in masked]
        perplexities.append(math.exp(sum(losses) / len(losses)))
    expected = {"perplexity": perplexities[1], "dense_perplexity": perplexities[0], "tokens": len(losses)}
    assert agreement.numbers == pytest.approx(expected, rel=1e-4)
    assert agreement.finding.startswith("Perplexity of every seventh token, masked, on 4 held-back texts: ")
    assert measured(dense, batches)[0] is None  # without a tokenizer
    added = SimpleNamespace(mask_token_id=61, all_special_ids=[])  # a token that the model has no embedding of
    assert measured(dense, batches, Reading(added, None))[0] is None


@pytest.mark.parametrize("name", ["vit", "whisper", "wav2vec2", "marian"])
def test_nothing_is_said_of_other_models(name):
    dense, batch = build(name), inputs(name)
    assert measured(dense, [batch] * 4, converted=dense)[0] is None


def test_a_head_of_a_decoder_on_an_encoder_predicts_no_next_token():
    assert measured(made(BertLMHeadModel), padded())[0] is None
    assert measured(made(BertLMHeadModel, is_decoder=True), padded())[0].kind == "next tokens"


def test_random_tokens_do_not_count(minilm_tokenizer):
    dense = made(vocab_size=200)  # which holds the special tokens
    own = [{"input_ids": torch.full((2, 5), 7), "attention_mask": torch.ones(2, 5, dtype=torch.long)}] * 16
    data = read_calibration(dense, (own, "synthetic"), minilm_tokenizer, None, seed=0)
    for real, batches in ((data.real_used, data.used), (data.real_held_back, data.held_back)):
        assert 0 < len(real) < len(batches)
        for batch in batches:
            is_own = bool((batch["input_ids"] == 7).all())
            assert is_own == any(batch is one for one in real)
    count = sum(len(batch["input_ids"]) for batch in data.real_held_back)
    output_error, agreement = measure(changed(dense), dense, data, Reading(None, None))
    assert agreement.sequences == count < output_error.sequences
    alone = read_calibration(dense, "synthetic", minilm_tokenizer, None, seed=0)
    assert measure(changed(dense), dense, alone, Reading(None, None))[1] is None


@pytest.mark.parametrize(
    ("model_class", "passes", "probes"), [(BertForSequenceClassification, 1, 0), (BertForMaskedLM, 2, 2)]
)
def test_both_models_run_once_and_hold_the_outputs_of_one_batch(model_class, passes, probes):
    """A masked language model runs again, on masked tokens; that it is not causal shows on two of a few tokens."""
    dense = made(model_class)
    alive, most = [], []

    def watch(_, __, output):
        gc.collect()
        alive.append(weakref.ref(output.logits))
        most.append(sum(reference() is not None for reference in alive))

    data = data_of(dense, padded())
    dense.register_forward_hook(watch)
    assert measure(dense, dense, data, Reading(TOKENIZER, None))[1] is not None
    assert len(most) == 2 * passes * len(data.held_back) + probes
    assert max(most) == 2 + probes


def test_shares_are_whole_only_if_all_stay():
    assert [_percent(share) for share in (0, 0.001, 0.784, 0.999, 1)] == ["0%", "1%", "78%", "99%", "100%"]
    dense = made(num_labels=3)
    agreement, *_ = measured(dense, padded(), converted=dense)
    assert agreement.finding.startswith("The predicted class stays for 100% of 4 held-back rows; ")
    assert agreement.numbers == {"classes_stay": 1, "probability_change": 0}
