"""How much heads count: sums pair by pair, and the change that small errors of scores really make."""

import pytest
import torch
from tiny_families import build, make_rotary
from transformers.pytorch_utils import Conv1D

from collab_compress import Compression, compress, read_factors
from collab_compress.architectures import find_attention
from collab_compress.conversion import maps as module
from collab_compress.conversion.maps import HEAD_WEIGHT_SEQUENCES, LEAST_WEIGHT, _squares, head_weights
from collab_compress.heads import Recorder

PADDED = {
    "bert": {"attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3])},
    "gpt2": {},
    "llama": {"attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5])},
    "t5": {"attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3])},
}


def slow_weights(model, batch):
    """Return the weight of each head, pair by pair, from the probabilities and values that a recorder reads."""
    squares = {}
    with Recorder(model, ("probs", "values")) as recorder, torch.no_grad():
        model(**batch)
        for reading in recorder.take():
            output = reading.site.part(reading.site.paths.output)
            rows = (output.weight if isinstance(output, Conv1D) else output.weight.T).double()
            heads = rows.unflatten(0, (reading.site.heads, -1))
            probs, values = reading.probs.double(), reading.values.double()
            total = squares.setdefault(reading.site.name, torch.zeros(reading.site.heads, dtype=torch.float64))
            for b in range(probs.shape[0]):
                for head in range(reading.site.heads):
                    for i in range(probs.shape[2]):
                        if reading.masks.query is not None and not reading.masks.query[b, i]:
                            continue
                        mean = probs[b, head, i] @ values[b, :, head]
                        for j in range(probs.shape[3]):
                            if reading.masks.key is None or reading.masks.key[b, j]:
                                change = probs[b, head, i, j] * (values[b, j, head] - mean) @ heads[head]
                                total[head] += change.square().sum()
    return {name: (total / total.mean() + LEAST_WEIGHT).sqrt() for name, total in squares.items()}


@pytest.mark.parametrize("family", PADDED)
def test_weights_are_those_of_every_pair_of_tokens(family):
    model = make_rotary("llama") if family == "llama" else build(family)
    tokens = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, **PADDED[family]}
    if family == "t5":
        batch["decoder_input_ids"] = tokens.flip(1)
    actual = head_weights(model, find_attention(model), [batch])
    expected = slow_weights(model, batch)
    assert actual.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(actual[name], weights, rtol=1e-4, atol=1e-5)
        assert weights.max() > 1.02 * weights.min()


def test_small_errors_of_scores_change_outputs_as_much():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores, values, outputs = 2 * draw(1, 2, 5, 7), draw(1, 2, 7, 3), draw(2, 3, 6)
    size, changes = 1e-4, []
    before = scores.softmax(-1) @ values @ outputs
    for _ in range(4000):
        after = (scores + size * draw(*scores.shape)).softmax(-1) @ values @ outputs
        changes.append(((after - before) / size).square().sum((0, 2, 3)))
    probs = scores.softmax(-1)
    expected = _squares(probs, values, probs @ values, outputs @ outputs.mT).sum((0, 2, 3)).double()
    torch.testing.assert_close(torch.stack(changes).mean(0), expected, rtol=0.05, atol=0)


def test_heads_whose_values_do_not_differ_count_least(make_tiny, batch):
    model = make_tiny("bert").eval()
    site = find_attention(model)[0]
    with torch.no_grad():
        site.part(site.paths.value).weight[: site.head_width] = 0.0
    weights = head_weights(model, [site], [batch])[site.name]
    assert weights[0] == pytest.approx(LEAST_WEIGHT**0.5, rel=1e-3)
    assert weights.square().mean() == pytest.approx(1 + LEAST_WEIGHT)
    dense = model.get_submodule(site.name).query.weight.view(3, 8, 24), site.module.key.weight.view(3, 8, 24)
    dense = (dense[0].mT @ dense[1]).detach()
    compress(model, Compression(site.width // 2, modules=site.name), [batch] * 3)
    factors = read_factors(model)[site.name]
    errors = (dense - (factors.query * factors.mixing[:, None]) @ factors.key.mT).flatten(1).norm(dim=1)
    errors = errors / dense.flatten(1).norm(dim=1)
    assert errors[0] > errors[1:].max()


def test_without_values_all_heads_count_alike(make_tiny, batch):
    model = make_tiny("bert").eval()
    site = find_attention(model)[0]
    with torch.no_grad():
        site.part(site.paths.value).weight.zero_()
    assert head_weights(model, [site], [batch]) == {site.name: None}
    assert head_weights(model, [site], []) == {}


def test_no_float64_is_asked_of_a_device_that_has_none(make_tiny, batch, monkeypatch):
    """Such as Apple's MPS: sums go to the CPU first."""
    asked = []
    cpu = torch.Tensor.cpu

    def watched(tensor):
        asked.append(tensor.dtype)
        return cpu(tensor)

    model = make_tiny("bert")
    monkeypatch.setattr(torch.Tensor, "cpu", watched)
    head_weights(model, find_attention(model), [batch])
    assert torch.float32 in asked
    assert torch.float64 not in asked


@pytest.mark.parametrize("rows", [[512], [300, 4, 208]])
def test_enough_sequences_are_run_in_small_batches(rows, make_tiny, monkeypatch):
    model, sizes, run = make_tiny("bert"), [], module.run_batch

    def counted(model, batch):
        sizes.append(len(batch["input_ids"]))
        return run(model, batch)

    monkeypatch.setattr(module, "run_batch", counted)
    batches = [{"input_ids": torch.randint(5, 61, (count, 5))} for count in rows]
    head_weights(model, find_attention(model), batches)
    assert max(sizes) <= 16
    assert HEAD_WEIGHT_SEQUENCES - 16 <= sum(sizes) <= HEAD_WEIGHT_SEQUENCES
