"""Importance by gradients in head masks, against one sample at a time and finite differences."""

import pytest
import torch
from forms import BERTS, convert_
from transformers import (
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    MarianMTModel,
)

from collab_compress import HeadMask, head_importance
from collab_compress.architectures import find_attention
from collab_compress.attention.run import head_hooks
from collab_compress.errors import HeadError
from collab_compress.heads import least_important, masks_without


def classifier(family, make_tiny):
    torch.manual_seed(1)
    config = make_tiny(family).config
    config.num_labels = 3
    return AutoModelForSequenceClassification.from_config(config).eval()


def labelled(batches):
    """Return batches with a class label per sample; the first has one sample less."""
    generator = torch.Generator().manual_seed(5)
    rows = [batch["input_ids"].shape[0] for batch in batches]
    labels = [torch.randint(3, (count,), generator=generator) for count in rows]
    with_labels = [{**batch, "labels": label} for batch, label in zip(batches, labels, strict=True)]
    return [{name: value[1:] for name, value in with_labels[0].items()}, *with_labels[1:]]


def one_sample_at_a_time(model, batches, loss):
    """Return the normalised mean over samples of |∂L/∂ξ|, by central differences."""
    heads = {site.name: site.heads for site in find_attention(model)}
    sums, count = {name: torch.zeros(number, dtype=torch.float64) for name, number in heads.items()}, 0
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            sample = {name: value[row : row + 1] for name, value in batch.items()}
            masks = {name: torch.ones(number, dtype=torch.float64) for name, number in heads.items()}
            with HeadMask(model) as mask:
                for name in heads:
                    for head in range(heads[name]):
                        sums[name][head] += abs(slope(model, mask, masks, (name, head), sample, loss))
            count += 1
    return {name: value / count / (value / count).norm() for name, value in sums.items()}


def slope(model, mask, masks, which, sample, loss, step=1e-4):
    name, head = which

    def at(change):
        changed = masks[name].clone()
        changed[head] += change
        mask.set({**masks, name: changed})
        with torch.no_grad():
            return loss(model(**sample), sample)

    return float((at(step) - at(-step)) / (2 * step))


@pytest.mark.parametrize(  # Marian, which cannot classify, follows below
    ("family", "form"),
    [*BERTS, *((family, form) for family in ("albert", "distilbert") for form in ("dense", "both"))],
)
def test_is_the_mean_gradient_of_single_samples(family, form, make_tiny, calibration):
    model = convert_(classifier(family, make_tiny), form).double()
    batches = labelled(calibration[:2])
    actual = head_importance(model, iter(batches))
    expected = one_sample_at_a_time(model, batches, lambda outputs, _: outputs.loss)
    assert list(actual) == list(expected)
    for name, values in actual.items():
        torch.testing.assert_close(values.double(), expected[name], atol=1e-4, rtol=1e-3)
        assert values.norm() == pytest.approx(1, abs=1e-5)


def test_sequence_to_sequence_with_a_loss_of_ones_own(make_tiny, calibration):
    torch.manual_seed(0)
    model = MarianMTModel(make_tiny("marian").config).double().eval()
    first = calibration[0]
    batches = [{"input_ids": first["input_ids"][:3], "attention_mask": first["attention_mask"][:3]}]
    batches[0]["labels"] = first["input_ids"][:3, :5].contiguous()

    def loss(outputs, batch):
        chances = outputs.logits.log_softmax(-1)
        return -chances.gather(-1, batch["labels"][..., None]).squeeze(-1).mean(1)

    actual = head_importance(model, batches, loss)
    expected = one_sample_at_a_time(model, batches, loss)
    assert len(actual) == 6
    for name, values in actual.items():
        torch.testing.assert_close(values.double(), expected[name], atol=1e-5, rtol=1e-4)
    as_mean = head_importance(model, batches, lambda outputs, batch: loss(outputs, batch).mean())
    scores = head_importance(model, batches)
    for name in actual:
        torch.testing.assert_close(as_mean[name], actual[name])
        torch.testing.assert_close(scores[name], actual[name])  # all targets have the same length here


def test_the_model_is_left_as_it_was(make_tiny, calibration):
    model = classifier("bert", make_tiny).requires_grad_(False)
    model.bert.encoder.train()
    modes = [module.training for module in model.modules()]
    batches = labelled(calibration[:2])
    with torch.no_grad():
        frozen = head_importance(model, batches)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(head_hooks(site.module) for site in find_attention(model))
    assert not any(hasattr(site.module.config, "stock") for site in find_attention(model))
    trained = head_importance(model.requires_grad_(True), batches)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name in frozen:
        torch.testing.assert_close(frozen[name], trained[name])


def test_heads_without_gradient_are_zero_and_not_nan(make_tiny, calibration):
    model = classifier("bert", make_tiny)
    first, second = (site.name for site in find_attention(model))
    with HeadMask(model, masks_without(model, {first: [1], second: [0, 1, 2]})):
        actual = head_importance(model, labelled(calibration[:1]))
    assert actual[first][1] == 0
    assert actual[first].norm() == pytest.approx(1)
    assert torch.equal(actual[second], torch.zeros(3))


def test_token_losses_weigh_samples_by_their_tokens(make_tiny, calibration):
    """The documentation describes this for losses that are means over tokens."""
    torch.manual_seed(0)
    model = BertForMaskedLM(make_tiny("bert").config).double().eval()
    batch = calibration[0]
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    actual = head_importance(model, [{**batch, "labels": labels}])
    unlabelled = {**batch, "labels": torch.full_like(labels, -100)}  # whose loss is 0 for all masks
    with pytest.raises(HeadError, match=r"gradient of the loss is 0 in all heads.*labels other than -100"):
        head_importance(model, [unlabelled])
    assert all(values.any() for values in head_importance(model, [{**batch, "labels": labels}, unlabelled]).values())
    counts = batch["attention_mask"].sum(1)

    def share(outputs, sample):
        row = next(row for row, ids in enumerate(batch["input_ids"]) if torch.equal(ids, sample["input_ids"][0]))
        return outputs.loss * counts[row]

    expected = one_sample_at_a_time(model, [{**batch, "labels": labels}], share)
    for name in actual:
        torch.testing.assert_close(actual[name].double(), expected[name], atol=1e-5, rtol=1e-4)


IMPORTANCE = {"a": torch.tensor([0.1, 0.9, 0.2]), "b": torch.tensor([0.3, 0.3, 0.8])}


@pytest.mark.parametrize(
    ("share", "keep_one", "expected"),
    [
        (0.0, False, {}),
        (1 / 6, False, {"a": [0]}),
        (0.5, False, {"a": [0, 2], "b": [0]}),  # the first of equals
        (1 / 12, False, {"a": [0]}),  # half a head
        (5 / 12, False, {"a": [0, 2], "b": [0]}),  # two heads and a half
        (4 / 6, False, {"a": [0, 2], "b": [0, 1]}),
        (5 / 6, False, {"a": [0, 2], "b": [0, 1, 2]}),
        (5 / 6, True, {"a": [0, 2], "b": [0, 1]}),
        (1.0, False, {"a": [0, 1, 2], "b": [0, 1, 2]}),
        (1.0, True, {"a": [0, 2], "b": [0, 1]}),
    ],
)
def test_least_important(share, keep_one, expected):
    assert least_important(IMPORTANCE, share, keep_one=keep_one) == expected
