"""`torch.compile` by its default backend, which needs a C++ compiler; other tests compile by `aot_eager`."""

import copy
import shutil

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification

from collab_compress import Compression, Solver, compress

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    pytest.mark.skipif(not COMPILER, reason="no C++ compiler; docs/compatibility.md"),
    # torch's compiler imports a module of torch that uses a deprecated decorator.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def test_minilm_as_one_graph_for_all_shapes(minilm, minilm_tokenizer):
    compress(minilm, Compression(dk=128, solver=Solver(sweeps=2)), calibration=None)
    compiled = torch.compile(minilm, fullgraph=True, dynamic=True)
    for number, (rows, words) in enumerate(((3, 9), (2, 17), (5, 40))):
        texts = [" ".join(["word"] * (words - row)) for row in range(rows)]
        batch = minilm_tokenizer(texts, padding=True, return_tensors="pt")
        stance = "fail_on_recompile" if number else "default"
        with torch.no_grad(), torch.compiler.set_stance(stance):
            torch.testing.assert_close(compiled(**batch)[0], minilm(**batch)[0], atol=1e-4, rtol=1e-4)


def test_training(make_tiny, make_batch, set_dropout_):
    plain = set_dropout_(make_tiny("bert", BertForSequenceClassification), 0.0).train()
    compress(plain, Compression(dk=8), calibration=None)
    other = copy.deepcopy(plain)
    batch = make_batch("bert")
    labels = torch.tensor([0, 1, 0])
    losses = [train(model, batch, labels) for model in (plain, torch.compile(other, fullgraph=True))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    for (name, one), (_, two) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4, msg=name)


def train(model: nn.Module, batch: dict[str, torch.Tensor], labels: torch.Tensor) -> list[float]:
    """Return the losses of three steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
