"""The card that is written beside an edited model."""

import pytest
from collab_compress_cli.card import loading_lines, model_card
from huggingface_hub import ModelCard
from transformers import BertForSequenceClassification

from collab_compress import Compression, Solver, compress, mix_heads_

pytestmark = pytest.mark.usefixtures("few_texts")


def test_card_names_model_and_source(make_tiny, calibration):
    model, compression = make_tiny("bert", BertForSequenceClassification), Compression(dk=8, solver=Solver(seed=3))
    report = compress(model, compression, calibration)
    card = model_card(model, "small-dk8", "org/small", compression, "texts", report)
    data = ModelCard(str(card)).data.to_dict()
    assert data == {"library_name": "transformers", "tags": ["collab_compress", "collaborative-attention"]}
    before, after = report.parameters_before, report.parameters_after
    assert report.refits
    for part in (
        "Values are the source's own.",
        "# small-dk8",
        "`BertForSequenceClassification` with shared attention, made from `org/small`",
        "\n".join(loading_lines(model, "small-dk8")),
        "of 2 attention modules",
        "into a shared query/key space of R = 8 with heads 8 wide (solver `als`, damping 0.001, seed 3",
        "calibrated on texts",
        f"| parameters | {before:,} → {after:,} |",
        f"| agreement with the source on held-back sequences | {report.agreement.finding} |",
    ):
        assert part in card.content


@pytest.mark.parametrize("dk", [None, 8])
def test_card_describes_narrow_values(dk, make_tiny, calibration, tmp_path):
    model = make_tiny("bert")
    compression = Compression(dk=dk, dv=9, solver=Solver(damping=0.01))
    report = compress(model, compression, calibration)
    card = model_card(model, "narrow", "small", compression, "texts", report).content
    words = "shared attention and narrow values" if dk else "narrow values"
    error = sum(module.data_error for module in report.of("dv")) / 2
    for part in (
        f"`BertModel` with {words}, made from `small`",
        f"import collab_compress  # lets Transformers rebuild the {words}",
        "Values of 2 attention modules were narrowed to dv = 9 channels",
        "damping 0.01, seed 0, calibrated on texts",
        "| value/output parameters | 2,352 → 882 |",
        f"| relative error of what heads add, mean over modules | {error:.4f} |",
    ):
        assert part in card
    assert ("Queries and keys are the source's own." in card) == (dk is None)
    assert ("query/key parameters" in card) == ("R = 8" in card) == (dk is not None)
    assert "R = None" not in card
    assert "Values and outputs are the source's own" not in card
    loading = "\n".join(loading_lines(model, tmp_path / "saved"))
    model.save_pretrained(tmp_path / "saved")
    scope = {}
    exec(loading, scope)
    assert scope["model"].num_parameters() == model.num_parameters()


def test_card_of_chosen_widths_says_so(make_tiny, calibration):
    model = make_tiny("bert")
    report = compress(model, Compression(keep=0.6, solver=Solver(sweeps=9)), calibration)
    card = model_card(model, "half", "small", report.compression, "texts", report).content
    assert f"Widths were chosen by `--keep`. {report.choice}" in card
    assert f"feed-forward blocks keep {report.of('dff')[0].width} neurons each" in card
    stock = make_tiny("bert")
    assert model_card(stock, "half", "small", report.compression, "texts", report).data.tags == ["collab_compress"]


def test_mixed_heads_of_a_sentence_transformer(make_tiny):
    model = make_tiny("bert")
    mix_heads_(model)
    card = model_card(model, "mixed", "mine", loaded_by="SentenceTransformer")
    assert card.data.library_name == "sentence-transformers"
    assert 'SentenceTransformer("mixed")' in card.content
    assert "the mixture is the identity until it is trained" in card.content
    assert "Figures" not in card.content
