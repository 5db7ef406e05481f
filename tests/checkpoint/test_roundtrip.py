"""A converted model saved and loaded by stock means, with the package and without."""

import torch
from forms import outputs
from transformers import AutoConfig

from collab_compress import Compression, compress
from collab_compress.checkpoint import EditConfig


def test_every_auto_class(family, auto_class, make_tiny, batch, tmp_path, load_cleanly, capfd):
    """At 24 = D = H·d channels, where the shapes of dense and converted projections agree."""
    torch.manual_seed(0)
    model = auto_class.from_config(make_tiny(family).config).eval()
    compress(model, Compression(dk=24, dv=24), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(auto_class, tmp_path)
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    assert not getattr(loaded, "is_quantized", False)
    assert "collab" not in capfd.readouterr().err.lower()  # no warning either


def test_config_describes_the_edits(make_tiny, tmp_path):
    model = make_tiny("albert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path)
    stored = AutoConfig.from_pretrained(tmp_path).quantization_config
    assert stored["quant_method"].startswith("collab_compress (")
    assert stored["version"] == 2
    (edit,) = stored["edits"]
    assert edit["kind"] == "collaborative"
    assert [spec["rank"] for spec in edit["modules"].values()] == [5]
    assert EditConfig(stored["edits"]).to_dict() == stored
