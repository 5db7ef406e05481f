"""Measures of trained models in records, of finished runs too, against loops over rows and heads."""

import json
from statistics import mean

import pytest
import sacrebleu
import torch
from collab_compress_glue_runs.experiments import measures, read_recipe, run
from tiny_recipes import fresh_recipe, mrpc, trained
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import collab_compress  # noqa: F401  (lets from_pretrained rebuild converted models)
from collab_compress.analysis import (
    bhattacharyya,
    cka,
    discrepancy,
    head_covariances,
    mean_over_pairs,
    mixing_matrices,
    svcca,
)
from collab_compress.architectures import find_attention
from collab_compress.errors import RecipeError
from collab_compress.heads import HeadMask, alphas_of, confidence, head_importance

TUNING = "{epochs: 2, learning_rate: 1.0e-2, batch_size: 8, arguments: {disable_tqdm: true}}"
ALL = "measures=[svcca,cka,confidence,discrepancy,overlap,dominance,pruning,mixing,alphas]"


def near(values):
    """Return values as a record rounds them, for comparison."""
    return pytest.approx(torch.as_tensor(values, dtype=torch.float64).tolist(), rel=1e-4, abs=1e-5)


def without_each_head(model, score):
    """Map each module's path to the score without each of its heads."""
    with HeadMask(model) as mask:
        scores = {}
        for site in find_attention(model):
            for head in range(site.heads):
                ones = torch.ones(site.heads)
                ones[head] = 0
                mask.set({site.name: ones})
                scores.setdefault(site.name, []).append(score())
        return scores


@pytest.fixture
def translated(sentences, tmp_path):
    """Return the recipe of a collaborative model with mixed heads, trained and scored, and its record."""
    settings = ["task=parallel", f"data_dir={sentences}", "tuning.epochs=40", "tuning.learning_rate=1.0e-2"]
    settings += ["fresh.attention={dk: 12}", "fresh.layers=1", "heads.alphas={frozen_ratio: 0.5}"]
    settings += ["translation={source: aa, target: bb, beams: 3, max_length: 12}"]
    [record] = run(fresh_recipe(tmp_path / "out", *settings))
    return settings, record


def test_a_finished_run_is_measured_and_nothing_else(translated, sentences, tmp_path):
    settings, before = translated
    assert "measures" not in before
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    [record] = run(fresh_recipe(tmp_path / "out", *settings, ALL))
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    path = tmp_path / "out" / "tuned" / "result.json"
    assert {path for path in files if after[path] != files[path]} == {path}
    assert after.keys() == files.keys()
    measures, measured = record.pop("measures"), record.pop("measured")
    assert record == before
    assert measured["svcca"] == {"split": "validation", "rows": 5, "scored": 2}

    model, tokenizer = trained(tmp_path / "out" / "tuned", AutoModelForSeq2SeqLM)
    sources, targets = (
        (sentences / "parallel" / f"valid.{language}").read_text().splitlines() for language in ("aa", "bb")
    )
    options = {"return_tensors": "pt", "return_token_type_ids": False, "truncation": True, "max_length": 24}
    texts = [tokenizer(source, **options) for source in sources]
    labels = [tokenizer(text_target=target, **options)["input_ids"] for target in targets]
    batches = [{**text, "labels": label} for text, label in zip(texts, labels, strict=True)]  # a row at a time

    def of(values):
        """Group values by kind of attention."""
        kinds = {site.name: site.kind for site in find_attention(model)}
        return {kind: [values[name] for name in kinds if kinds[name] == kind] for kind in set(kinds.values())}

    for kind, layers in of(head_covariances(model, batches)).items():
        assert measures["svcca"]["layers"][kind] == near([svcca(layer).mean for layer in layers])
        assert measures["svcca"]["curve"][kind] == near(svcca(layers[-1]).curve)
        assert measures["cka"]["layers"][kind] == near([mean_over_pairs(cka(layer)) for layer in layers])
    right = of(confidence(model, batches, exclude=[tokenizer.eos_token_id]))
    assert measures["confidence"] == {kind: [near(heads) for heads in layers] for kind, layers in right.items()}
    for kind, layers in of(discrepancy(model, batches)).items():
        for layer, norms in zip(layers, measures["discrepancy"][kind], strict=True):
            assert norms == {name: near(getattr(layer, name).sum()) for name in ("cosine", "difference", "l2")}
    for kind, layers in of(bhattacharyya(model, batches)).items():
        assert measures["overlap"][kind] == near([mean_over_pairs(pairs) for pairs in layers])
    for name, right in (("mixing", mixing_matrices(model)), ("alphas", alphas_of(model))):
        for kind, layers in of(right).items():
            torch.testing.assert_close(
                torch.tensor(measures[name][kind]), torch.stack(layers).float(), rtol=1e-3, atol=0
            )

    drawn = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    scoring, choosing = drawn[:2], drawn[2:]

    def bleu(rows):
        written = [model.generate(**texts[row], num_beams=1, max_length=12)[0] for row in rows]
        lines = [tokenizer.decode(line, skip_special_tokens=True) for line in written]
        return sacrebleu.corpus_bleu(lines, [[targets[row] for row in rows]]).score

    assert measures["dominance"]["score"] == near(bleu(scoring))
    chosen, scores = (without_each_head(model, lambda rows=rows: bleu(rows)) for rows in (choosing, scoring))
    assert len({score for parts in scores.values() for score in parts}) > 3
    without = {name: scores[name][parts.index(min(parts))] for name, parts in chosen.items()}
    for kind, layers in of(without).items():
        assert measures["dominance"][kind] == near(mean(layers))
    importance = head_importance(model, [batches[row] for row in choosing])
    order = sorted(
        (float(value), name, head) for name, heads in importance.items() for head, value in enumerate(heads)
    )

    def bleu_without(order, share):
        masks = {site.name: torch.ones(site.heads) for site in find_attention(model)}
        for _, name, head in order[: round(share * len(order))]:
            masks[name][head] = 0
        with HeadMask(model, masks):
            return bleu(scoring)

    assert measures["pruning"]["shares"] == [step / 8 for step in range(9)]
    for place in (0, 4, 8):
        share = measures["pruning"]["shares"][place]
        assert measures["pruning"]["scores"][place] == near(bleu_without(order, share))


def test_perplexity_without_the_dominant_head(text, tmp_path, perplexity_by_token, monkeypatch):
    """The dominant head is the one without which perplexity is highest, over all sequences."""
    indices = measures.Subject.indices
    monkeypatch.setattr(measures.Subject, "indices", lambda subject, *_: indices(subject))
    settings = ("task=text", f"data_dir={text}", "fresh.tokenizer=word", "fresh.vocab_size=null", "max_length=7")
    settings += ("measures=[dominance,alphas,mixing]",)
    [record] = run(fresh_recipe(tmp_path / "out", *settings))
    assert record["measures"].keys() == {"dominance"}  # the model has no others
    model, tokenizer = trained(tmp_path / "out" / "tuned", AutoModelForCausalLM)
    valid = text / "text" / "valid.txt"

    def perplexity():
        return perplexity_by_token(model, tokenizer, valid, 6)

    right = {"score": perplexity(), "decoder": mean(map(max, without_each_head(model, perplexity).values()))}
    assert record["measures"]["dominance"] == pytest.approx(right, rel=1e-5)
    assert record["score"] != right["score"]  # that is of the test data


def test_stages_of_a_conversion_and_what_an_interrupt_leaves(start, data_dir, tmp_path, monkeypatch):
    conversion = ("compression={dk: 12}", "calibration_options={sequences: 8}")
    settings = mrpc(start, data_dir, tmp_path / "out", f"tuning={TUNING}", *conversion, f"again={TUNING}")
    taken, table = [], dict(measures.MEASURES)

    def counted(name):
        def measure(subject):
            taken.append(name)
            if len(taken) == 2:
                raise KeyboardInterrupt
            return table[name](subject)

        return measure

    for name in ("cka", "dominance", "mixing"):
        monkeypatch.setitem(measures.MEASURES, name, counted(name))
    wanted = read_recipe(overrides=[*settings, "measures=[cka,dominance,mixing]"])
    with pytest.raises(KeyboardInterrupt):
        run(wanted)
    assert json.loads((tmp_path / "out" / "tuned" / "result.json").read_text())["measures"].keys() == {"cka"}
    tuned, converted, again = run(wanted)
    assert taken == ["cka", "dominance", *["dominance", "mixing"], *["cka", "dominance", "mixing"] * 2]
    assert tuned["measures"].keys() == {"cka", "dominance"}
    assert "mixing" in tuned["measured"]  # dense heads have none, and are not asked again
    for record in (converted, again):
        assert record["measures"].keys() == {"cka", "dominance", "mixing"}
        assert torch.tensor(record["measures"]["mixing"]["encoder"]).shape == (2, 3, 12)
    values = tuned["metrics"]["validation"]
    assert tuned["measures"]["dominance"]["score"] == near(50 * (values["accuracy"] + values["f1"]))
    report = json.loads((tmp_path / "out" / "dk12" / "report.json").read_text())
    assert converted["error"] == pytest.approx(mean(module["data_error"] for module in report["parts"]))
    assert 0 < converted["seconds"] == report["seconds"]
    assert again["seconds"] > 0
    assert "error" not in again
    assert run(wanted) == [tuned, converted, again]
    assert len(taken) == 10
    with pytest.raises(RecipeError, match="unknown measure 'svca'; expected some of svcca, cka, confidence"):
        run(read_recipe(overrides=[*settings, "measures=[svca]"]))
