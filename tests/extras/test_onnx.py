"""ONNX by torch's exporter, run by onnxruntime in several shapes with padding."""

import pytest
import torch

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
