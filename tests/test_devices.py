"""Tensors that are made without a device would land on the default one, whatever the model's is."""

import ast
from pathlib import Path

import torch

from collab_compress import Compression, compress
from collab_compress.analysis import plan

ROOT = Path(__file__).parents[1]
FACTORIES = "arange as_tensor asarray empty eye full linspace logspace ones rand randint randn randperm scalar_tensor"
FACTORIES += " tensor tril_indices triu_indices zeros"


def test_tensors_are_made_on_a_named_device():
    lacking = []
    for path in [
        path for folder in ("collab_compress", "cli", "glue_runs") for path in (ROOT / folder).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if (
                not is_call
                or node.func.attr not in FACTORIES.split()
                or getattr(node.func.value, "id", "") != "torch"
            ):
                continue
            if not {"device", None} & {keyword.arg for keyword in node.keywords}:
                lacking.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not lacking


def test_a_conversion_runs_under_another_default_device(make_tiny):
    data = [{"input_ids": torch.randint(3, 61, (4, 9))} for _ in range(4)]
    for options in ({"dk": 8, "dv": 12}, {"dff": 16}, {"layers": 1}):
        model, same = make_tiny("bert"), make_tiny("bert")
        compress(model, Compression(**options), data)
        with torch.device("meta"):
            compress(same, Compression(**options), data)
        for name, tensor in model.state_dict().items():
            assert torch.equal(same.state_dict()[name], tensor), name
    model = make_tiny("bert")
    with torch.device("meta"):
        assert plan(model, data, shares=(1 / 2,)).rows
