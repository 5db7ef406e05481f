"""The streamed covariance, against numpy's over all tokens at once."""

import numpy as np
import pytest
import torch

from collab_compress.analysis import JointCovariance
from collab_compress.analysis.covariance import RunningCovariance
from collab_compress.errors import HeadError


def of_parts(parts, widths):
    running = RunningCovariance("layer")
    for part in parts:
        running.add([(str(place), block[:, None]) for place, block in enumerate(part.split(widths, 1))])
    return running.result("it")


@pytest.mark.parametrize("widths", [(5, 5, 5), (1, 6, 8), (15,)])
@pytest.mark.parametrize("size", [200, 7, 1])
def test_it_is_the_covariance_of_all_tokens(draw, widths, size):
    x = draw().flatten(1)
    found = of_parts(x.split(size), widths)
    torch.testing.assert_close(found.matrix, torch.tensor(np.cov(x.numpy(), rowvar=False)))
    torch.testing.assert_close(found.mean, x.mean(0))
    assert found.count == 200


def test_more_columns_than_a_panel():
    x = torch.randn(5000, 210, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(of_parts([x], (100, 110)).matrix, torch.tensor(np.cov(x.numpy(), rowvar=False)))


def test_float32_keeps_directions_of_little_variance():
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    x = (torch.randn(4000, 8, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 8)) @ turn
    found = of_parts(x.float().split(500), (8,)).matrix
    right = torch.tensor(np.cov(x.float().double().numpy(), rowvar=False))
    torch.testing.assert_close(torch.linalg.eigvalsh(found), torch.linalg.eigvalsh(right), rtol=1e-5, atol=0)
    plain = x.float() - x.float().mean(0)
    lost = torch.linalg.eigvalsh((plain.T @ plain).double() / 3999)[0] / torch.linalg.eigvalsh(right)[0] - 1
    assert abs(float(lost)) > 1e-2  # what a plain product in float32 would do


def test_a_mean_far_from_zero_does_no_harm(draw):
    x = draw().flatten(1) + 1e6
    torch.testing.assert_close(
        of_parts(x.split(50), (5, 10)).matrix, torch.tensor(np.cov(x.numpy(), rowvar=False)), rtol=1e-6, atol=1e-8
    )


def test_blocks_are_padded_with_zeros():
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    joint = JointCovariance.of([x[:, :2], x[:, 2:]])
    right = torch.tensor(np.cov(x.numpy(), rowvar=False))
    first = joint.cross(0, [0, 1])
    torch.testing.assert_close(first[1][:2], right[:2, 2:])
    torch.testing.assert_close(first[0], torch.nn.functional.pad(right[:2, :2], (0, 1, 0, 1)))
    torch.testing.assert_close(joint.own()[1], right[2:, 2:])
    assert joint.labels == ("0", "1")
    assert list(JointCovariance.of([x, x, x], leading=1).columns) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_constant_but_for_rounding_does_not_vary(dtype):
    generator = torch.Generator().manual_seed(0)
    noise = 1 + (torch.rand(300, 1, generator=generator, dtype=torch.float64) - 0.5) * torch.finfo(dtype).eps
    x = torch.cat([torch.randn(1, 6, generator=generator, dtype=torch.float64).expand(300, 6) * noise], 1).to(dtype)
    y = torch.randn(300, 6, generator=generator).to(dtype)
    own = JointCovariance.of([x, y]).own()
    assert not own[0].any()
    assert own[1].any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_two_tokens_are_needed(tokens):
    with pytest.raises(HeadError, match=f"representations: got {tokens} tokens .* needs two"):
        JointCovariance.of([torch.ones(tokens, 3)])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_numbers_that_are_not_finite_are_refused(bad, where):
    parts = [torch.randn(9, 4) for _ in range(2)]
    parts[where][3, 2] = bad
    with pytest.raises(HeadError, match="it is not finite"):
        of_parts(parts, (2, 2))


@pytest.mark.parametrize("shapes", [[(3, 2), (4, 2)], [(3,)], []])
def test_representations_must_fit(shapes):
    with pytest.raises(HeadError, match="do not fit together"):
        JointCovariance.of([torch.ones(shape) for shape in shapes])


def test_blocks_are_picked_and_joined(draw):
    parts = [draw(heads=1, width=width, seed=width).flatten(1) for width in (2, 3, 4)]
    joint = JointCovariance.of(parts)
    some, wide = joint.only(range(1, 3)), joint.merged([2, 1], ["first", "second"], leading=1)
    expected = JointCovariance.of(parts[1:])
    assert (some.labels, some.widths) == (("1", "2"), (3, 4))
    torch.testing.assert_close(some.matrix, expected.matrix)
    torch.testing.assert_close(some.mean, expected.mean)
    expected = JointCovariance.of([torch.cat(parts[:2], 1), parts[2]], leading=1)
    assert (wide.labels, wide.widths, wide.rows, wide.columns) == (
        ("first", "second"), expected.widths, expected.rows, expected.columns,
    )  # fmt: skip
    torch.testing.assert_close(wide.matrix, expected.matrix)
    with pytest.raises(HeadError, match="cannot join 3 blocks into 2"):
        joint.merged([1, 1], ["first", "second"])
