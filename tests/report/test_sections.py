"""Sections say what the measures say, on the batches that they name."""

import copy
import math
from statistics import mean

import pytest
import torch

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
    head_samples,
    induction,
    layer_covariance,
    mean_over_pairs,
    mixing_matrices,
    model_covariances,
    module_costs,
    percent_growth,
    pruning_curve,
    random_importance,
    sample_cka,
    split_sequences,
    svcca,
)
from collab_compress.analysis.plan import part_losses
from collab_compress.heads import head_importance
from collab_compress.report import ReportContext, ReportOptions, TaskScore, make_report
from collab_compress.report.section import short
from collab_compress.report.sections import SECTIONS

END = [3]  # the tokenizer's, which the config does not name


@pytest.fixture(scope="module")
def section(result):
    named = {part.name: part for part in result.sections}
    return named.__getitem__


def table(section, name):
    (match,) = [candidate for candidate in section.tables if candidate.name == name]
    return match


def picture(section, title):
    (match,) = [candidate for candidate in section.pictures if candidate.title == title]
    return match


def close(actual, expected):
    """Compare within the rounding of two float32 passes in different batches."""
    assert list(actual) == pytest.approx(torch.as_tensor(expected).double().tolist(), rel=1e-5, abs=1e-6)


def matrices(picture, expected):
    for heat, matrix in zip(picture.maps, expected, strict=True):
        assert [len(row) for row in heat.values] == [matrix.shape[1]] * matrix.shape[0]
        close([value for row in heat.values for value in row], matrix.flatten())


def test_widths(context, section):
    widths, parts = section("widths"), part_losses(context.model, context.first(8))
    assert [table.name for table in widths.tables] == ["dk", "dv", "dff"]
    for place, (part, curves) in enumerate(parts.losses.items()):
        drawn = picture(widths, f"What {part} loses").panels[0].curves
        for row, curve, (name, losses) in zip(table(widths, part).rows, drawn, curves.items(), strict=True):
            dense = len(losses) - 1
            assert row[:3] == (context.label(name), name, dense)
            close(row[3:], [100 * losses[math.ceil(share * dense)] for share in (3 / 4, 1 / 2, 3 / 8, 1 / 4)])
            assert list(curve.x) == list(range(dense + 1))
            close(curve.y, 100 * losses)
        half = {name: 100 * float(losses[math.ceil((len(losses) - 1) / 2)]) for name, losses in curves.items()}
        assert f"Half of {part} loses {short(mean(half.values()))} % of" in widths.highlights[place]
        assert (
            f" {short(max(half.values()))} % in layer {context.label(max(half, key=half.get))} ("
            in widths.highlights[place]
        )


def test_similarity_of_heads_and_layers(context, section):
    similarity, heads = section("similarity"), head_covariances(context.model, context.batches)
    samples = head_samples(context.model, context.batches, 30)
    matrices(picture(similarity, "SVCCA of heads"), [svcca(joint).similarity for joint in heads.values()])
    matrices(picture(similarity, "CKA of heads"), [cka(joint) for joint in heads.values()])
    layers = layer_covariance(context.model, context.batches)
    matrices(picture(similarity, "Similarity of layers"), [svcca(layers).similarity, cka(layers)])
    for row, (name, joint) in zip(table(similarity, "heads").rows, heads.items(), strict=True):
        unbiased = sample_cka(samples[name])
        close(row[1:4], [mean_over_pairs(matrix) for matrix in (svcca(joint).similarity, cka(joint), unbiased)])
    curve = picture(similarity, "SVCCA coefficients").panels[0].curves[1]
    close(curve.y, svcca(list(heads.values())[1]).curve)


def test_similarity_of_models(context, section):
    similarity = section("similarity")
    by_head = model_covariances(context.model, context.baseline, context.batches)
    joints = model_covariances(context.model, context.baseline, context.batches, unit="layer")
    matrices(
        picture(similarity, "CKA of heads, <tiny> & small against other"),
        [cka(matrix) for matrix in by_head.values()],
    )
    for row, joint in zip(table(similarity, "models").rows, joints.values(), strict=True):
        close(row[1:3], [svcca(joint).mean, float(cka(joint))])
    for row, joint in zip(table(similarity, "models").rows, by_head.values(), strict=True):
        close(row[4:], [svcca(joint).similarity.mean(), cka(joint).mean()])


def test_diversity(context, section):
    diversity, model, batches = section("diversity"), context.model, context.batches
    sure, apart, shared = (
        confidence(model, batches, exclude=END),
        discrepancy(model, batches),
        bhattacharyya(model, batches),
    )
    far = average_distance(model, batches, exclude=())
    for row, name in zip(table(diversity, "layers").rows, apart, strict=True):
        norms = [apart[name].norm(measure) for measure in ("l2", "cosine", "difference")]
        close(
            [row[1], row[2], *row[4:]],
            [sure[name].mean(), sure[name].max(), far[name].mean(), *norms, mean_over_pairs(shared[name])],
        )
    matrices(
        picture(diversity, "AVG_L2 of each head"),
        [
            torch.stack([*average_distance(network, batches, exclude=()).values()])
            for network in (model, context.baseline)
        ],
    )
    matrices(
        picture(diversity, "Confidence of each head"),
        [torch.stack([*confidence(network, batches, exclude=END).values()]) for network in (model, context.baseline)],
    )
    growth = table(diversity, "growth")
    before = discrepancy(context.baseline, batches)
    for column, measure in ((1, "difference"), (2, "l2"), (3, "cosine")):
        growths = [percent_growth(apart[name].norm(measure), before[name].norm(measure)) for name in before]
        close([row[column] for row in growth.rows], growths)


def test_patterns(context, section):
    patterns, expected = section("patterns"), head_patterns(context.model, context.batches)
    titles = ["Entropy of attention", "Distance of attention", "Attention to the previous token"]
    for title, name in zip(titles, expected, strict=False):
        matrices(picture(patterns, title), [torch.stack([*expected[name].values()])])
    for place, row in enumerate(table(patterns, "patterns").rows):
        close(row[1:], [[*column.values()][place].mean() for column in expected.values()])


def test_induction_is_shown_where_a_repeated_sequence_fits(context, section):
    assert "Induction" not in [drawing.title for drawing in section("patterns").pictures]  # 48 tokens do not fit
    config = copy.deepcopy(context.model.config)
    config.max_position_embeddings = 64
    model = type(context.model)(config).eval()
    report = make_report(ReportContext(model, context.batches), ["patterns"])
    matrices(picture(report.sections[0], "Induction"), [torch.stack([*induction(model).values()])])


def test_attention_maps(context, section):
    attention = section("attention_maps")
    maps = attention_maps(context.model, context.tokenizer, context.sentence)
    matrices(
        picture(attention, "Every head's attention"),
        [head for map_ in maps.values() for head in map_.weights.unbind()],
    )
    first = picture(attention, "One word's attention").maps[0]
    assert first.columns == ("<s>", "<unk>", "red", "cat", "runs", "</s>")
    matrices(picture(attention, "One word's attention"), [map_.of("runs") for map_ in maps.values()])


def test_dominance_by_drift(context, section):
    dominance = section("dominance")
    choosing, scoring = split_sequences(context.first(6))
    chosen, zeros = (dominant_heads(context.model, batches=batches) for batches in (choosing, scoring))
    means = dominant_heads(context.model, batches=scoring, ablation="mean", reference=choosing)
    drawing = picture(dominance, "What is lost without each head")
    assert [drawn.title for drawn in drawing.maps] == ["zeros", "mean output"]
    matrices(drawing, [torch.stack([*scored.changes.values()]) for scored in (zeros, means)])
    heads = table(dominance, "dominant")
    assert [column["name"] for column in heads.columns[3:]] == [
        f"without {which}: {output}" for which in ("it", "another") for output in ("zeros", "mean output")
    ]
    for name, row in zip(chosen.dominant, heads.rows, strict=True):
        head = chosen.dominant[name]
        changes = [scored.changes[name].tolist() for scored in (zeros, means)]
        others = [[change for place, change in enumerate(of_layer) if place != head] for of_layer in changes]
        assert row[2] == head
        close(row[3:], [*(of_layer[head] for of_layer in changes), *map(mean, others)])
    [kind] = table(dominance, "kinds").rows
    close(kind[1:], [scored.mean_change(chosen.dominant)["encoder"] for scored in (zeros, means)])
    draws = [
        pruning_curve(context.model, random_importance(context.model, seed=seed), batches=scoring)
        for seed in range(3)
    ]
    random = [sum(point.score for point in points) / 3 for points in zip(*draws, strict=True)]
    close([row[3] for row in table(dominance, "pruning").rows], random)
    points = pruning_curve(context.model, chosen.changes, batches=scoring)
    close([row[2] for row in table(dominance, "pruning").rows], [point.score for point in points])
    assert "6 sequences" in dominance.reading


@pytest.fixture
def lossy(context):
    """Return the context's model with a loss, and labelled batches for it."""

    class Lossy(type(context.model)):
        def forward(self, labels=None, **batch):
            output = super().forward(**batch)
            output["loss"] = None if labels is None else output.last_hidden_state.abs().mean()
            return output

    model = Lossy(context.model.config).eval()
    model.load_state_dict(context.model.state_dict())
    return model, [{**batch, "labels": torch.zeros(len(batch["input_ids"]))} for batch in context.first(4)]


def test_dominance_by_score(context, lossy):
    def score(model):
        with torch.no_grad():
            return float(model(**context.batches[0]).last_hidden_state.square()[:, 0].sum())

    model, labelled = lossy
    task = TaskScore("size", score, score, labelled)
    report = make_report(
        ReportContext(model, context.batches, score=task, options=context.options), ["dominance"]
    ).sections[0]
    expected = dominant_heads(model, score), dominant_heads(model, score, ablation="mean", reference=labelled)
    lost = [-torch.stack([*scored.changes.values()]) for scored in expected]
    drawing = picture(report, "What is lost without each head")
    matrices(drawing, lost)
    lost = torch.cat(lost)
    assert (drawing.high, drawing.diverging) == (pytest.approx(float(lost.abs().max())), bool((lost < 0).any()))
    points = pruning_curve(model, head_importance(model, labelled), score)
    close([row[2] for row in table(report, "pruning").rows], [point.score for point in points])
    assert picture(report, "Pruning curve").y_label == "size"


def test_cost(context, section):
    cost_section = section("cost")
    for row, cost in zip(table(cost_section, "modules").rows, module_costs(context.model, dk=6), strict=True):
        dense, converted = cost.scores.dense, cost.scores.converted
        numbers = (dense.parameters, converted.parameters, dense.macs / 1e6, converted.macs / 1e6)
        assert row[2:7] == (6, *numbers)
    assert [row[1] for row in table(cost_section, "latency").rows] == [4, 4, 8, 8]  # 500 is beyond the positions
    assert all(row[2] > 0 and row[5] <= row[4] <= row[6] for row in table(cost_section, "latency").rows)
    macs = picture(cost_section, "Operations over length").panels[0].curves[0]
    assert macs.y[3] == sum(cost.scores.dense.macs for cost in module_costs(context.model, 128)) / 1e6


def test_cost_of_whole_layers(context, section):
    """Width 24, two layers; the blocks of a dense model are counted at half of their width."""
    cost_section, (block, _) = section("cost"), context.blocks
    half = block.width // 2
    for place, row in enumerate(table(cost_section, "blocks").rows):
        assert row[:3] == (str(place), context.blocks[place].down, half)
        assert row[3:5] == tuple(2 * 24 * neurons + neurons + 24 for neurons in (block.width, half))
        assert row[5:] == tuple(128 * 2 * 24 * neurons / 1e6 for neurons in (block.width, half))
    rows = {row[0]: row[1:] for row in table(cost_section, "layers").rows}
    assert list(rows) == ["queries and keys", "values and outputs", "feed-forward blocks"]
    costs = module_costs(context.model, 128, dk=6)
    scores = [(cost.scores.dense.macs, cost.scores.converted.macs) for cost in costs]
    attention = [2 * sum(pair) / 2e6 for pair in zip(*scores, strict=True)]
    values = 2 * (2 * 128 * 24 * 24 + 128 * 128 * 24) / 1e6
    blocks = [2 * 128 * 2 * 24 * neurons / 1e6 for neurons in (block.width, half)]
    total = attention[0] + values + blocks[0]
    for name, (dense, converted) in zip(rows, (attention, (values, values), blocks), strict=True):
        close([rows[name][2], rows[name][3], rows[name][4]], [dense, 100 * dense / total, converted])
    share_left = 100 * (attention[1] + values + blocks[1]) / total
    share = f"feed-forward blocks {100 * blocks[0] / total:.0f} %; the converted form has {share_left:.0f} % of them."
    assert cost_section.highlights[0].endswith(share)
    macs = picture(cost_section, "Operations over length").panels[-1]
    assert (macs.title, macs.curves[1].y[3]) == ("feed-forward blocks", blocks[1])
    wider = ReportContext(
        context.model, context.batches, options=ReportOptions(dk=6, dff=block.width - 1, lengths=(4,), rounds=2)
    )
    assert {row["dff"] for row in make_report(wider, ["cost"]).table("cost", "blocks")} == {block.width - 1}


def test_mixing(context, bert):
    assert "mixing" in make_report(context, ["mixing", "cost"]).omitted
    model = bert()
    compress(model, Compression(dk=6, solver=Solver(sweeps=2)), calibration=None)
    mix_heads_(model)
    for layer, alphas in enumerate(alphas_of(model).values()):
        with torch.no_grad():
            alphas += torch.randn(3, 3, generator=torch.Generator().manual_seed(layer))
    mixing = make_report(ReportContext(model, context.batches, options=context.options), ["mixing"]).sections[0]
    matrices(picture(mixing, "Mixing matrices"), [*mixing_matrices(model, order=True).values()])
    alphas = [matrix.detach() for matrix in alphas_of(model).values()]
    matrices(picture(mixing, "Alphas"), alphas)


def test_every_section_was_tried(result):
    assert [part.name for part in result.sections] == [name for name in SECTIONS if name != "mixing"]
