"""LoRA adapters on a converted model: trained, saved, loaded, merged."""

import copy
import re
from pathlib import Path

import pytest
import torch
from forms import outputs
from packaging.version import Version
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    TrainingArguments,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from collab_compress import Compression, CompressionError, UnsupportedModelError, compress, expand, read_factors
from collab_compress.attention import is_converted
from collab_compress.training import DistillationTrainer
from collab_compress.training.distillation import divergence

peft = pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

# PEFT asks Transformers for a name that Transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
BERT_TARGETS = ["qkv"]


def shared(model):
    """Return the paths of the plain linear layers that hold converted projections, where adapters go."""
    modules = [(name, module) for name, module in model.named_modules() if is_converted(module)]
    return sorted({f"{name}.{rows.layer}" for name, module in modules for rows in module.rows.values()})


def adapted(model, **options):
    """Return `model` with adapters that already change its outputs."""
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **options)).eval()


@pytest.fixture
def classifier(make_tiny, tmp_path):
    """Return a converted classifier, saved as `tmp_path / "base"` too."""
    model = make_tiny("bert", BertForSequenceClassification)
    compress(model, Compression(dk=9), calibration=None)
    model.save_pretrained(tmp_path / "base")
    return AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")


def test_trains_saves_loads_and_merges(converted, batches, tmp_path):
    model, batch = converted, batches[1]
    model.save_pretrained(tmp_path / "base")
    targets = shared(model)
    before = {name: model.get_submodule(name).weight.detach().clone() for name in targets}
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=targets)).eval()
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(targets)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    target = torch.randn_like(outputs(wrapped, batch))
    losses = []
    for _ in range(4):
        loss = (wrapped(**batch)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert all(p.detach().any() for p in trained.values())  # B of every adapter has left zero

    expected = outputs(wrapped, batch)
    wrapped.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.equal(outputs(again, batch), expected)

    merged = again.merge_and_unload()
    torch.testing.assert_close(outputs(merged, batch), expected, atol=2e-5, rtol=1e-4)
    assert {torch.equal(before[name], merged.get_submodule(name).weight) for name in targets} == {False}
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path / "merged"), batch), outputs(merged, batch))


def test_the_stock_models_names_are_refused(classifier):
    with pytest.raises(ValueError, match=r"(?i)no modules were targeted|target modules .*query.* not found"):
        get_peft_model(classifier, LoraConfig(task_type="SEQ_CLS"))  # PEFT's choice for BERT: query and value


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"Transformers' own methods for adapters need PEFT {MIN_PEFT_VERSION}, of stock models too",
)
def test_transformers_own_methods(classifier, batch, tmp_path):
    before = outputs(classifier, batch)
    classifier.add_adapter(LoraConfig(r=4, target_modules=BERT_TARGETS, init_lora_weights=False))
    expected = outputs(classifier.eval(), batch)
    assert not torch.allclose(expected, before)
    classifier.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    loaded.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(outputs(loaded.eval(), batch), expected)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    assert torch.equal(outputs(reloaded.eval(), batch), expected)


def test_the_mixing_matrix_takes_an_adapter(classifier, batch):
    before = {name: factors.mixing.clone() for name, factors in read_factors(classifier).items()}
    wrapped = adapted(classifier, target_modules=[], target_parameters=["qk.mixing"])
    expected = outputs(wrapped, batch)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(outputs(merged, batch), expected, atol=1e-5, rtol=1e-4)
    assert {torch.equal(before[name], factors.mixing) for name, factors in read_factors(merged).items()} == {False}


def test_adapters_are_never_lost_silently(classifier, make_tiny, batch):
    wrapped = adapted(classifier, target_modules=BERT_TARGETS)
    expected = outputs(wrapped, batch)
    for read in (expand, read_factors):
        with pytest.raises(UnsupportedModelError, match=r"self\.qkv: got peft\..*merge adapters"):
            read(classifier)
    assert torch.equal(outputs(wrapped, batch), expected)
    dense = adapted(make_tiny("bert"), target_modules=["query", "value"]).get_base_model()
    with pytest.raises(UnsupportedModelError, match=r"self\.query: .*adapters must be merged"):
        compress(dense, Compression(dk=8), calibration=None)
    expand(wrapped.merge_and_unload())


FORMS = {
    "`--dk` or `--dv`": [Compression(dk=9), Compression(dv=12), Compression(dk=9, dv=12)],
    "`--dff`, `--layers`, `--vocabulary`": [Compression(dff=16, layers=1)],
}


@pytest.mark.parametrize(("form", "widths"), [(form, widths) for form in FORMS for widths in FORMS[form]], ids=str)
def test_the_names_of_the_documentation_take_adapters(form, widths, make_tiny, calibration):
    page = (Path(__file__).parents[2] / "docs/compatibility.md").read_text(encoding="utf-8")
    targets = re.findall(r"`([\w.]+)`", re.findall(rf"^\| {re.escape(form)} \| ([^|]*) \|", page, re.M)[0])
    assert targets
    model = make_tiny("bert", BertForSequenceClassification)
    compress(model, widths, calibration)
    wrapped = adapted(model, target_modules=targets)
    wrapped(**calibration[0]).logits.square().sum().backward()
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.grad is not None}
    layers = model.config.num_hidden_layers
    assert len(trained) == 2 * len(targets) * layers
    assert sum(f".{target}.lora_A." in name for name in trained for target in targets) == len(targets) * layers


def test_layers_under_adapters_are_not_renumbered(make_tiny, calibration):
    """PEFT loads an adapter onto layers of the same number without an error, whichever layers these were."""
    wrapped = adapted(make_tiny("bert"), target_modules=["query"])
    with pytest.raises(CompressionError, match=r"layer\.0\.attention\.self\.query carries an adapter.*merge it"):
        compress(wrapped, Compression(layers=1), calibration)
    dense = wrapped.merge_and_unload()
    report = compress(dense, Compression(layers=1), calibration)
    assert "adapters of the dense model no longer fit, though they load" in str(report)


def test_a_peft_model_is_converted_as_the_model_inside(make_tiny, batch, tmp_path, load_cleanly):
    model = make_tiny("bert", BertForSequenceClassification)
    wrapped = adapted(model, target_modules=["intermediate.dense"], task_type="SEQ_CLS")
    compress(wrapped, Compression(dk=8), calibration=None)
    expected = outputs(wrapped, batch)
    wrapped.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(outputs(merged, batch), expected, atol=1e-5, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = load_cleanly(BertForSequenceClassification, tmp_path / "merged")
    assert torch.equal(outputs(loaded, batch), outputs(merged, batch))
    assert read_factors(loaded).keys() == read_factors(merged).keys() != set()


def test_adapters_of_a_language_model_are_trained_towards_its_probabilities(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "ffn_dim": 32, "vocab_size": 61}
    teacher = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=24, init_std=0.4)).eval()
    model = copy.deepcopy(teacher)
    compress(model, Compression(dk=3), calibration=None)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=shared(model)))
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = DistillationTrainer(wrapped, arguments, teacher=teacher)
    batch = {"input_ids": torch.randint(5, 61, (2, 9))}
    loss = trainer.compute_loss(wrapped.train(), batch)
    torch.testing.assert_close(loss, divergence(wrapped(**batch), teacher(**batch), batch))
    loss.backward()
    assert all(p.grad is not None for p in wrapped.parameters() if p.requires_grad)
