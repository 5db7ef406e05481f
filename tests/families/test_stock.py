"""Plain models with narrower heads."""

import copy

import pytest
import torch
import transformers
from tiny_families import TINIES, build, inputs, run

from collab_compress import Compression, Solver, compress, mix_heads_
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.conversion.expand import to_stock
from collab_compress.errors import CompressionError

QUICK = Solver(sweeps=3)

WIDTHS = ("head_dim", "d_kv", "kv_channels", "attention_head_size", "qkv_dim")  # what configs call it


def test_the_table_names_every_config_with_a_free_width():
    """Except those of rotary embeddings, which rotate whole heads, and of models of several parts."""
    for kin, tiny in TINIES.items():
        rotary = kin in FAMILIES and FAMILIES[kin].rotary
        if tiny.copy_of or rotary or any(name.endswith("_config") for name in tiny.settings):
            continue
        widths = set()
        for name in WIDTHS:
            try:
                config = getattr(transformers, f"{tiny.name}Config")(**{**tiny.settings, name: 5})
                site = find_attention(getattr(transformers, tiny.model)(config))[0]
            except (AttributeError, NotImplementedError):
                continue  # the config computes it
            shapes = [site.part(path).weight.shape for path in (site.paths.query, site.paths.output)]
            if site.head_width == 5 and shapes[0] == (15, 24) and shapes[1].numel() == 15 * 24:  # not DeBERTa's
                widths.add(config.attribute_map.get(name, name))
        assert widths == {FAMILIES[config.model_type].paths.free_width} - {""}, kin


@pytest.mark.parametrize(("name", "widths"), [("t5", (9, 12, 3)), ("t5", (17, 8, 5)), ("vit", (10, 8, 3))])
def test_equals_the_converted_model_and_loads_without_this_package(name, widths, tmp_path, stock_reload):
    model, batch = build(name), inputs(name)
    dk, dv, head_dim = widths
    compress(model, Compression(dk=dk, dv=dv, head_dim=head_dim, solver=QUICK), calibration=[batch, batch])
    before = run(model, batch)
    stock = to_stock(model)
    torch.testing.assert_close(run(stock, batch), before, atol=2e-5, rtol=1e-4)
    assert torch.equal(run(model, batch), before)
    assert getattr(stock.config, FAMILIES[model.config.model_type].paths.free_width) == max(head_dim, -(-dv // 3))
    assert stock.num_parameters() <= model.num_parameters() + 3 * model.num_parameters() // 10
    stock.save_pretrained(tmp_path / "stock")
    torch.save(batch, tmp_path / "stock" / "batch.pt")
    done = stock_reload(tmp_path / "stock", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "again" / "output.pt"), stock(**batch)[0])
    assert "quantization_config" not in stock.config.to_dict()


def test_frozen_weights_of_a_stock_model_stay_frozen_and_others_train():
    """Made in inference mode too, where the caller's random number generator does not advance."""
    model, batch = build("t5"), inputs("t5")
    model.encoder.requires_grad_(False)
    compress(model, Compression(dk=12, dv=12, head_dim=4, solver=QUICK), calibration=[batch, batch])
    state = torch.get_rng_state()
    with torch.inference_mode():
        stock = to_stock(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.is_inference() for parameter in stock.parameters())
    trained = {name for name, parameter in stock.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in build("t5").named_parameters() if name.startswith("decoder.")}


def test_what_has_no_stock_form_says_what_could_be_done_instead():
    with pytest.raises(CompressionError, match=r"the head width of a stock BertModel is .*T5.*dff.*expand"):
        to_stock(build("bert"))
    model, batch = build("t5"), inputs("t5")
    with pytest.raises(CompressionError, match="needs queries, keys and values of all modules narrower"):
        to_stock(model)
    wide = copy.deepcopy(model)
    compress(wide, Compression(dk=12, dv=12, solver=QUICK), calibration=None)
    with pytest.raises(CompressionError, match=r"would be 8 wide, as the stock model's are 8; .* smaller head_dim"):
        to_stock(wide)
    compress(model, Compression(dk=12, dv=12, head_dim=4, solver=QUICK), calibration=[batch])
    mix_heads_(model)
    with pytest.raises(CompressionError, match="no room for alphas"):
        to_stock(model)


def test_weights_that_were_loaded_untied_stay_untied(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    config.tie_word_embeddings = False
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert loaded.lm_head.weight is not loaded.shared.weight
    compress(loaded, Compression(dk=16, head_dim=4, dv=16), None)
    tokens = {"input_ids": torch.tensor([[3, 5, 8]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    stock = to_stock(loaded)
    torch.testing.assert_close(stock(**tokens).logits, loaded(**tokens).logits, rtol=1e-4, atol=1e-4)
    assert stock.lm_head.weight is not stock.shared.weight
