"""Covariances of heads, layers and models, against numpy on all tokens at once."""

import numpy as np
import pytest
import torch

from collab_compress.analysis import (
    JointCovariance,
    bhattacharyya,
    cka,
    discrepancy,
    head_covariances,
    layer_covariance,
    model_covariances,
    svcca,
    with_progress,
)
from collab_compress.architectures import find_attention
from collab_compress.attention.run import head_hooks
from collab_compress.errors import CalibrationError


@pytest.mark.parametrize("widths", [(5, 5, 5), (1, 6, 8), (15,)])
def test_blocks_lie_side_by_side(draw, widths):
    x = draw().flatten(1)
    joint = JointCovariance.of(x.split(widths, 1))
    torch.testing.assert_close(joint.matrix, torch.tensor(np.cov(x.numpy(), rowvar=False)))
    torch.testing.assert_close(joint.mean, x.mean(0))
    assert (joint.count, joint.labels) == (200, tuple(map(str, range(len(widths)))))
    assert [x[:, block].shape[1] for block in joint.slices] == list(widths)
    torch.testing.assert_close(
        joint.sum_blocks(joint.mean), torch.stack([block.mean(0).sum() for block in x.split(widths, 1)])
    )


def test_float32_keeps_directions_of_little_variance():
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    x = (torch.randn(4000, 8, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 8)) @ turn
    covariance = JointCovariance.of([x.float()]).matrix
    right = torch.tensor(np.cov(x.float().double().numpy(), rowvar=False))
    torch.testing.assert_close(torch.linalg.eigvalsh(covariance), torch.linalg.eigvalsh(right), rtol=1e-5, atol=0)
    plain = x.float() - x.float().mean(0)
    lost = torch.linalg.eigvalsh((plain.T @ plain).double() / 3999)[0] / torch.linalg.eigvalsh(right)[0] - 1
    assert abs(float(lost)) > 1e-2  # a plain product in float32 would lose them


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_that_are_constant_except_for_rounding_do_not_vary(dtype):
    generator = torch.Generator().manual_seed(0)
    noise = 1 + (torch.rand(300, 1, generator=generator, dtype=torch.float64) - 0.5) * torch.finfo(dtype).eps
    x = torch.cat([torch.randn(1, 6, generator=generator, dtype=torch.float64).expand(300, 6) * noise], 1).to(dtype)
    y = torch.randn(300, 6, generator=generator).to(dtype)
    joint = JointCovariance.of([x, y])
    assert (joint.variances > joint.floors).tolist() == [False, True]


NAME = "encoder.layer.0.attention.self"


def test_covariances_are_those_of_all_real_tokens(either, real_responses):
    model, batches = either
    joints, right = head_covariances(model, batches), real_responses(model, batches)
    assert joints.keys() == right.keys()
    for name, tokens in right.items():
        heads, width = tokens.shape[1:]
        assert joints[name].widths == (width,) * heads
        assert joints[name].labels == tuple(map(str, range(heads)))
        assert joints[name].count == len(tokens)
        covariance = np.cov(tokens.double().flatten(1).numpy(), rowvar=False)
        np.testing.assert_allclose(joints[name].matrix, covariance, atol=1e-6 * np.abs(covariance).max())


def test_the_model_is_left_as_it_was(bert, batch):
    bert.train()
    head_covariances(bert, [batch])
    with pytest.raises(CalibrationError, match="index"):
        head_covariances(bert, [{"input_ids": batch["input_ids"] + 1000}])
    assert bert.training
    assert torch.is_grad_enabled()
    assert not any(head_hooks(site.module) for site in find_attention(bert))


@pytest.mark.parametrize(
    "measure",
    [
        lambda *data: head_covariances(*data)[NAME].matrix,
        lambda *data: discrepancy(*data)[NAME].l2,
        lambda *data: bhattacharyya(*data)[NAME],
    ],
)
def test_padding_does_not_count(bert, batch, measure):
    longer = {name: torch.nn.functional.pad(value, (0, 4)) for name, value in batch.items()}
    torch.testing.assert_close(measure(bert, [longer]), measure(bert, [batch]), atol=1e-5, rtol=1e-4)


def test_layers_are_compared_whole_or_by_head(either, real_responses):
    model, batches = either
    kinds = ["encoder"] if any(site.kind == "encoder" for site in find_attention(model)) else ["decoder"]
    by_head = layer_covariance(model, batches, kinds=kinds)
    joint = by_head.layers
    tokens = real_responses(model, batches)
    layers = torch.cat([tokens[name].flatten(1) for name in joint.labels], 1)
    right = np.cov(layers.double().numpy(), rowvar=False)
    np.testing.assert_allclose(joint.matrix, right, atol=1e-6 * np.abs(right).max())
    assert by_head.labels[1] == f"{joint.labels[0]}:1"
    assert len(by_head.widths) == sum(tokens[name].shape[1] for name in joint.labels)
    assert joint.widths == tuple(tokens[name].flatten(1).shape[1] for name in joint.labels)


def test_a_model_is_like_itself_and_unlike_another(either, family, make_tiny):
    model, batches = either
    for name, joint in model_covariances(model, model, batches).items():
        alone = svcca(head_covariances(model, batches)[name])
        torch.testing.assert_close(svcca(joint).similarity, alone.similarity, atol=1e-4, rtol=1e-4)
        assert joint.labels[0] == f"{name.partition('[')[0]}:0"
    other = make_tiny(family, seed=1)
    for name, joint in model_covariances(model, other, batches).items():
        assert cka(joint.layers).shape == (1, 1)
        assert 0 < float(cka(joint.layers)) < 0.99
        assert joint.layers.labels == (name.partition("[")[0],) * 2


def test_models_are_paired_by_place(bert, make_tiny, batch):
    other = make_tiny("distilbert", seed=1)
    by_place = model_covariances(bert, other, [batch])
    assert list(by_place) == [NAME, NAME.replace("0", "1")]
    assert by_place[NAME].labels[-1] == "transformer.layer.0.attention:2"


def test_a_model_of_one_head_is_compared_with_each_of_many(bert, make_tiny, batch, real_responses):
    """As Table 2 of "Inter-Head Diversity" does: the one head as wide as all of the others together."""
    config = bert.config.to_diff_dict() | {"num_attention_heads": 1}
    one = type(bert)(type(bert.config)(**config)).eval()
    joint = model_covariances(one, bert, [batch])[NAME]
    assert joint.widths == (24, 8, 8, 8)
    assert svcca(joint).similarity.shape == (1, 3)
    tokens = [real_responses(model, [batch])[NAME] for model in (one, bert)]
    for head in range(3):
        alone = svcca(JointCovariance.of([tokens[0][:, 0], tokens[1][:, head]]))
        assert float(svcca(joint).similarity[0, head]) == pytest.approx(float(alone.similarity[0, 1]), abs=1e-5)


def test_progress_is_reported(bert, calibration, capsys):
    head_covariances(bert, calibration[:1])
    assert not capsys.readouterr().err
    steps = []
    head_covariances(bert, with_progress(calibration[:3], lambda *step: steps.append(step)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    steps.clear()
    head_covariances(bert, with_progress(iter(calibration[:2]), lambda *step: steps.append(step)))
    assert steps == [(1, None), (2, None)]
