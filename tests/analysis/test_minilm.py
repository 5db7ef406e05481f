"""Check what the papers say about trained models, on a real one."""

import torch

from collab_compress.analysis import cka, head_covariances, head_energy, mean_over_pairs, svcca

FULL, WIDTH = 384, 32


def random_tokens(sequences):
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1000, 20000, (16, 32), generator=generator)} for _ in range(sequences // 16)]


def test_heads_are_not_low_rank_but_their_sum_is(minilm):
    """Figure 1 of "Collaborate Instead of Concatenate"."""
    for energy in head_energy(minilm).values():
        assert (energy.heads < 0.99).sum(1).min() > 0.75 * WIDTH
        assert (energy.product < 0.99).sum() < FULL / 2 < (energy.query < 0.99).sum()


def test_heads_share_some_directions_and_not_all(minilm):
    for joint in head_covariances(minilm, random_tokens(64)).values():
        similarity = svcca(joint)
        assert 0.1 < similarity.mean < 0.9
        assert (similarity.curve.diff() <= 0).all()
        assert 0.01 < mean_over_pairs(cka(joint)) < 0.5
