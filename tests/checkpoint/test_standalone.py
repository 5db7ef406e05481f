"""A checkpoint that ships its modelling code."""

import ast

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from collab_compress import CheckpointError, Compression, compress, expand, make_standalone_, read_factors
from collab_compress.checkpoint.edits import MODULE
from collab_compress.checkpoint.standalone import modelling_code

WITHOUT_PACKAGE = """
import torch
from transformers import AutoModel, AutoModelForSequenceClassification
auto = {"base": AutoModel, "classifier": AutoModelForSequenceClassification}[sys.argv[3]]
source, target = sys.argv[1:3]
batch = torch.load(source + "/batch.pt", weights_only=True)
model, found = auto.from_pretrained(source, trust_remote_code=True, output_loading_info=True)
assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
with torch.no_grad():
    first = model(**batch)[0]
    model.save_pretrained(target)
    again = auto.from_pretrained(target, trust_remote_code=True)
    assert torch.equal(again(**batch)[0], first)
torch.save(first, target + "/output.pt")
"""


def saved(model, directory, batch, **widths):
    compress(model, Compression(**widths or {"dk": 5}), calibration=None)
    make_standalone_(model)
    model.save_pretrained(directory)
    torch.save(batch, directory / "batch.pt")
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize(
    ("family", "head", "widths"),
    [
        ("bert", "classifier", {"dk": 5}),
        ("bert", "base", {"dv": 10}),
        ("albert", "base", {"dk": 5, "dv": 12}),
        ("distilbert", "classifier", {"dk": 5}),
        ("marian", "base", {"dk": 5, "dv": 12}),
    ],
)
def test_loads_and_saves_without_the_package(family, head, widths, make_tiny, batch, tmp_path, stock_python):
    model = make_tiny(family)
    if head == "classifier":
        model = AutoModelForSequenceClassification.from_config(model.config).eval()
    expected = saved(model, tmp_path / "one", batch, **widths)
    done = stock_python(WITHOUT_PACKAGE, tmp_path / "one", tmp_path / "two", head)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "two" / "output.pt", weights_only=True), expected)


ANOTHER_HEAD = """
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
for auto, head in ((AutoModelForSequenceClassification, True), (AutoModel, False)):
    model, found = auto.from_pretrained(
        sys.argv[1], num_labels=int(sys.argv[3]), trust_remote_code=True, output_loading_info=True)
    missing = {name.split(".")[0] for name in found["missing_keys"]}
    assert not found["mismatched_keys"] and not missing & {"encoder", "bert", "transformer"}, found
    model.save_pretrained(sys.argv[2])
    again = auto.from_pretrained(sys.argv[2], trust_remote_code=True)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert one.equal(other), name
    from_config = auto.from_config(AutoConfig.from_pretrained(sys.argv[1]), trust_remote_code=True)
    from_config.save_pretrained(sys.argv[2])
    dense = auto.from_pretrained(sys.argv[2], trust_remote_code=True)
    assert not hasattr(dense.config, "quantization_config")
    print(type(again).__name__)
"""


@pytest.mark.parametrize("head", ["base", "classifier"])
def test_it_can_get_another_head_without_the_package(head, make_tiny, batch, tmp_path, stock_python):
    model = make_tiny("bert")
    if head == "classifier":
        model = AutoModelForSequenceClassification.from_config(model.config)
    saved(model, tmp_path / "one", batch)
    done = stock_python(ANOTHER_HEAD, tmp_path / "one", tmp_path / "two", 2 if head == "classifier" else 5)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["BertForSequenceClassification", "BertModel"]


def test_every_auto_class_of_a_family_is_mapped(make_tiny):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    make_standalone_(model)
    auto_map = model.config.auto_map
    for name in ("MaskedLM", "QuestionAnswering", "TokenClassification", "MultipleChoice", "CausalLM", "PreTraining"):
        assert auto_map[f"AutoModelFor{name}"].startswith(f"{MODULE}.Bert")
    assert auto_map["AutoModel"] == f"{MODULE}.BertModel"


def test_references_to_other_code_are_dropped(make_tiny):
    model = make_tiny("bert")
    model.config.auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    compress(model, Compression(dk=5), calibration=None)
    make_standalone_(model)
    assert model.config.auto_map.keys() >= {"AutoModel", "AutoModelForMaskedLM"}
    assert all(code.startswith(f"{MODULE}.") for code in model.config.auto_map.values())


def test_the_package_loads_it_without_running_its_code(family, make_tiny, batch, tmp_path):
    expected = saved(make_tiny(family), tmp_path / "one", batch)
    (tmp_path / "one" / f"{MODULE}.py").write_text("raise SystemExit('this code must not run')", encoding="utf-8")
    loaded = AutoModel.from_pretrained(tmp_path / "one", trust_remote_code=False)
    with torch.no_grad():
        assert torch.equal(loaded(**batch)[0], expected)
    loaded.save_pretrained(tmp_path / "two")  # and brings the real code along again
    assert (tmp_path / "two" / f"{MODULE}.py").read_text(encoding="utf-8") == modelling_code()
    assert (tmp_path / "two" / "config.json").read_bytes() == (tmp_path / "one" / "config.json").read_bytes()


def test_the_code_stands_alone():
    tree = ast.parse(modelling_code())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.startswith("collab_compress") for name in names)


def test_a_stock_model_has_no_code_to_ship(make_tiny):
    with pytest.raises(CheckpointError, match="is not converted"):
        make_standalone_(make_tiny("bert"))


def test_a_model_rebuilt_by_the_shipped_code_is_told_from_ours(make_tiny):
    model = make_tiny("bert")
    model.config.quantization_config = type("Shipped", (), {"quant_method": "collab_compress", "edits": []})()
    for use in (read_factors, expand, lambda model: compress(model, Compression(dk=8), calibration=None)):
        with pytest.raises(CheckpointError, match="import it first, then load"):
            use(model)


def test_a_part_that_is_saved_by_itself_brings_its_code(make_tiny, tmp_path):
    model = AutoModelForSequenceClassification.from_config(make_tiny("bert").config)
    compress(model, Compression(dk=5), calibration=None)
    make_standalone_(model)
    model.bert.save_pretrained(tmp_path)
    assert (tmp_path / f"{MODULE}.py").read_text(encoding="utf-8") == modelling_code()
    assert model.bert.config.auto_map["AutoModel"] == f"{MODULE}.BertModel"
