"""Converting only some kinds of attention."""

import pytest
import torch

from collab_compress import Compression, compress
from collab_compress.attention import is_converted
from collab_compress.errors import CompressionError, UnsupportedModelError


@pytest.mark.parametrize("kinds", [("encoder",), ("decoder", "cross"), ["cross"]])
def test_only_these_kinds(make_tiny, make_batch, kinds):
    model, batch = make_tiny("marian"), make_batch("marian")
    with torch.no_grad():
        before = model(**batch).last_hidden_state
    compress(model, Compression(dk=24, kinds=kinds), None)
    converted = {name.split(".")[0] + "." + name.split(".")[-1] for name, module in model.named_modules()
                 if is_converted(module)}  # fmt: skip
    where = {"encoder": "encoder.self_attn", "decoder": "decoder.self_attn", "cross": "decoder.encoder_attn"}
    assert converted == {where[kind] for kind in kinds}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).last_hidden_state, before, rtol=1e-4, atol=1e-5)


def test_kinds_that_are_not_there(make_tiny):
    with pytest.raises(UnsupportedModelError, match="with kind cross"):
        compress(make_tiny("bert"), Compression(dk=24, kinds=("cross",)), None)


@pytest.mark.parametrize(("kinds", "message"), [(("self",), "kinds are self; expected"), ((), "kinds are none")])
def test_unknown_kinds(kinds, message):
    with pytest.raises(CompressionError, match=message):
        Compression(dk=1, kinds=kinds)
