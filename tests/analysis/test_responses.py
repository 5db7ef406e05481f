"""What is gathered from models: all real tokens and nothing else, whatever the batches."""

import numpy as np
import pytest
import torch

from collab_compress import HeadMask
from collab_compress.analysis import (
    JointCovariance,
    cka,
    head_covariances,
    head_samples,
    layer_covariance,
    model_covariances,
    svcca,
)
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.attention.install import head_hooks
from collab_compress.errors import CalibrationError, HeadError

NAME = "encoder.layer.0.attention.self"


def named(uses):
    """Module path → tokens of each use, keyed as the measures key them."""
    return {
        name if len(calls) == 1 else f"{name}[{number}]": tokens
        for name, calls in uses.items()
        for number, tokens in enumerate(calls)
    }


def test_covariances_are_those_of_all_real_tokens(either, real_responses):
    model, batches = either
    found, right = head_covariances(model, batches), named(real_responses(model, batches))
    assert found.keys() == right.keys()
    for name, tokens in right.items():
        heads, width = tokens.shape[1:]
        assert found[name].widths == (width,) * heads
        assert found[name].labels == tuple(map(str, range(heads)))
        assert found[name].count == len(tokens)
        covariance = np.cov(tokens.double().flatten(1).numpy(), rowvar=False)
        np.testing.assert_allclose(found[name].matrix, covariance, atol=1e-6 * np.abs(covariance).max())


def test_the_model_is_left_as_it_was(bert, batch):
    bert.train()
    head_covariances(bert, [batch])
    with pytest.raises(CalibrationError, match="index"):
        head_covariances(bert, [{"input_ids": batch["input_ids"] + 1000}])
    assert bert.training
    assert torch.is_grad_enabled()
    assert not any(head_hooks(site.module) for site in find_attention(bert, FAMILIES))


@pytest.mark.parametrize("measure", [lambda joint: svcca(joint).similarity, cka])
def test_batches_may_be_cut_as_one_likes(bert, calibration, measure):
    rows = [{name: value[row : row + 1] for name, value in b.items()} for b in calibration[:2] for row in range(4)]
    few, many = head_covariances(bert, calibration[:2]), head_covariances(bert, (row for row in rows))
    for name in few:
        torch.testing.assert_close(measure(few[name]), measure(many[name]), atol=1e-5, rtol=1e-5)


def test_padding_does_not_count(bert, batch):
    longer = {name: torch.nn.functional.pad(value, (0, 4)) for name, value in batch.items()}
    short, padded = head_covariances(bert, [batch])[NAME], head_covariances(bert, [longer])[NAME]
    assert short.count == padded.count == int(batch["attention_mask"].sum())
    torch.testing.assert_close(short.matrix, padded.matrix, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("part", ["values", "queries", "keys"])
def test_other_parts_are_read_too(bert, batch, part):
    projection = bert.get_submodule(f"{NAME}.{part.replace('queries', 'query').removesuffix('s')}")
    seen = []
    handle = projection.register_forward_hook(lambda *call: seen.append(call[2][batch["attention_mask"].bool()]))
    found = head_covariances(bert, [batch], part=part, modules=NAME)
    handle.remove()
    assert list(found) == [NAME]
    right = torch.tensor(np.cov(seen[0].double().numpy(), rowvar=False))
    torch.testing.assert_close(found[NAME].matrix, right, atol=1e-5, rtol=1e-5)


def test_layers_are_compared_whole_or_by_head(either, real_responses):
    model, batches = either
    kinds = ["encoder"] if any(site.kind == "encoder" for site in find_attention(model, FAMILIES)) else ["decoder"]
    found = layer_covariance(model, batches, kinds=kinds)
    tokens = named(real_responses(model, batches))
    layers = torch.cat([tokens[name].flatten(1) for name in found.labels], 1)
    right = np.cov(layers.double().numpy(), rowvar=False)
    np.testing.assert_allclose(found.matrix, right, atol=1e-6 * np.abs(right).max())
    by_head = layer_covariance(model, batches, kinds=kinds, unit="head")
    torch.testing.assert_close(by_head.matrix, found.matrix, atol=1e-6 * np.abs(right).max(), rtol=1e-6)
    assert by_head.labels[1] == f"{found.labels[0]}:1"
    assert len(by_head.widths) == sum(tokens[name].shape[1] for name in found.labels)


def test_a_model_is_like_itself_and_unlike_another(either, family, make_tiny):
    model, batches = either
    for name, joint in model_covariances(model, model, batches).items():
        alone = svcca(head_covariances(model, batches)[name])
        torch.testing.assert_close(svcca(joint).similarity, alone.similarity, atol=1e-4, rtol=1e-4)
        assert joint.labels[0] == f"{name.partition('[')[0]}:0"
    other = make_tiny(family, seed=1)
    for joint in model_covariances(model, other, batches, unit="layer").values():
        assert joint.leading == 1
        assert cka(joint).shape == (1, 1)
        assert 0 < float(cka(joint)) < 0.99


def test_models_are_paired_by_place(bert, make_tiny, batch):
    other = make_tiny("distilbert", seed=1)
    by_place = model_covariances(bert, other, [batch])
    assert list(by_place) == [NAME, NAME.replace("0", "1")]
    assert by_place[NAME].labels[-1] == "transformer.layer.0.attention:2"
    with pytest.raises(HeadError, match="2 and 1 attention modules, which do not pair"):
        model_covariances(bert, make_tiny("albert"), [batch])


def test_a_model_of_one_head_is_compared_with_each_of_many(bert, make_tiny, batch, real_responses):
    """As Table 2 of "Inter-Head Diversity" does: the one head as wide as all of the others together."""
    config = bert.config.to_diff_dict() | {"num_attention_heads": 1}
    one = type(bert)(type(bert.config)(**config)).eval()
    joint = model_covariances(one, bert, [batch], unit="head")[NAME]
    assert joint.widths == (24, 8, 8, 8)
    assert svcca(joint).similarity.shape == (1, 3)
    tokens = [real_responses(model, [batch])[NAME][0] for model in (one, bert)]
    for head in range(3):
        alone = svcca(JointCovariance.of([tokens[0][:, 0], tokens[1][:, head]]))
        assert float(svcca(joint).similarity[0, head]) == pytest.approx(float(alone.similarity[0, 1]), abs=1e-5)


def test_samples_are_real_tokens_drawn_once(either, real_responses):
    model, batches = either
    tokens = named(real_responses(model, batches))
    everything, some = head_samples(model, batches), head_samples(model, batches, 10)
    for name, right in tokens.items():
        assert everything[name].shape == right.shape
        order = [tokens_.flatten(1)[:, 0].argsort() for tokens_ in (everything[name], right)]
        torch.testing.assert_close(everything[name][order[0]], right[order[1]])
        assert some[name].shape == (10, *right.shape[1:])
        nearest = torch.cdist(some[name].flatten(1).double(), right.flatten(1).double()).min(1)
        assert float(nearest.values.max()) < 1e-4
        assert len(set(nearest.indices.tolist())) == 10


def test_samples_are_uniform_and_seeded(bert, calibration, real_responses):
    tokens = real_responses(bert, calibration[:4])[NAME][0].flatten(1).double()
    late = 0
    for seed in range(60):
        drawn = head_samples(bert, calibration[:4], 5, seed=seed, modules=NAME)[NAME]
        places = torch.cdist(drawn.flatten(1).double(), tokens).argmin(1)
        late += int((places >= len(tokens) / 2).sum())
    assert 120 < late < 180  # of 300, half expected; 3.5 standard deviations
    torch.testing.assert_close(head_samples(bert, calibration[:4], 5, seed=59, modules=NAME)[NAME], drawn)


def test_progress_is_told(bert, calibration):
    told = []
    head_covariances(bert, calibration[:3], progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    told.clear()
    head_samples(bert, iter(calibration[:2]), progress=lambda *step: told.append(step))
    assert told == [(1, None), (2, None)]


def test_a_bar_is_shown_where_wanted(bert, batch, capsys):
    head_covariances(bert, [batch], progress=True)
    assert "batches: 100%" in capsys.readouterr().err
    head_covariances(bert, [batch])
    assert not capsys.readouterr().err


def test_heads_that_are_masked_are_still_measured(bert, batch):
    """What acts on heads comes after what reads them."""
    plain = head_covariances(bert, [batch])[NAME]
    with HeadMask(bert, {NAME: torch.zeros(3)}):
        torch.testing.assert_close(head_covariances(bert, [batch])[NAME].matrix, plain.matrix)


def test_what_cannot_be_gathered_is_refused(bert, make_tiny, batch, make_batch):
    with pytest.raises(HeadError, match="no batches"):
        head_covariances(bert, [])
    with pytest.raises(HeadError, match=r"no attention module matches 'x\*'; there are encoder"):
        head_covariances(bert, [batch], modules="x*")
    with pytest.raises(HeadError, match="1 tokens that are no padding"):
        head_covariances(bert, [{"input_ids": torch.tensor([[5]])}])
    with pytest.raises(HeadError, match="at least 1"):
        head_samples(bert, [batch], 0)
    with pytest.raises(HeadError, match="unknown unit 'model'"):
        layer_covariance(bert, [batch], unit="model")
    with pytest.raises(HeadError, match="see different numbers of tokens"):
        layer_covariance(make_tiny("marian"), [make_batch("marian")])
    bert.get_submodule(NAME).value.weight.data[0, 0] = torch.nan
    with pytest.raises(HeadError, match=f"{NAME} is not finite"):
        head_covariances(bert, [batch])


def test_constant_outputs_are_like_nothing(bert, calibration):
    with torch.no_grad():
        bert.get_submodule(NAME).value.weight[8:16] = 0  # head 1 gives its value bias, whatever it reads
        bert.get_submodule(NAME).value.bias.fill_(0.3)
    joint = head_covariances(bert, calibration[:2])[NAME]
    for matrix in (svcca(joint).similarity, cka(joint)):
        assert not matrix[1].any()
        assert matrix.isfinite().all()
        assert float(matrix[0, 2]) > 0
