"""Mixing matrices and alphas, and content against context, against loops over tokens."""

import pytest
import torch
from recorded import recorded_inputs

from collab_compress import merge_alphas_, mix_heads_, read_factors
from collab_compress.analysis import (
    alpha_matrices,
    confidence,
    content_share,
    effective_rank,
    mixing_matrices,
    sample_cka,
    skew_symmetry,
)
from collab_compress.architectures import find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import Tap


def test_strengths_do_not_depend_on_how_factors_are_scaled(either):
    model, _ = either
    before = mixing_matrices(model)
    for name, factors in read_factors(model).items():
        scale, module = torch.linspace(-2, 3, factors.query.shape[1]), model.get_submodule(name)
        factors.query.mul_(scale)
        module.mixing.data.div_(scale[module.mixing_channels])
    for name, matrix in mixing_matrices(model).items():
        torch.testing.assert_close(matrix, before[name], rtol=1e-5, atol=1e-6)
        largest = matrix.gather(0, matrix.abs().argmax(0, keepdim=True))
        assert (largest > 0).all()


def test_strengths_are_lengths_of_components(either):
    model, _ = either
    factors = read_factors(model)
    matrices = mixing_matrices(model)
    for site in find_attention(model):
        matrix = matrices[site.name]
        if site.name in factors:
            head_factors = factors[site.name]
            lengths = head_factors.query.norm(dim=0) * head_factors.key.norm(dim=0)
            torch.testing.assert_close(
                matrix.abs().float(), head_factors.mixing.detach().abs() * lengths, rtol=1e-5, atol=1e-6
            )
        else:
            query, key = (site.part(getattr(site.family, side)).weight.norm(dim=1) for side in ("query", "key"))
            torch.testing.assert_close(matrix.sum(0).float(), (query * key).detach(), rtol=1e-5, atol=1e-6)
            assert int((matrix != 0).sum(0).max()) == 1


def test_components_can_be_ordered(either):
    model, _ = either
    plain = mixing_matrices(model)
    for name, matrix in mixing_matrices(model, order=True).items():
        energy = matrix.square().sum(0)
        assert (energy.diff() <= 0).all()
        torch.testing.assert_close(energy, plain[name].square().sum(0).sort(descending=True).values)


def test_alphas_are_copies(bert):
    with pytest.raises(HeadError, match="has no alphas"):
        alpha_matrices(bert)
    mix_heads_(bert)
    copies = alpha_matrices(bert)
    assert list(copies) == [site.name for site in find_attention(bert)]
    for matrix in copies.values():
        torch.testing.assert_close(matrix, torch.eye(3, dtype=torch.float64))
        matrix.zero_()
    assert all(float(matrix.trace()) == 3 for matrix in alpha_matrices(bert).values())


def test_skew_symmetry_is_the_share_of_the_skew_part():
    matrix = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    off = matrix - torch.diag(matrix.diagonal())
    skew, symmetric = (off - off.T) / 2, (off + off.T) / 2
    right = float(skew.norm() ** 2 / (skew.norm() ** 2 + symmetric.norm() ** 2))
    assert skew_symmetry(matrix) == pytest.approx(right)
    assert float(skew.norm() ** 2 + symmetric.norm() ** 2) == pytest.approx(float(off.norm() ** 2))
    assert skew_symmetry(skew + 5 * torch.eye(7)) == pytest.approx(1)
    assert skew_symmetry(symmetric) == pytest.approx(0)
    assert skew_symmetry(torch.eye(7)) == 0
    assert skew_symmetry(torch.ones(1, 1)) == 0
    large = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    assert skew_symmetry(large) == pytest.approx(0.5, abs=0.01)
    with pytest.raises(HeadError, match="square matrix"):
        skew_symmetry(torch.ones(2, 3))


def test_effective_rank_counts_equal_singular_values():
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.ones(4, 6)) == pytest.approx(1)
    assert effective_rank(torch.diag(torch.tensor([3.0, 3.0, 0.0]))) == pytest.approx(2)
    shares = torch.tensor([0.5, 0.25, 0.25])
    assert effective_rank(torch.diag(shares * 7)) == pytest.approx(2**1.5)
    assert effective_rank(torch.zeros(3, 2)) == 0
    with pytest.raises(HeadError, match="expected a matrix"):
        effective_rank(torch.ones(3))


NAME = "encoder.layer.0.attention.self"


def inputs_of(model, site, batch):
    """Return the inputs (B, T, D) of the query and key projections, for each use of a module."""
    sides = {side: site.part(getattr(site.family, side)) for side in ("query", "key")}
    read = recorded_inputs(model, batch, sides)
    return [(query.double(), key.double()) for query, key in zip(read["query"], read["key"], strict=True)]


def parts_of(model, site):
    """Return the dense T_i (H, D, D) and v_i (H, D) of a module."""
    factors = read_factors(model).get(site.name)
    if factors is not None:
        query, mixing, key = (factor.detach().double() for factor in (factors.query, factors.mixing, factors.key))
        heads = torch.stack([query @ torch.diag(row) @ key.T for row in mixing])
        return heads, factors.content_bias.detach().double()
    query, key = (site.part(getattr(site.family, side)) for side in ("query", "key"))
    wq, wk = (factor.weight.detach().double().unflatten(0, (site.heads, -1)).mT for factor in (query, key))
    bias = query.bias.detach().double().unflatten(0, (site.heads, -1))
    return wq @ wk.mT, torch.stack([wk[head] @ bias[head] for head in range(site.heads)])


def oracle(model, site, batches):
    """Return the shares of each use, computed for one query and one head at a time."""
    heads, biases = parts_of(model, site)
    sums = {}
    for batch in batches:
        encoder = batch["attention_mask"].bool()
        decoder = batch.get("decoder_attention_mask", batch["attention_mask"]).bool()
        for use, (x, y) in enumerate(inputs_of(model, site, batch)):
            query_mask = encoder if site.kind == "encoder" else decoder
            key_mask = decoder if site.kind == "decoder" else encoder
            total = sums.setdefault(use, torch.zeros(3, site.heads, dtype=torch.float64))
            for b in range(len(x)):
                for t in range(x.shape[1]):
                    if query_mask[b, t]:
                        visible = [
                            s for s in range(y.shape[1]) if key_mask[b, s] and (site.kind != "decoder" or s <= t)
                        ]
                        keys = y[b, visible]
                        for head in range(site.heads):
                            content, context = keys @ biases[head], keys @ heads[head].T @ x[b, t]
                            content, context = content - content.mean(), context - context.mean()
                            total[0, head] += content.square().mean()
                            total[1, head] += context.square().mean()
                            total[2, head] += 2 * (content * context).mean()
    return {use: total / total.sum(0) for use, total in sums.items()}


def test_shares_are_those_of_the_scores(either):
    model, batches = either
    shares = content_share(model, batches)
    for site in find_attention(model):
        right = oracle(model, site, batches)
        for use, (content, context, overlap) in right.items():
            share = shares[site.name if len(right) == 1 else f"{site.name}[{use}]"]
            torch.testing.assert_close(share.content, content, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(share.context, context, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(share.overlap, overlap, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(content + context + overlap, torch.ones(3, dtype=torch.float64))


def test_context_and_content_add_up_to_the_scores(bert, batch):
    """Context plus content is the softmax's input, up to a constant for each query."""
    site = find_attention(bert)[0]
    ((x, y),) = inputs_of(bert, site, batch)
    heads, biases = parts_of(bert, site)
    scores = torch.einsum("btd,hde,bse->bhts", x, heads, y) + torch.einsum("bsd,hd->bhs", y, biases)[:, :, None]
    masked = (scores * site.scaling).masked_fill(~batch["attention_mask"].bool()[:, None, None], -torch.inf)
    with Tap(bert, ["probs"]) as tap, torch.no_grad():
        bert(**batch)
        rows = tap.take()[0].probs
    torch.testing.assert_close(masked.softmax(-1).float(), rows, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("zeroed", "absent", "rest"), [("bias", "content", "context"), ("weight", "context", "content")]
)
def test_a_zero_query_bias_leaves_no_content_and_zero_weights_no_context(bert, batch, zeroed, absent, rest):
    getattr(bert.get_submodule(NAME).query, zeroed).data.zero_()
    share = content_share(bert, [batch])[NAME]
    assert not getattr(share, absent).any()
    torch.testing.assert_close(getattr(share, rest), torch.ones(3, dtype=torch.float64))


def test_scores_that_never_vary_have_no_shares(bert):
    bert.get_submodule(NAME).key.weight.data[:8] = 0
    share = content_share(bert, [{"input_ids": torch.tensor([[5, 6, 7]])}])[NAME]
    for shares in (share.content, share.context, share.overlap):
        assert shares[0] == 0
        assert shares.isfinite().all()
    assert float((share.content + share.context + share.overlap)[1]) == pytest.approx(1)
    one = content_share(bert, [{"input_ids": torch.tensor([[5]])}])[NAME]
    assert not one.content.any()
    assert not one.context.any()


def test_no_float64_is_asked_of_a_device_that_has_none(bert, batch, monkeypatch):
    """Such as Apple's MPS: what is measured goes to the CPU first."""
    asked, cpu = [], torch.Tensor.cpu

    def watched(tensor):
        asked.append(tensor.dtype)
        return cpu(tensor)

    mix_heads_(bert)
    monkeypatch.setattr(torch.Tensor, "cpu", watched)
    content_share(bert, [batch])
    confidence(bert, [batch])
    (alphas, *_) = alpha_matrices(bert).values()
    sample_cka(torch.randn(5, 2, 3))
    assert torch.float32 in asked
    assert torch.float64 not in asked
    asked.clear()
    skew_symmetry(alphas.float())
    effective_rank(alphas.float())
    assert asked == [torch.float32] * 2
    merge_alphas_(bert)
    assert len(asked) > 2
    assert set(asked) == {torch.float32}


def test_what_cannot_be_measured_is_refused(bert, batch):
    with pytest.raises(HeadError, match=f"{NAME} saw no unpadded token"):
        content_share(bert, [])
    with pytest.raises(HeadError, match=f"{NAME} saw no unpadded token"):
        content_share(bert, [{**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}])
    assert not bert.get_submodule(NAME).query._forward_pre_hooks
    bert.get_submodule(NAME).key.weight.data[0, 0] = torch.nan
    with pytest.raises(HeadError, match="scores are not finite"):
        content_share(bert, [batch])
