"""`torch.export` of a converted model, for any batch and length."""

import torch


@torch.no_grad()
def test_every_kind_for_any_shape(converted, batches, dynamic, tmp_path):
    converted.double()  # what is exported goes through other kernels
    program = torch.export.export(converted, (), batches[2], dynamic_shapes=dynamic(batches[2]))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch in batches:
        torch.testing.assert_close(loaded(**batch)[0], converted(**batch)[0], atol=1e-6, rtol=1e-5)
