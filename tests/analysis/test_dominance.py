"""Dominant heads and pruning curves, against models whose weights are cut by hand."""

import copy
from math import isnan
from statistics import fmean

import pytest
import torch
from transformers import BertForQuestionAnswering, BertForSequenceClassification

from collab_compress import HeadMask, head_importance, prune_heads_
from collab_compress.analysis import Dominance, dominant_heads, pruning_curve, random_importance, split_sequences
from collab_compress.architectures import find_attention
from collab_compress.attention.run import head_hooks

NAME = "encoder.layer.0.attention.self"


def silenced(model, name, head):
    """Return a copy whose output projection ignores a head."""
    model = copy.deepcopy(model)
    site = next(site for site in find_attention(model) if site.name == name)
    weight = site.part(site.paths.output).weight
    width = weight.shape[1] // site.heads
    weight.data[:, head * width : (head + 1) * width] = 0
    return model


def real_outputs(model, batch):
    with torch.no_grad():
        output = model(**batch)[0]
    return output[batch.get("decoder_attention_mask", batch["attention_mask"]).bool()].double()


def sums_of(model, batches):
    """Return the sum of the first channel; that of all channels is 0 after a layer norm."""
    return sum(float(real_outputs(model, batch)[:, 0].sum()) for batch in batches)


def test_output_error_is_that_of_models_with_a_head_cut_out(either):
    model, batches = either
    dominance = dominant_heads(model, batches=(batch for batch in batches))
    assert dominance.baseline == 0
    before = [real_outputs(model, batch) for batch in batches]
    norm = sum(float(output.square().sum()) for output in before)
    for name, changes in dominance.changes.items():
        for head, change in enumerate(changes):
            other = silenced(model, name, head)
            off = sum(
                float((real_outputs(other, batch) - output).square().sum())
                for batch, output in zip(batches, before, strict=True)
            )
            assert float(change) == pytest.approx((off / norm) ** 0.5, rel=1e-4)
        assert dominance.dominant[name] == int(changes.argmax())


def test_padding_does_not_count_in_answers(make_tiny, batch):
    """Scores of answers have one number for each token."""
    model = make_tiny("bert", BertForQuestionAnswering)
    longer = {name: torch.nn.functional.pad(value, (0, 4)) for name, value in batch.items()}
    changes, expected = (dominant_heads(model, batches=[data]).changes[f"bert.{NAME}"] for data in (longer, batch))
    torch.testing.assert_close(changes, expected, rtol=1e-4, atol=1e-6)


def test_a_score_is_taken_without_each_head(either, family):
    model, batches = either
    greater_is_better = family in ("bert", "marian")
    dominance = dominant_heads(model, lambda m: sums_of(m, batches), greater_is_better=greater_is_better)
    baseline = sums_of(model, batches)
    assert dominance.baseline == pytest.approx(baseline)
    pick = min if greater_is_better else max
    for site in find_attention(model):
        changes = [sums_of(silenced(model, site.name, head), batches) - baseline for head in range(site.heads)]
        torch.testing.assert_close(
            dominance.changes[site.name], torch.tensor(changes, dtype=torch.float64), rtol=1e-4, atol=1e-4
        )
        assert dominance.dominant[site.name] == changes.index(pick(changes))
    assert not any(head_hooks(site.module) for site in find_attention(model))


def test_only_the_given_heads_are_silenced(either):
    model, batches = either
    calls = []

    def score(model):
        calls.append(1)
        return sums_of(model, batches)

    every = dominant_heads(model, score)
    heads = {name: len(changes) - 1 for name, changes in every.changes.items()}
    calls.clear()
    dominance = dominant_heads(model, score, heads=heads)
    assert len(calls) == 1 + len(heads)
    assert dominance.dominant == heads
    assert dominance.mean_change(heads) == pytest.approx(every.mean_change(heads))
    last = dict([heads.popitem()])
    assert dominant_heads(model, score, heads=last).dominant == last
    with pytest.raises(ZeroDivisionError):
        dominant_heads(model, lambda _: 1 / 0)
    assert not any(head_hooks(site.module) for site in find_attention(model))


def test_other_heads_have_their_own_mean_change():
    changes = {"a": torch.tensor([-3.0, 1.0]), "b": torch.tensor([0.0, -5.0]), "c": torch.tensor([2.0, 4.0])}
    dominance = Dominance(50.0, changes, {"a": "encoder", "b": "encoder", "c": "cross"}, greater_is_better=True)
    assert dominance.dominant == {"a": 0, "b": 1, "c": 0}
    assert dominance.mean_change(dominance.dominant) == {"encoder": -4.0, "cross": 2.0}
    assert dominance.mean_change({"a": 1, "b": 1, "c": 1}) == {"encoder": -2.0, "cross": 4.0}


@pytest.mark.parametrize("sizes", [(4, 3), (1, 1, 1), (2,)])
def test_sequences_choose_or_score(sizes):
    rows = iter(range(sum(sizes)))
    batches = [{"input_ids": torch.tensor([[next(rows)] for _ in range(size)]), "flag": True} for size in sizes]
    sides = [[int(row) for batch in side for row in batch["input_ids"]] for side in split_sequences(batches)]
    assert sorted(sides[0] + sides[1]) == list(range(sum(sizes)))
    assert abs(len(sides[0]) - len(sides[1])) <= len(sizes)
    assert all(sides)


def test_kinds_can_be_chosen(make_tiny, make_batch):
    dominance = dominant_heads(make_tiny("marian"), batches=[make_batch("marian")], kinds=("cross",))
    assert set(dominance.mean_change(dominance.dominant)) == {"cross"}
    assert all("encoder_attn" in name for name in dominance.changes)


@pytest.fixture
def classifier(make_tiny):
    return make_tiny("bert", BertForSequenceClassification)


def labelled(batches):
    return [{**batch, "labels": torch.arange(len(batch["input_ids"])) % 2} for batch in batches]


def test_the_curve_prunes_the_least_important_first(classifier, calibration):
    batches = labelled(calibration[:2])
    importance = head_importance(classifier, batches)
    curve = pruning_curve(classifier, importance, lambda model: sums_of_logits(model, batches))
    assert [point.share for point in curve] == [step / 10 for step in range(11)]
    assert [point.removed for point in curve] == [round(6 * step / 10) for step in range(11)]
    assert all(isnan(point.random_score) for point in curve)
    ranked = sorted((float(v), name, h) for name, values in importance.items() for h, v in enumerate(values))
    for point in curve:
        chosen = {(name, head) for name, heads in point.heads.items() for head in heads}
        assert chosen == {(name, head) for _, name, head in ranked[: point.removed]}
    for point in curve[:-1]:
        if all(len(heads) < 3 for heads in point.heads.values()):
            pruned = copy.deepcopy(classifier)
            if point.heads:
                prune_heads_(pruned, point.heads)
            assert point.score == pytest.approx(sums_of_logits(pruned, batches), rel=1e-4)


def sums_of_logits(model, batches):
    with torch.no_grad():
        return sum(float(model(**batch).logits.double().square().sum()) for batch in batches)


def test_without_labels_the_curve_is_of_output_error(classifier, calibration):
    importance = head_importance(classifier, labelled(calibration[:2]))
    plain = calibration[:2]
    curve = pruning_curve(classifier, importance, batches=plain, shares=(0, 0.5, 1))
    assert curve[0].score == 0
    assert 0 < curve[1].score < 10
    with torch.no_grad():
        before = [classifier(**batch).logits for batch in plain]
        with HeadMask(classifier, {name: torch.zeros(3) for name in importance}):
            after = [classifier(**batch).logits for batch in plain]
    off = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    assert curve[2].score == pytest.approx((off / sum(float(b.square().sum()) for b in before)) ** 0.5, rel=1e-4)


def test_progress_is_reported(bert, batch):
    steps = []
    dominant_heads(bert, lambda model: 1.0, progress=lambda *step: steps.append(step))
    assert steps[-1] == (7, 7)
    steps.clear()
    dominant_heads(bert, batches=[batch], progress=lambda *step: steps.append(step))
    assert steps == [(1, 1)]


def test_random_heads_are_scored_too(make_tiny, batch):
    model, shares = make_tiny("bert"), (0, 0.5, 1)
    importance, *random = (random_importance(model, seed=seed) for seed in (7, 0, 1))
    curve = pruning_curve(model, importance, batches=[batch], shares=shares, random_orders=2)
    alone, *drawn = (pruning_curve(model, order, batches=[batch], shares=shares) for order in (importance, *random))
    assert [(point.heads, point.score) for point in curve] == [(point.heads, point.score) for point in alone]
    for point, *of_random in zip(curve, *drawn, strict=True):
        assert point.random_score == pytest.approx(fmean(other.score for other in of_random))


def test_random_importance_is_of_every_head_and_seeded(make_tiny):
    model = make_tiny("marian")
    first, again, other = (random_importance(model, seed=seed) for seed in (0, 0, 1))
    assert {name: len(values) for name, values in first.items()} == {
        site.name: site.heads for site in find_attention(model)
    }
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)
    assert set(random_importance(model, kinds=("cross",))) < set(first)
