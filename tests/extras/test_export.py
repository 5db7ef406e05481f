"""`torch.export` of a converted model, for any batch and length."""

import torch


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
