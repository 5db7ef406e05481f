"""Content and context of scores, against scores that are computed token by token and told apart by hand."""

import pytest
import torch

from collab_compress import read_factors
from collab_compress.analysis import content_share
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import Tap

NAME = "encoder.layer.0.attention.self"


def inputs_of(model, site, batch):
    """What the query and key projections of each use of a module read, (B, T, D)."""
    seen = {"query": [], "key": []}
    handles = [
        site.part(getattr(site.family, side)).register_forward_pre_hook(
            lambda _, args, side=side: seen[side].append(args[0].double())
        )
        for side in seen
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return list(zip(seen["query"], seen["key"], strict=True))


def parts_of(model, site):
    """T_i (H, D, D) and v_i (H, D) of a module, formed in full."""
    factors = read_factors(model).get(site.name)
    if factors is not None:
        query, mixing, key = (each.detach().double() for each in (factors.query, factors.mixing, factors.key))
        heads = torch.stack([query @ torch.diag(row) @ key.T for row in mixing])
        return heads, factors.content_bias.detach().double()
    query, key = (site.part(getattr(site.family, side)) for side in ("query", "key"))
    wq, wk = (each.weight.detach().double().unflatten(0, (site.heads, -1)).mT for each in (query, key))
    bias = query.bias.detach().double().unflatten(0, (site.heads, -1))
    return wq @ wk.mT, torch.stack([wk[head] @ bias[head] for head in range(site.heads)])


def oracle(model, site, batches):
    """Shares of each use, one query and one head at a time."""
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
                        seen = [s for s in range(y.shape[1]) if key_mask[b, s] and (site.kind != "decoder" or s <= t)]
                        keys = y[b, seen]
                        for head in range(site.heads):
                            content, context = keys @ biases[head], keys @ heads[head].T @ x[b, t]
                            content, context = content - content.mean(), context - context.mean()
                            total[0, head] += content.square().mean()
                            total[1, head] += context.square().mean()
                            total[2, head] += 2 * (content * context).mean()
    return {use: total / total.sum(0) for use, total in sums.items()}


def test_shares_are_those_of_the_scores(either):
    model, batches = either
    found = content_share(model, batches)
    for site in find_attention(model, FAMILIES):
        right = oracle(model, site, batches)
        for use, (content, context, overlap) in right.items():
            each = found[site.name if len(right) == 1 else f"{site.name}[{use}]"]
            torch.testing.assert_close(each.content, content, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(each.context, context, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(each.overlap, overlap, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(content + context + overlap, torch.ones(3, dtype=torch.float64))


def test_the_two_parts_are_the_models_own_scores(bert, batch):
    """Context plus content is what the softmax sees, but for a constant in each row."""
    site = find_attention(bert, FAMILIES)[0]
    ((x, y),) = inputs_of(bert, site, batch)
    heads, biases = parts_of(bert, site)
    scores = torch.einsum("btd,hde,bse->bhts", x, heads, y) + torch.einsum("bsd,hd->bhs", y, biases)[:, :, None]
    masked = (scores * site.scaling).masked_fill(~batch["attention_mask"].bool()[:, None, None], -torch.inf)
    with Tap(bert, ["probs"]) as tap, torch.no_grad():
        bert(**batch)
        rows = tap.take()[0].probs
    torch.testing.assert_close(masked.softmax(-1).float(), rows, atol=1e-5, rtol=1e-5)


def test_without_query_bias_there_is_no_content(bert, batch):
    bert.get_submodule(NAME).query.bias.data.zero_()
    found = content_share(bert, [batch])[NAME]
    assert not found.content.any()
    torch.testing.assert_close(found.context, torch.ones(3, dtype=torch.float64))


def test_without_query_weights_there_is_no_context(bert, batch):
    bert.get_submodule(NAME).query.weight.data.zero_()
    found = content_share(bert, [batch])[NAME]
    assert not found.context.any()
    torch.testing.assert_close(found.content, torch.ones(3, dtype=torch.float64))


def test_scores_that_never_vary_have_no_shares(bert):
    bert.get_submodule(NAME).key.weight.data[:8] = 0
    found = content_share(bert, [{"input_ids": torch.tensor([[5, 6, 7]])}])[NAME]
    for shares in (found.content, found.context, found.overlap):
        assert shares[0] == 0
        assert shares.isfinite().all()
    assert float((found.content + found.context + found.overlap)[1]) == pytest.approx(1)
    one = content_share(bert, [{"input_ids": torch.tensor([[5]])}])[NAME]
    assert not one.content.any()
    assert not one.context.any()


def test_padding_does_not_count(bert, batch):
    longer = {name: torch.nn.functional.pad(value, (0, 4)) for name, value in batch.items()}
    for side in ("content", "context"):
        torch.testing.assert_close(
            getattr(content_share(bert, [batch])[NAME], side), getattr(content_share(bert, [longer])[NAME], side),
            atol=1e-5, rtol=1e-5,
        )  # fmt: skip


def test_what_cannot_be_measured_is_refused(bert, batch):
    with pytest.raises(HeadError, match=f"{NAME} saw no token"):
        content_share(bert, [])
    with pytest.raises(HeadError, match=f"{NAME} saw no token"):
        content_share(bert, [{**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}])
    assert not bert.get_submodule(NAME).query._forward_pre_hooks
    bert.get_submodule(NAME).key.weight.data[0, 0] = torch.nan
    with pytest.raises(HeadError, match="scores are not finite"):
        content_share(bert, [batch])
