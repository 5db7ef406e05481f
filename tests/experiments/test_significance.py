"""Significance of differences in BLEU: against a bootstrap in plain loops, and what it refuses."""

import json
import shutil

import numpy as np
import pytest
import sacrebleu
from collab_compress_cli import results as command
from tiny_recipes import make_record

from collab_compress.errors import RecipeError
from collab_compress.experiments.comparison import significance

WORDS = ["the", "a", "dog", "cat", "sat", "on", "mat", "runs", "over", "under", "red", "blue", "house", ".", ","]
SENTENCES = 8


@pytest.fixture
def runs(tmp_path):
    """Write runs of three methods with two seeds; one changes few words of the references, one many."""
    generator = np.random.default_rng(0)
    references = [" ".join(generator.choice(WORDS, size=9)) for _ in range(SENTENCES)]
    for seed in (0, 1):
        for method, changed in (("plain", 0.3), ("alike", 0.3), ("worse", 0.6)):
            written = [
                " ".join(
                    word if generator.random() > changed else str(generator.choice(WORDS)) for word in line.split()
                )
                for line in references
            ]
            folder = tmp_path / "runs" / method / f"seed{seed}" / "tuned"
            folder.mkdir(parents=True)
            recipe = {"model": "m", "translation": {"source": "en", "target": "de"}}
            record = make_record("multi30k", method, "tuned", seed, bleu(written, references), recipe=recipe)
            (folder / "result.json").write_text(json.dumps(record))
            (folder / "test.txt").write_text("".join(f"{line}\n" for line in written))
            (folder / "test.ref.txt").write_text("".join(f"{line}\n" for line in references))
    return tmp_path / "runs"


def bleu(written, references):
    return sacrebleu.corpus_bleu(written, [references]).score


def lines(folder, name):
    return (folder / "tuned" / name).read_text().splitlines()


def slowly(one, other, references):
    """Koehn's test with |difference| centred at its mean, each resample scored as a corpus of its own."""
    generator, differences = np.random.default_rng(12345), []
    for chosen in generator.choice(SENTENCES, size=(1000, SENTENCES)):
        ours, theirs, right = ([lines[place] for place in chosen] for lines in (one, other, references))
        differences.append(abs(bleu(ours, right) - bleu(theirs, right)))
    real = abs(bleu(one, references) - bleu(other, references))
    return (sum(difference - np.mean(differences) > real for difference in differences) + 1) / 1001


def test_against_a_bootstrap_in_plain_loops(runs):
    rows = significance(runs)
    assert [(row["method"], row["seed"]) for row in rows] == [
        (method, seed) for seed in (0, 1) for method in ("plain", "alike", "worse")
    ]
    for row in rows:
        folder = runs / row["method"] / f"seed{row['seed']}"
        written, references = lines(folder, "test.txt"), lines(folder, "test.ref.txt")
        assert row["score"] == pytest.approx(bleu(written, references))
        assert (row["task"], row["split"], row["reference"]) == ("multi30k en-de", "test", "plain/tuned")
        assert "seed:12345" in row["signature"]
        assert "bs:1000" in row["signature"]
        if row["method"] == "plain":
            assert row["p"] is row["difference"] is None
        elif (row["method"], row["seed"]) == ("alike", 0):
            base = lines(runs / "plain" / "seed0", "test.txt")
            assert row["difference"] == pytest.approx(bleu(written, references) - bleu(base, references))
            assert row["p"] == pytest.approx(slowly(written, base, references), abs=0.002)  # sums in single precision
    assert significance(runs) == rows
    assert {row["reference"] for row in significance(runs, "worse/tuned")} == {"worse/tuned"}


def test_a_folder_may_be_copied_elsewhere(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "copy")
    assert significance(tmp_path / "copy") == significance(runs)


def test_the_command_shows_it(runs, capsys):
    command.main([str(runs), "--significance"])
    printed = capsys.readouterr().out
    assert "95 % t-interval" in printed
    block = printed.partition("paired bootstrap")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")]
    assert rows[0] == ["model", "method", "stage", "task", "split", "seed", "BLEU", "difference", "p"]
    judged = significance(runs)
    assert [row[-3:] for row in rows[2:]] == [
        [
            f"{result['score']:.2f} ± {result['interval']:.2f}",
            "" if result["p"] is None else f"{result['difference']:+.2f}",
            "" if result["p"] is None else f"{result['p']:.3f}",
        ]
        for result in judged
    ]
    for wrong in ([str(runs), "--significance", "--format", "csv"], ["--papers", "--significance"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert "--significance compares the translations of one folder" in capsys.readouterr().err


def test_what_cannot_be_compared_is_told(runs, tmp_path):
    with pytest.raises(
        RecipeError, match=r"no translations of one model, task and seed by nobody/tuned and by anoth"
    ):
        significance(runs, "nobody/tuned")
    records = tmp_path / "records.jsonl"
    records.write_text("")
    with pytest.raises(RecipeError, match="needs the folder with the outputs themselves"):
        significance(records)
    folder = runs / "worse" / "seed1" / "tuned"
    predictions = (folder / "test.txt").read_text()
    (folder / "test.txt").write_text(predictions.replace("dog", "hog"))
    with pytest.raises(RecipeError, match=r"seed1/tuned was scored .*, and its translations are .* are not those"):
        significance(runs)
    (folder / "test.txt").write_text(predictions + "more\n")
    with pytest.raises(RecipeError, match=r"test\.txt has 9 lines, its references 8"):
        significance(runs)
    (folder / "test.txt").write_text(predictions)
    (folder / "test.ref.txt").write_text(predictions)
    with pytest.raises(RecipeError, match=r"has other references in test\.ref\.txt"):
        significance(runs)
    (folder / "test.ref.txt").unlink()
    with pytest.raises(RecipeError, match=r"cannot read the translations in .*test\.ref\.txt"):
        significance(runs)
    for path in runs.rglob("test.ref.txt"):
        path.unlink()
    with pytest.raises(RecipeError, match=r"no references beside its translations; write them to test\.ref\.txt"):
        significance(runs)
