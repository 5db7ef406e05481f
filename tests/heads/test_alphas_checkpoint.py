"""Models whose heads mix, saved and loaded by stock means, with the package and without."""

import copy
import json

import pytest
import torch
from forms import convert_
from transformers import AutoModel, AutoModelForSequenceClassification

from collab_compress import Compression, alphas_of, compress, make_standalone_, merge_alphas_, mix_heads_
from collab_compress.heads.alphas import AlphasEdit


def outputs(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


def mix_randomly_(model, seed=0):
    mix_heads_(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for alphas in alphas_of(model).values():
            alphas.add_(0.3 * torch.randn_like(alphas))


@pytest.mark.parametrize("order", ["mix", "mix, compress", "compress, mix", "narrow, mix"])
def test_every_auto_class(family, auto_class, order, make_tiny, batch, tmp_path, load_cleanly, capfd):
    torch.manual_seed(0)
    model = auto_class.from_config(make_tiny(family).config).eval()
    for step in order.split(", "):
        if step == "mix":
            mix_randomly_(model)
        else:
            compress(model, Compression(dv=6) if step == "narrow" else Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path / "one")
    loaded = load_cleanly(auto_class, tmp_path / "one")
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    assert {alphas.requires_grad for alphas in alphas_of(loaded).values()} == {True}
    loaded.save_pretrained(tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert "collab" not in capfd.readouterr().err.lower()


def test_body_and_head_exchange_checkpoints(make_tiny, batch, tmp_path):
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(make_tiny("bert").config).eval()
    mix_randomly_(classifier)
    classifier.save_pretrained(tmp_path / "classifier")
    body = AutoModel.from_pretrained(tmp_path / "classifier")
    assert torch.equal(outputs(body, batch), outputs(classifier.bert, batch))
    body.save_pretrained(tmp_path / "body")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "body")
    assert torch.equal(outputs(again.bert, batch), outputs(body, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype, make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny(family).to(dtype)
    mix_randomly_(model)
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(AutoModel, tmp_path, dtype="auto")
    assert {alphas.dtype for alphas in alphas_of(loaded).values()} == {dtype}
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))


def test_shards_and_device_map(make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny("bert")
    mix_randomly_(model)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    for device_map in ("cpu", "auto"):
        loaded = load_cleanly(AutoModel, tmp_path, device_map=device_map)
        torch.testing.assert_close(outputs(loaded, batch).cpu(), outputs(model, batch))


def test_offloaded_weights_are_fetched(make_tiny, batch, tmp_path):
    """Hooks that bring weights in sit on the modules that hold them, the inner projection among them."""
    from accelerate import cpu_offload

    model = make_tiny("bert")
    mix_randomly_(model)
    before = outputs(model, batch)
    cpu_offload(model, torch.device("cpu"))
    assert model.encoder.layer[0].attention.output.dense.proj.weight.is_meta
    assert torch.equal(outputs(model, batch), before)


def test_a_merged_model_is_a_stock_one(family, make_tiny, batch, tmp_path, stock_reload):
    model = make_tiny(family)
    mix_randomly_(model)
    before = outputs(model, batch)
    merge_alphas_(model)
    model.save_pretrained(tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    assert "collab" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    done = stock_reload(tmp_path, tmp_path / "again", trust=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "again" / "output.pt", weights_only=True)
    torch.testing.assert_close(found, before, atol=1e-5, rtol=1e-5)


def test_without_the_package_loading_fails_and_never_ignores_alphas(family, make_tiny, tmp_path, stock_python):
    model = make_tiny(family)
    mix_heads_(model)
    model.save_pretrained(tmp_path)
    done = stock_python(
        "from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1]); print('LOADED')", tmp_path
    )
    assert "LOADED" not in done.stdout
    assert done.returncode != 0
    assert "pip-install-collab-compress-0.1.0-and-import-collab_compress" in done.stderr


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("bert", "dense"),
        ("bert", "narrow"),
        ("albert", "dense"),
        ("distilbert", "collaborative"),
        ("marian", "collaborative"),
    ],
)
def test_shipped_code_loads_and_saves_without_the_package(family, form, make_tiny, batch, tmp_path, stock_reload):
    model = convert_(make_tiny(family), form)
    mix_randomly_(model)
    make_standalone_(model)
    model.save_pretrained(tmp_path / "one")
    torch.save(batch, tmp_path / "one" / "batch.pt")
    done = stock_reload(tmp_path / "one", tmp_path / "two", trust=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "two" / "output.pt", weights_only=True)
    torch.testing.assert_close(found, outputs(model, batch))  # another process, maybe other threads


def test_config_describes_the_edit(make_tiny, tmp_path):
    model = make_tiny("albert")
    mix_heads_(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (edit,) = config["quantization_config"]["edits"]
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention.dense"
    assert edit == {"kind": "alphas", "modules": {path: 3}}
    assert AlphasEdit.from_dict(edit).to_dict() == {"modules": {path: 3}}


def test_a_copy_saves_like_the_original(make_tiny, batch, tmp_path):
    model = make_tiny("distilbert")
    mix_randomly_(model)
    copy.deepcopy(model).save_pretrained(tmp_path)
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path), batch), outputs(model, batch))
