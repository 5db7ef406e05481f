"""Discrepancy and overlap of heads, against loops over positions and pairs of heads."""

import pytest
import torch

from collab_compress.analysis import (
    average_distance,
    bhattacharyya,
    discrepancy,
    mean_over_pairs,
)
from collab_compress.analysis.diversity import Discrepancy
from collab_compress.errors import HeadError
from collab_compress.heads import Tap
from collab_compress.losses import bhattacharyya as loss

NAME = "encoder.layer.0.attention.self"


def rows_of(model, batches):
    """Return the attention probabilities of unpadded queries, (N, H, S) for each use and batch."""
    probs = {}
    for batch in batches:
        with Tap(model, ["probs"]) as tap, torch.no_grad():
            model(**batch)
            counts = {}
            for reading in tap.take():
                name = reading.site.name
                use = counts[name] = counts.get(name, -1) + 1
                probs.setdefault((name, use), []).append(reading.probs.transpose(1, 2)[reading.masks.query])
    shared = {name for name, use in probs if use}
    return {f"{name}[{use}]" if name in shared else name: rows for (name, use), rows in probs.items()}


def matrices(parts, measure):
    """Return the mean over all positions of a measure between two heads' vectors, one pair at a time."""
    heads = parts[0].shape[1]
    sums, count = torch.zeros(heads, heads, dtype=torch.float64), 0
    for part in parts:
        for position in part.double():
            count += 1
            for i in range(heads):
                for j in range(heads):
                    sums[i, j] += measure(position[i], position[j])
    return sums / count


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm())) if a.norm() * b.norm() > 0 else 0.0


def test_discrepancy_of_outputs(either, real_responses):
    model, batches = either
    discrepancies = discrepancy(model, batches)
    for name, uses in real_responses(model, batches).items():
        for number, tokens in enumerate(uses):
            head_pairs = discrepancies[name if len(uses) == 1 else f"{name}[{number}]"]
            torch.testing.assert_close(head_pairs.cosine, matrices([tokens], cosine) + 1, atol=1e-5, rtol=1e-5)
            distances = matrices([tokens], lambda a, b: float((a - b).norm()))
            torch.testing.assert_close(head_pairs.l2, distances, atol=1e-5, rtol=1e-5)


def test_mean_distance_of_a_head_is_avg_l2(either):
    """Without an end token to leave out, AVG_L2 is what the rows of the matrix add up to."""
    model, batches = either
    model.config.eos_token_id = None
    discrepancies = discrepancy(model, batches)
    for name, distance in average_distance(model, batches).items():
        if name in discrepancies:  # a module with several uses is pooled there
            torch.testing.assert_close(discrepancies[name].l2.sum(1) / 2, distance, atol=1e-5, rtol=1e-5)


def test_bhattacharyya_coefficients(either):
    model, batches = either
    coefficients = bhattacharyya(model, batches)
    right = rows_of(model, batches)
    assert coefficients.keys() == right.keys()
    for name, parts in right.items():
        torch.testing.assert_close(
            coefficients[name], matrices(parts, lambda a, b: float((a * b).sqrt().sum())), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            coefficients[name].diagonal(), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0
        )


def test_overlap_agrees_with_the_loss(bert, batch):
    with Tap(bert, ["probs"]) as tap, torch.no_grad():
        bert(**batch)
        losses = {r.site.name: float(loss(r.probs, r.masks.query)) for r in tap.take()}
    for name, matrix in bhattacharyya(bert, [batch]).items():
        assert mean_over_pairs(matrix) == pytest.approx(losses[name], abs=1e-5)


def test_discrepancy_is_that_of_all_entries():
    generator = torch.Generator().manual_seed(0)
    apart = Discrepancy(torch.rand(3, 3, generator=generator), torch.rand(3, 3, generator=generator))
    for measure in ("l2", "cosine", "difference"):
        total = sum(abs(float(value)) for value in getattr(apart, measure).flatten())
        assert apart.norm(measure) == pytest.approx(total, rel=1e-5)
    torch.testing.assert_close(apart.difference, 1 - (apart.cosine - 1))


def test_a_silent_head_has_cosine_0(bert, batch):
    with torch.no_grad():
        bert.get_submodule(NAME).value.weight[8:16] = 0
        bert.get_submodule(NAME).value.bias[8:16] = 0
    pairs = discrepancy(bert, [batch])[NAME]
    assert (pairs.cosine[1] == 1).all()
    assert pairs.l2.isfinite().all()


def test_one_head_and_one_token(make_tiny):
    model = make_tiny("bert")
    for layer in model.encoder.layer:
        layer.attention.self.num_attention_heads, layer.attention.self.attention_head_size = 1, 24
        layer.attention.self.scaling = 24**-0.5
    batch = {"input_ids": torch.tensor([[5]])}
    pairs = discrepancy(model, [batch])[NAME]
    assert pairs.l2.tolist() == [[0]]
    assert float(pairs.cosine) == pytest.approx(2)
    assert float(bhattacharyya(model, [batch])[NAME]) == pytest.approx(1)
    with pytest.raises(HeadError, match="a single head has no pairs"):
        mean_over_pairs(pairs.l2)


def test_what_cannot_be_measured_is_refused(bert, batch):
    with pytest.raises(HeadError, match="unknown measure 'l3'"):
        discrepancy(bert, [batch])[NAME].norm("l3")
    with pytest.raises(HeadError, match="saw only padding"):
        bhattacharyya(bert, [{"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 0]])}])
    bert.get_submodule(NAME).value.weight.data[0, 0] = torch.nan
    with pytest.raises(HeadError, match=f"{NAME}: what its heads compute is not finite"):
        discrepancy(bert, [batch])
