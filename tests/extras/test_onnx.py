"""ONNX by torch's exporter, run by onnxruntime in several shapes with padding."""

import pytest
import torch

from collab_compress import Compression, compress

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

# torch's exporter copies a tree of a class that it deprecates, names axes once a tensor, and does not name them
# where it drops an input (`use_cache`).
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
    pytest.mark.filterwarnings("ignore:# ONNX model has different number of inputs:UserWarning"),
]


@torch.no_grad()
def test_every_kind_for_any_shape(converted, batches, dynamic, tmp_path):
    example, path = batches[2], tmp_path / "model.onnx"
    names = {"kwargs": example, "input_names": list(example), "dynamic_shapes": dynamic(example)}
    torch.onnx.export(converted, (), path, **names, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [part.name for part in session.get_inputs()] == list(example)
    for batch in batches:
        outputs = torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0])
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        unpadded = ... if mask is None else mask.bool()
        torch.testing.assert_close(outputs[unpadded], converted(**batch)[0][unpadded], atol=5e-5, rtol=0)


@torch.no_grad()
def test_shared_channels_are_gathered_by_rows(make_tiny, tmp_path):
    """By columns ONNX Runtime takes longer for it than for all products of a layer in int8."""
    onnx, path = pytest.importorskip("onnx"), tmp_path / "model.onnx"
    model = make_tiny("bert")
    compress(model, Compression(dk=12, dv=12), None)
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    torch.onnx.export(model, (), path, kwargs=batch, dynamo=True, verbose=False)
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "Gather" and "index_select" in node.name]
    axes = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "axis"]
    assert axes == [0] * model.config.num_hidden_layers
