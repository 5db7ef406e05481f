"""Edits that are interrupted."""

import pytest
import torch

from collab_compress import Compression, compress, expand, mix_heads_, prune_heads_
from collab_compress.checkpoint import edits, edits_of

EDITS = {
    "prune": lambda model: prune_heads_(model, {"encoder.layer.0.attention.self": [1]}),
    "mix": mix_heads_,
    "narrow": lambda model: compress(model, Compression(dv=12), None),
    "expand": expand,
}


@pytest.mark.parametrize("name", EDITS)
def test_an_interrupted_edit_changes_nothing(name, make_tiny, batch, tmp_path, monkeypatch):
    model = make_tiny("bert")
    compress(model, Compression(dk=8), None)
    before, config, recorded = dict(model.named_parameters()), model.config.to_dict(), edits_of(model)
    attributes = {path: set(vars(part)) for path, part in model.named_modules()}
    classes = [type(part) for part in model.modules()]
    with torch.no_grad():
        expected = model(**batch)[0]
    _keep_weights_ = edits._keep_weights_

    def interrupt(of):
        _keep_weights_(of)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(edits, "_keep_weights_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            EDITS[name](model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[path] is parameter for path, parameter in before.items())
    assert model.config.to_dict() == config
    assert edits_of(model) == recorded
    assert attributes == {path: set(vars(part)) for path, part in model.named_modules()}
    assert classes == [type(part) for part in model.modules()]
    with torch.no_grad():
        assert torch.equal(model(**batch)[0], expected)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(type(model).from_pretrained(tmp_path)(**batch)[0], expected)
    EDITS[name](model)
    assert edits_of(model) != recorded
