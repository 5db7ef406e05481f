"""Rivals for feed-forward blocks choose and tune what their papers say."""

import copy
from functools import partial

import feed_forward_rivals as rivals
import pytest
import torch
from forms import outputs
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, BertModel, MPNetModel

from collab_compress import Compression, Solver, compress
from collab_compress.factorization.least_squares import ResidualMoments, choose_neurons

NEURONS, WIDTH, LAYERS = 20, 12, 2
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 3, "num_hidden_layers": LAYERS, "intermediate_size": NEURONS}
SIZES |= {"vocab_size": 61, "max_position_embeddings": 40, "initializer_range": 0.4}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES)).eval()


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).eval()


@pytest.fixture
def batches():
    draw = torch.Generator().manual_seed(1)
    result = []
    for _ in range(8):
        ids = torch.randint(1, 61, (8, 11), generator=draw)
        mask = torch.ones_like(ids)
        mask[:4, 7:] = 0
        result.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
    return result


def labels(batch, step=0):
    return (batch["input_ids"][:, 0] + step) % 3


@pytest.mark.parametrize("kind", rivals.KINDS)
def test_full_width_leaves_the_model_as_it_was(classifier, batches, kind, monkeypatch):
    monkeypatch.setattr(rivals, "RIDGE", 1e-9)
    wanted = outputs(classifier, batches[0])
    labelled = ([batch | {"labels": labels(batch)} for batch in batches], None, 1)
    rivals.narrow_blocks_(kind, classifier, NEURONS, batches, labelled=labelled)
    torch.testing.assert_close(outputs(classifier, batches[0]), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [BertModel, MPNetModel])
def test_with_our_choice_the_refit_is_ours(family, batches):
    torch.manual_seed(0)
    model = family(family.config_class(**SIZES)).eval()
    if family is MPNetModel:
        for batch in batches:
            del batch["token_type_ids"]

    def ours(block):
        second, crossed = block.moments.moments(centred=True)
        wanted = crossed + second @ block.weight
        second.diagonal().add_(rivals.DAMPINGS[0] * second.diagonal().mean())
        return choose_neurons(second, wanted, 8)

    dense = copy.deepcopy(model)
    rivals.narrow_(model, batches, {"attention": (rivals.every, rivals.refit), "feed-forward": (ours, rivals.refit)})
    compress(dense, Compression(dff=8, solver=Solver(refit=True)), batches)
    torch.testing.assert_close(outputs(model, batches[0]), outputs(dense, batches[0]), atol=1e-4, rtol=1e-4)


@pytest.fixture
def layer():
    """Return activations (n, N) with a mean, residuals (n, D), Wᵀ (N, D), and 5 neurons to keep."""
    draw = torch.Generator().manual_seed(2)
    options = {"generator": draw, "dtype": torch.float64}
    mixing = torch.randn(9, 9, **options)
    inputs = torch.randn(80, 9, **options) @ mixing + 1.5
    return inputs, torch.randn(80, 4, **options), torch.randn(9, 4, **options), torch.tensor([0, 2, 3, 6, 8])


@pytest.mark.parametrize("heads", [1, 3])
def test_kwon_keeps_the_heads_whose_masks_tell_most(classifier, batches, heads):
    dense = copy.deepcopy(classifier)

    def losses(value, linear, head):
        gate = torch.ones(3, WIDTH // 3)
        gate[head] = value
        with torch.no_grad(), rivals.gated([linear], [gate.flatten()]):
            return torch.cat([cross_entropy(dense(**b).logits, labels(b), reduction="none") for b in batches])

    labelled = ([batch | {"labels": labels(batch)} for batch in batches], None, 1)
    rivals.narrow_blocks_("kwon", classifier, NEURONS, batches, heads=heads, labelled=labelled)
    for layer, dense_layer in zip(classifier.bert.encoder.layer, dense.bert.encoder.layer, strict=True):
        linear = dense_layer.attention.output.dense
        slopes = torch.stack([slope(partial(losses, linear=linear, head=head)) for head in range(3)], dim=1)
        by_head = layer.attention.output.dense.weight.detach().unflatten(1, (3, -1))
        kept = by_head.abs().amax((0, 2)).nonzero()[:, 0]
        assert kept.tolist() == rivals.rearranged(slopes, heads).tolist()
    if heads == 3:
        torch.testing.assert_close(outputs(classifier, batches[0]), outputs(dense, batches[0]), atol=1e-5, rtol=1e-5)


def moments_of(inputs, residuals):
    moments = ResidualMoments()
    moments.add(inputs, residuals)
    return moments


@pytest.mark.parametrize("size", [1, 3])
def test_scalars_are_those_of_least_squares(layer, monkeypatch, size):
    inputs, residuals, weight, kept = layer
    if size == 3:
        kept = torch.tensor([0, 1, 2, 6, 7, 8])  # two heads of three
    removed = sorted(set(range(9)) - set(kept.tolist()))
    monkeypatch.setattr(rivals, "DAMPINGS", (1e-12,))
    moments = moments_of(inputs, residuals)
    change, shift = rivals.scaled(moments, moments, weight, kept, size)
    columns = torch.stack([(inputs[:, group] @ weight[group]).flatten() for group in kept.split(size)], dim=1)
    wanted = (residuals + inputs @ weight).flatten()  # what the block should add
    scalars = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0].repeat_interleave(size)
    tuned = weight + change
    torch.testing.assert_close(tuned[kept], scalars[:, None] * weight[kept])
    assert not tuned[removed].any()
    assert shift is None


def test_folding_leaves_the_mean_output_where_it_was(layer):
    inputs, residuals, weight, kept = layer
    change, shift = rivals.folded(moments_of(inputs, residuals), ResidualMoments(), weight, kept)
    tuned = inputs @ (weight + change) + shift
    torch.testing.assert_close(tuned.mean(0), (inputs @ weight).mean(0))
    torch.testing.assert_close((weight + change)[kept], weight[kept])


def test_the_rebuilt_block_is_a_ridge_regression_on_the_kept_neurons(layer, monkeypatch):
    inputs, residuals, weight, kept = layer
    monkeypatch.setattr(rivals, "RIDGE", 1e-12)
    change, _ = rivals.reconstructed(moments_of(inputs, residuals), ResidualMoments(), weight, kept)
    rebuilt = torch.linalg.lstsq(inputs[:, kept], inputs).solution @ weight
    torch.testing.assert_close((weight + change)[kept], rebuilt)
    assert not (weight + change)[[1, 4, 5, 7]].any()


def test_fluctuation_is_the_squared_error_that_folding_one_neuron_leaves(layer):
    inputs, residuals, weight, _ = layer
    scores = rivals.fluctuation(rivals.Block(0, None, weight, moments_of(inputs, residuals)))
    for neuron, score in enumerate(scores):
        part = torch.outer(inputs[:, neuron], weight[neuron])
        torch.testing.assert_close((part - part.mean(0)).square().sum(1).mean(), score)


def gates_at(neuron, value, width=NEURONS):
    gate = torch.ones(width)
    gate[..., neuron] = value
    return gate


def slope(function, step=1e-2):
    return (function(1 + step) - function(1 - step)) / (2 * step)


def second_layers(model):
    return [layer.output.dense for layer in model.base_model.encoder.layer]


def test_mask_gradients_are_those_of_each_sample(classifier, batches):
    linears = [*second_layers(classifier), classifier.bert.encoder.layer[0].attention.output.dense]
    gradients = rivals.mask_gradients(classifier, linears, [b | {"labels": labels(b)} for b in batches[:2]])
    assert [gradient.shape for gradient in gradients] == [(16, NEURONS)] * LAYERS + [(16, WIDTH)]
    for index, neuron, sample in ((0, 3, 0), (0, 11, 13), (1, 5, 6), (2, 4, 9)):
        batch = {name: values[sample % 8, None] for name, values in batches[sample // 8].items()}

        def loss(value, linear=linears[index], batch=batch, neuron=neuron):
            with torch.no_grad(), rivals.gated([linear], [gates_at(neuron, value, linear.in_features)]):
                return classifier(**batch, labels=labels(batch)).loss.item()

        assert gradients[index][sample, neuron].item() == pytest.approx(slope(loss), rel=2e-2, abs=1e-4)


def test_rearranging_lowers_the_information_of_all_that_goes():
    gradients = torch.randn(6, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kept = rivals.rearranged(gradients, 4).tolist()

    def information(those):
        return gradients[:, those].sum(1).square().sum().item()

    order = sorted(range(9), key=lambda j: gradients[:, j].square().sum().item())
    removed = order[:5]
    before = information(removed)
    for neuron in order[5:]:  # the double loop of the paper
        removed = [*removed, neuron]
        worst = min(removed, key=lambda j: information([k for k in removed if k != j]))
        removed.remove(worst)
    assert kept == sorted(set(range(9)) - set(removed))
    assert information(removed) < before


def test_knowledge_is_of_the_outputs_and_of_what_a_neuron_adds(classifier, batches):
    dense = copy.deepcopy(classifier)
    classifier.bert.encoder.layer[0].output.dense.weight.data *= 0.7  # as if it were narrower
    layer = classifier.bert.encoder.layer[1]
    inputs = torch.randn(50, NEURONS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    weight = layer.output.dense.weight.detach().mT.double()
    block = rivals.Block(1, layer, weight, moments_of(inputs, torch.zeros(50, WIDTH)))
    wanted = [outputs(dense, batch) for batch in batches[:2]]
    scores = rivals.knowledge(block, classifier, batches[:2], wanted)

    def loss(value, neuron, batch):
        with torch.no_grad(), rivals.gated([layer.output.dense], [gates_at(neuron, value)]):
            teacher, student = ((model(**batch).logits / 2).double().softmax(-1) for model in (dense, classifier))
        return 4 * (teacher * (teacher / student).log()).sum(1).mean().item()

    for neuron in (2, 9):
        slopes = [slope(partial(loss, neuron=neuron, batch=batch)) for batch in batches[:2]]
        contribution = (inputs[:, neuron].square().mean() * weight[neuron].square().mean()).item()
        expected = sum(gradient**2 for gradient in slopes) / 2 / 16 + 2.5e-4 * contribution
        assert scores[neuron].item() == pytest.approx(expected, rel=3e-2)
