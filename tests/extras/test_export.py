"""`torch.export` of a converted model, for any batch and length."""

import torch

from collab_compress import Compression, Solver, compress

TEXTS = ["A man is playing a guitar.", "The quick brown fox jumps over the lazy dog, twice, and then it rests."]


def exported(model, batch, dynamic):
    with torch.no_grad():
        return torch.export.export(model, (), batch, dynamic_shapes=dynamic(batch))


def check_same(one, other, batches):
    for batch in batches:
        with torch.no_grad():
            torch.testing.assert_close(one(**batch)[0], other(**batch)[0], atol=1e-6, rtol=1e-5)


def test_every_kind_for_any_shape(converted, batches, dynamic, tmp_path):
    converted.double()  # what is exported goes through other kernels
    program = exported(converted, batches[2], dynamic)
    torch.export.save(program, tmp_path / "model.pt2")
    check_same(torch.export.load(tmp_path / "model.pt2").module(), converted, batches)


def test_eager_attention_and_no_mask(make_tiny, make_batch, dynamic):
    model = make_tiny("bert")
    compress(model, Compression(dk=8), calibration=None)
    model.set_attn_implementation("eager")
    shapes = ((2, 9), (1, 21), (4, 30))
    batches = [{"input_ids": make_batch("bert", batch=b, length=t)["input_ids"]} for b, t in shapes]
    check_same(exported(model, batches[0], dynamic).module(), model, batches)


def test_minilm(minilm, minilm_tokenizer, dynamic):
    compress(minilm, Compression(dk=128, solver=Solver(sweeps=2)), calibration=None)
    batches = [dict(minilm_tokenizer(texts, padding=True, return_tensors="pt")) for texts in (TEXTS, TEXTS[:1])]
    check_same(exported(minilm, batches[0], dynamic).module(), minilm, batches)
