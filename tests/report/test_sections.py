"""Sections say what the measures say, on the batches that they name."""

import copy
import math
from statistics import mean

import pytest
import torch
from tiny_words import word_tokenizer

from collab_compress import Compression, Solver, alphas_of, compress, mix_heads_
from collab_compress.analysis import (
    attention_maps,
    average_distance,
    bhattacharyya,
    cka,
    confidence,
    discrepancy,
    dominant_heads,
    head_covariances,
    head_patterns,
    induction,
    mean_over_pairs,
    mixing_matrices,
    model_covariances,
    part_costs,
    pruning_curve,
    random_importance,
    split_sequences,
    svcca,
)
from collab_compress.analysis.plan import part_losses
from collab_compress.conversion.inventory import Inventory, find_feed_forward
from collab_compress.heads import head_importance
from collab_compress.options import SECTION_NAMES, ReportOptions
from collab_compress.report import TaskScore, make_report
from collab_compress.report.result import take_sequences
from collab_compress.report.section import short

END = [3]  # the tokenizer's, which the config does not name


def rows(result, section, table):
    return [list(row.values()) for row in result.sections[section].tables[table].rows]


def picture(section, title):
    (match,) = [candidate for candidate in section.pictures if candidate.title == title]
    return match


def close(actual, expected):
    """Compare within the rounding of two float32 passes in different batches."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(actual, dtype=torch.float64), expected, rtol=1e-5, atol=1e-6)


def matrices(picture, expected):
    for matrix, values in zip(picture.maps.values(), expected, strict=True):
        close(matrix, values)


def stacked(vectors):
    return [torch.stack([*vectors.values()])]


def test_every_section_was_tried(result):
    assert [*result.sections] == [name for name in SECTION_NAMES if name != "mixing"]
    assert [*result.omitted] == ["mixing"]


def test_widths(model, batches, result):
    widths = result.sections["widths"]
    expected, _ = part_losses(Inventory(model, batches[0]), take_sequences(batches, 8))
    assert [*widths.tables] == ["dk", "dv", "dff"]
    for place, (part, curves) in enumerate(expected.items()):
        drawn = picture(widths, f"What {part} loses").curves
        for row, (_, points), (name, losses) in zip(rows(result, "widths", part), drawn, curves.items(), strict=True):
            dense = len(losses) - 1
            assert row[1:3] == [name, dense]
            close(row[3:], [100 * losses[math.ceil(share * dense)] for share in (3 / 4, 1 / 2, 3 / 8, 1 / 4)])
            close(points, list(enumerate((100 * losses).tolist())))
        half = [100 * float(losses[math.ceil((len(losses) - 1) / 2)]) for losses in curves.values()]
        line = widths.highlights[place]
        assert f"Half of {part} loses {short(mean(half))} % of" in line
        assert f" {short(max(half))} % in layer {half.index(max(half))}." in line


def test_similarity(model, other, batches, result):
    similarity, heads = result.sections["similarity"], head_covariances(model, batches)
    matrices(picture(similarity, "SVCCA of heads"), [svcca(joint).similarity for joint in heads.values()])
    matrices(picture(similarity, "CKA of heads"), [cka(joint) for joint in heads.values()])
    for row, joint in zip(rows(result, "similarity", "heads"), heads.values(), strict=True):
        close(row[1:3], [svcca(joint).mean, mean_over_pairs(cka(joint))])
    joints = model_covariances(model, other, batches).values()
    matrices(picture(similarity, "CKA of heads, model against baseline"), [cka(joint) for joint in joints])
    for row, joint in zip(rows(result, "similarity", "models"), joints, strict=True):
        close(row[1:3], [svcca(joint.layers).mean, float(cka(joint.layers))])
        close(row[4:], [svcca(joint).similarity.mean(), cka(joint).mean()])


def test_diversity(model, other, batches, result):
    diversity, numbers = result.sections["diversity"], iter(rows(result, "diversity", "layers"))
    for name, network in (("<tiny> & small", model), ("other", other)):
        sure, apart = confidence(network, batches, exclude=END), discrepancy(network, batches)
        shared, far = bhattacharyya(network, batches), average_distance(network, batches, exclude=())
        matrices(picture(diversity, f"Confidence of each head of {name}"), stacked(sure))
        matrices(picture(diversity, f"AVG_L2 of each head of {name}"), stacked(far))
        for layer, module in enumerate(apart):
            row = next(numbers)
            norms = [apart[module].norm(measure) for measure in ("l2", "cosine", "difference")]
            assert row[:2] == [name, str(layer)]
            expected = [sure[module].mean(), sure[module].max(), far[module].mean(), *norms]
            close(row[2:], [*expected, mean_over_pairs(shared[module])])


def test_patterns(model, batches, result):
    patterns, expected = result.sections["patterns"], head_patterns(model, batches)
    titles = ["Entropy of attention", "Distance of attention", "Attention to the previous token"]
    for title, name in zip(titles, expected, strict=False):
        matrices(picture(patterns, title), stacked(expected[name]))
    for place, row in enumerate(rows(result, "patterns", "patterns")):
        close(row[1:], [[*column.values()][place].mean() for column in expected.values()])
    assert "Induction" not in [drawing.title for drawing in patterns.pictures]  # 48 tokens do not fit
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 64
    longer = type(model)(config).eval()
    report = make_report(longer, batches, ["patterns"])
    matrices(picture(report.sections["patterns"], "Induction"), stacked(induction(longer)))


def test_attention_maps(model, result):
    section = result.sections["attention_maps"]
    maps = attention_maps(model, word_tokenizer(), "the red cat runs")
    heads = [head for map_ in maps.values() for head in map_.weights.unbind()]
    matrices(picture(section, "Every head's attention"), heads)
    assert "“the red cat runs”, read as <s> <unk> red cat runs </s>, in 2 of 2 modules" in section.reading


def test_dominance_by_output_error(model, batches, result):
    dominance = result.sections["dominance"]
    choosing, scoring = split_sequences(take_sequences(batches, 6))
    chosen, scored = (dominant_heads(model, batches=half) for half in (choosing, scoring))
    matrices(picture(dominance, "What is lost without each head"), stacked(scored.changes))
    change = short(scored.mean_change(chosen.dominant)["encoder"])
    assert f"changes the output error by {change} (encoder)" in dominance.highlights[0]
    draws = [pruning_curve(model, random_importance(model, seed=seed), batches=scoring) for seed in range(3)]
    points = pruning_curve(model, chosen.changes, batches=scoring)
    pruning = rows(result, "dominance", "pruning")
    close([row[2] for row in pruning], [point.score for point in points])
    close([row[3] for row in pruning], [mean(point.score for point in drawn) for drawn in zip(*draws, strict=True)])
    assert "half of 6 sequences" in dominance.reading


def test_dominance_by_score(model, batches):
    class Lossy(type(model)):
        def forward(self, labels=None, **batch):
            output = super().forward(**batch)
            output["loss"] = None if labels is None else output.last_hidden_state.abs().mean()
            return output

    def score(model):
        with torch.no_grad():
            return float(model(**batches[0]).last_hidden_state.square()[:, 0].sum())

    lossy = Lossy(model.config).eval()
    lossy.load_state_dict(model.state_dict())
    labelled = [{**batch, "labels": torch.zeros(len(batch["input_ids"]))} for batch in take_sequences(batches, 4)]
    report = make_report(lossy, batches, ["dominance"], score=TaskScore("size", score, score, labelled))
    lost = -torch.stack([*dominant_heads(lossy, score).changes.values()])
    drawing = picture(report.sections["dominance"], "What is lost without each head")
    matrices(drawing, [lost])
    assert (drawing.high, drawing.diverging) == (pytest.approx(float(lost.abs().max())), bool((lost < 0).any()))
    points = pruning_curve(lossy, head_importance(lossy, labelled), score)
    close([row["size"] for row in report.sections["dominance"].tables["pruning"].rows], [p.score for p in points])


def test_cost(model, batches, result):
    """Width 24, two layers, 128 tokens; the blocks of a dense model are counted at half of their width."""
    blocks, costs = find_feed_forward(model, batches[0]), part_costs(model, dk=6)[::2]
    half, numbers = blocks[0].width // 2, rows(result, "cost", "modules")
    for row, cost in zip(numbers[:2], costs, strict=True):
        assert row[3:6] == [6, cost.macs_before / 1e6, cost.macs_after / 1e6]
        assert row[6:8] == [cost.parameters_before, cost.parameters_after]
    for row, block in zip(numbers[4:], blocks, strict=True):
        assert row[2:4] == [block.down, half]
        assert row[4:6] == [128 * 2 * 24 * neurons / 1e6 for neurons in (block.width, half)]
        assert row[6:8] == [2 * 24 * neurons + neurons + 24 for neurons in (block.width, half)]
    scores = [2 * macs / 1e6 for macs in (costs[0].macs_before, costs[0].macs_after)]
    values = 2 * (2 * 128 * 24 * 24 + 128 * 128 * 24) / 1e6
    dense_blocks, narrow_blocks = (2 * 128 * 2 * 24 * neurons / 1e6 for neurons in (blocks[0].width, half))
    expected = [scores, [values, values], [dense_blocks, narrow_blocks]]
    close([row[1:3] for row in rows(result, "cost", "layers")], expected)
    total = scores[0] + values + dense_blocks
    shares, kept, _ = result.sections["cost"].highlights
    assert shares.endswith(f"feed-forward blocks {100 * dense_blocks / total:.0f} %.")
    assert f"have {100 * (scores[1] + values + narrow_blocks) / total:.0f} % of the operations" in kept
    latency = result.sections["cost"].tables["latency"].rows
    assert [row["length"] for row in latency] == [4, 4, 8, 8]  # 500 is beyond the positions
    assert all(row["dense_ms"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in latency)
    wider = make_report(model, batches, ["cost"], options=ReportOptions(dff=half + 1, lengths=(4,), rounds=2))
    assert {row[3] for row in rows(wider, "cost", "modules")[4:]} == {half + 1}


def test_mixing(bert, batches):
    model = bert()
    compress(model, Compression(dk=6, solver=Solver(sweeps=2)), calibration=None)
    mix_heads_(model)
    for layer, alphas in enumerate(alphas_of(model).values()):
        with torch.no_grad():
            alphas += torch.randn(3, 3, generator=torch.Generator().manual_seed(layer))
    mixing = make_report(model, batches, ["mixing"]).sections["mixing"]
    matrices(picture(mixing, "Mixing matrices"), mixing_matrices(model, order=True).values())
    matrices(picture(mixing, "Alphas"), [matrix.detach() for matrix in alphas_of(model).values()])
    users = []
    for matrix in mixing_matrices(model).values():
        users += [mean(float((column**2).sum() ** 2 / (column**4).sum()) for column in matrix.T if column.any())]
    assert mixing.highlights == [f"A shared component serves {mean(users):.1f} of 3 heads on average."]
