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


def session(model, batch, dynamic, path):
    with torch.no_grad():
        names = {"kwargs": batch, "input_names": list(batch), "dynamic_shapes": dynamic(batch)}
        torch.onnx.export(model, (), path, **names, dynamo=True, verbose=False)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def difference(session, model, batch):
    """Return the largest difference of the first output over unpadded tokens."""
    with torch.no_grad():
        expected = model(**batch)[0]
    outputs = torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0])
    real = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return (outputs - expected)[... if real is None else real.bool()].abs().max().item()


def test_every_kind_for_any_shape(converted, batches, dynamic, tmp_path):
    exported = session(converted, batches[2], dynamic, tmp_path / "model.onnx")
    assert [part.name for part in exported.get_inputs()] == list(batches[2])
    for batch in batches:
        assert difference(exported, converted, batch) < 5e-5
