"""RESULTS.md and its plots are what the records make."""

import re

import matplotlib
from quantities import read_records, tabulate
from results_page import PAGE, STYLE, forest, generate, scores
from verdicts import evaluate_claims

CLAIM = {"says": "Heads are better.", "source": "Table 1", "tasks": ["ptb"], "method": "drophead", "than": "plain"}


def test_results_are_what_the_records_make(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["results_page.py"])
    text = PAGE.read_text(encoding="utf-8")
    with matplotlib.rc_context(STYLE):
        made, plots = generate(text, tabulate(read_records()))
        for path, plot in plots.items():
            plot.savefig(tmp_path / path.name)
    assert made == text
    assert set((PAGE.parent / "images").iterdir()) == set(plots)
    for path in plots:  # by their texts: paths depend on Matplotlib's version
        svgs = (file.read_text(encoding="utf-8") for file in (path, tmp_path / path.name))
        shown, drawn = (re.findall("<text.*?>(.*?)</text>", svg) for svg in svgs)
        assert len(drawn) > 5
        assert shown == drawn


def test_the_text_of_results_is_short():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.partition("## Appendix")[0].split()) <= 2500


def test_scores_are_means_over_seeds_and_the_average_is_over_tasks_first(read, write):
    write("plain", [80.0, 82.0])
    write("drophead", [1.0], model="other")
    records = read(write("plain", [60.0, 70.0], task="rte"))
    header, _, row = scores('{"model": "minilm", "tasks": ["mrpc", "rte"]}', records).splitlines()
    assert header.split() == ["|", "method", "|", "mrpc", "|", "rte", "|", "average", "|", "seeds", "|"]
    assert "81.00 ± 1.41 | 65.00 ± 7.07 | 73.00 ± 4.24 |     2 |" in row


def test_a_forest_plot_has_the_claimed_side_to_the_right(read, write):
    write("plain", [80.0, 82.0, 81.0, 83.1, 80.2], task="ptb")
    path = write("drophead", [79.0, 80.8, 80.0, 82.1, 79.2], task="ptb")  # lower perplexity is better
    figure = forest(evaluate_claims([CLAIM], read(path)))
    (mark,) = figure.axes[0].containers
    assert mark.lines[0].get_xdata() > 0
