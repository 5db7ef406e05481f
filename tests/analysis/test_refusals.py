"""What cannot be measured is refused: which call, with which error and message."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collab_compress import CalibrationError, CalibrationOptions, UnsupportedModelError
from collab_compress.analysis import (
    JointCovariance,
    alpha_matrices,
    attention_maps,
    bhattacharyya,
    cka,
    discrepancy,
    dominant_heads,
    head_covariances,
    head_patterns,
    induction,
    layer_covariance,
    mean_over_pairs,
    model_covariances,
    model_latency,
    module_latency,
    plan,
    pruning_curve,
    svcca,
)
from collab_compress.errors import HeadError

NAME = "encoder.layer.0.attention.self"
IDS = torch.tensor([[5, 6]])
ONE_TOKEN = {"input_ids": torch.tensor([[5]])}
PADDING = {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
ONE, JOINT = JointCovariance.of([X]), JointCovariance.of([X, X + 1])
NO_PAIRS, NO_TOKENS = "a single head has no pairs", "unpadded tokens; similarity needs at least 2"


def of_shapes(*shapes):
    return JointCovariance.of([torch.ones(shape) for shape in shapes])


def with_nan(model):
    model.get_submodule(NAME).value.weight.data[0, 0] = torch.nan
    return model


def shallow(model):
    model.config.num_hidden_layers = 2
    return model


def without_tokens(model):
    model.forward = nn.Identity().forward
    return model


REFUSED = [
    *((lambda _, v=v: svcca(JOINT, variance=v), "share of variance to keep") for v in (0, -1, 1.01, float("nan"))),
    (lambda _: svcca(ONE).mean, NO_PAIRS),
    (lambda _: svcca(ONE).curve, NO_PAIRS),
    (lambda _: mean_over_pairs(torch.ones(1, 1)), NO_PAIRS),
    (lambda _: mean_over_pairs(torch.ones(2, 3)), "expected a matrix"),
    (lambda _: of_shapes((0, 3)), f"got 0 {NO_TOKENS}"),
    (lambda _: of_shapes((1, 3)), f"got 1 {NO_TOKENS}"),
    (lambda _: of_shapes((3, 2), (4, 2)), "do not fit together"),
    (lambda _: of_shapes((3,)), "do not fit together"),
    (lambda _: of_shapes(), "do not fit together"),
    (lambda _: JointCovariance.of([X, X / 0]), "is not finite"),
    (lambda _: JointCovariance.of([X * torch.nan, X]), "is not finite"),
    (lambda g: head_covariances(g.bert, []), "no batches"),
    (lambda g: head_covariances(g.bert, [ONE_TOKEN]), f"got 1 {NO_TOKENS}"),
    (lambda g: head_covariances(with_nan(g.bert), [g.batch]), f"{NAME} is not finite"),
    (lambda g: layer_covariance(g.make("marian"), [g.make_batch("marian")]), "see different numbers of tokens"),
    (
        lambda g: model_covariances(g.bert, g.make("albert"), [g.batch]),
        "2 and 3 attention modules, which do not pair",
    ),
    (
        lambda g: model_covariances(shallow(g.make("albert")), g.make("albert"), [g.batch]),
        "2 and 3 attention modules, which do not pair",
    ),
    (lambda g: discrepancy(g.bert, [g.batch])[NAME].norm("l3"), "unknown measure 'l3'"),
    (lambda g: discrepancy(with_nan(g.bert), [g.batch]), f"{NAME}: what its heads compute is not finite"),
    (lambda g: bhattacharyya(g.bert, [PADDING]), "saw only padding"),
    (lambda g: head_patterns(g.bert, [ONE_TOKEN]), "two or more tokens"),
    (lambda g: induction(g.bert, length=1), "expected at least 2 tokens and 1 sequence"),
    (lambda g: induction(g.bert, sequences=0), "expected at least 2 tokens and 1 sequence"),
    (lambda g: induction(g.make("marian")), "does not read one sequence of tokens"),
    (lambda g: attention_maps(g.bert, None, "the cat", target="a mat"), "BertModel: leave target out"),
    (lambda g: attention_maps(g.make("marian"), None, "the cat"), "MarianModel: pass target="),
    (lambda g: alpha_matrices(g.bert), "has no alphas"),
    (lambda g: dominant_heads(g.bert), "pass either score="),
    (lambda g: dominant_heads(g.bert, lambda _: 1.0, batches=[g.batch]), "pass either score="),
    (lambda g: dominant_heads(g.bert, lambda _: float("nan")), "the score is nan"),
    (lambda g: dominant_heads(g.bert, lambda _: 1.0, heads={"nowhere": 0}), "nowhere"),
    (lambda g: dominant_heads(g.bert, batches=[]), "no output error can be measured"),
    (lambda g: pruning_curve(g.bert, {NAME: X}, batches=[g.batch], shares=[1.5]), r"share of heads is 1\.5"),
    (lambda g: pruning_curve(g.bert, {"nowhere": X[0]}, batches=[g.batch]), "no attention module 'nowhere'"),
    (lambda g: module_latency(g.bert, g.bert, rounds=1), "got 1 rounds"),
    (lambda g: module_latency(g.bert, g.make("distilbert")), "no attention module of the same path"),
    (lambda g: module_latency(without_tokens(g.bert), g.bert, (4,), rounds=2), "reads no tokens; pass inputs="),
]
REFUSED = [(call, HeadError, message) for call, message in REFUSED]
REFUSED += [
    (lambda g: head_covariances(g.bert, [g.batch], modules="x*"), UnsupportedModelError, r"matches 'x\*'; the"),
    (lambda g: module_latency(g.bert, g.bert, (41,), rounds=2), CalibrationError, "cannot run"),
    (lambda g: model_latency(g.bert, g.bert, 41), CalibrationError, "cannot run"),
    (lambda g: plan(g.bert, [ONE_TOKEN]), CalibrationError, "at least two sequences"),
    (
        lambda g: plan(g.bert, [g.batch], calibration_options=CalibrationOptions(sequences=1)),
        CalibrationError,
        "at least two sequences",
    ),
]
for measure in (cka, svcca):
    REFUSED += [
        (lambda _, measure=measure, given=given: measure(*given), HeadError, message)
        for given, message in (
            ((X,), "cannot compare Tensor and NoneType; expected one JointCovariance, or two tensors"),
            ((X, [1]), "cannot compare Tensor and list"),
            ((JOINT, X), "cannot compare JointCovariance and Tensor"),
            ((X, X[1:]), r"do not fit together: got .*expected \(N, d\)"),
            ((X, X[:, :0]), r"do not fit together: got .*expected \(N, d\)"),
        )
    ]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_cannot_be_measured_is_refused(call, error, message, bert, batch, make_tiny, make_batch):
    given = SimpleNamespace(bert=bert, batch=batch, make=make_tiny, make_batch=make_batch)
    with pytest.raises(error, match=message):
        call(given)
