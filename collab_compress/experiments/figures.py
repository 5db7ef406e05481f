"""The papers' figures, drawn from records. Adding one is a function and a line in `FIGURES`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collab_compress.experiments.drawing import (
    Pictures,
    Points,
    alpha_matrices,
    by_group,
    discrepancy_growth,
    drawn,
    group_of,
    heatmap,
    history_curves,
    is_penalised,
    is_plain,
    kind_of_sharing,
    kinds_of,
    loss_curves,
    lowest_seeds,
    matrix_pictures,
    mean_curves,
    millions,
    name_of,
    of_rotation,
    own_width,
    picture,
    score_label,
    svcca_curves,
    width_curves,
)
from collab_compress.experiments.results import Result
from collab_compress.report.section import Curve, Heatmaps
from collab_compress.training import SCHEDULES

SIZED = re.compile(r"d\d+-h\d+")
"""Methods that are models of other sizes, as in the sweep of Diversity's Table 1."""


@dataclass(frozen=True)
class Figure:
    """A figure of a paper.

    Args:
        name: as in "Figure 3".
        shows: what the paper shows there.
        draw: records → pictures; none where the records lack what it takes.
        needs: what that is, and how it is made.
    """

    name: str
    shows: str
    draw: Callable[[Sequence[Result]], Pictures]
    needs: str


def nothing(results: Sequence[Result]) -> Pictures:
    """Draw nothing: no record has what it takes."""
    return []


def score_by_width(results: Sequence[Result]) -> Pictures:
    """Draw scores at each shared width, converted only and fine-tuned again."""
    return width_curves(
        results, lambda result: result.score, "Score against the shared width", "Collaborate, Fig. 5", "score"
    )


def seconds_by_width(results: Sequence[Result]) -> Pictures:
    """Draw how long conversions take at each shared width."""
    fresh = [result for result in results if result.variant.conversion and not result.variant.again]
    return width_curves(fresh, lambda result: result.seconds, "Time to convert", "Collaborate, Fig. 4", "seconds")


def bleu_by_width(results: Sequence[Result]) -> Pictures:
    """Draw the scores of untrained models against width of queries and keys, parameters, and training time."""
    pictures: Pictures = []
    for group, found in by_group(results).items():
        narrow = [result for result in found if (result.recipe.get("fresh") or {}).get("attention")]
        if not narrow:
            continue
        shown = [*narrow, *(result for result in found if is_plain(result))]
        for what, reading, x, across in (
            ("width", "The flatter a curve, the less narrower queries and keys cost.", own_width,
             "width of queries and keys, all heads"),
            ("parameters", "Higher to the left is better.", millions, "parameters, millions"),
            ("training time", "Higher to the left is better; times are of runs side by side.",
             lambda result: result.seconds, "training, s"),
        ):  # fmt: skip
            curves = mean_curves(shown, kind_of_sharing, x, lambda result: result.score)
            if curves:
                title, up = f"Score against {what}, {group}", score_label(shown[0])
                pictures.append(picture(title, reading, "Collaborate, Fig. 3", [("", curves)], across, up))
    return pictures


def mixing_matrices(results: Sequence[Result]) -> Pictures:
    """Draw how heads mix what they share, of one seed of each variant."""
    return matrix_pictures(
        results, "mixing", "Mixing matrices",
        "A column of one strong cell belongs to one head, one with several to several.", "Collaborate, Fig. 2",
        "head", "component",
    )  # fmt: skip


def alphas_alone(results: Sequence[Result]) -> Pictures:
    """Draw alphas that were trained without growth, of one seed."""
    return alpha_matrices(results, "Alphas without growth", "Rotation, Fig. 3", growing=False)


def alphas_with_growth(results: Sequence[Result]) -> Pictures:
    """Draw alphas that were trained with growth, of one seed."""
    return alpha_matrices(results, "Alphas with nuclear growth", "Rotation, Fig. 4", growing=True)


def confidence(results: Sequence[Result]) -> Pictures:
    """Draw the confidence of each head: plain, mixed and rotated, of one seed."""
    pictures: Pictures = []
    for group, found in by_group(of_rotation(results)).items():
        for kind in kinds_of("confidence", found):
            maps = []
            for name, result in lowest_seeds(found, "confidence").items():
                layers = result.measures["confidence"].get(kind)
                if layers:
                    maps.append(heatmap(name, layers, len(max(layers, key=len))))
            pictures.append(
                Heatmaps(
                    f"Confidence of heads, {kind}, {group}", "Strong cells are heads that look at one token.",
                    "Rotation, Fig. 5", tuple(maps), 0.0, 1.0, row_label="layer", column_label="head",
                )
            )  # fmt: skip
    return pictures


def cosine_growth(results: Sequence[Result]) -> Pictures:
    """Draw how much 1 − cosine, summed over pairs of heads, grows against the plain model."""
    return discrepancy_growth(results, "difference", "Growth of cosine discrepancy", "Rotation, Fig. 6")


def l2_growth(results: Sequence[Result]) -> Pictures:
    """Draw how far the L2 discrepancy of heads grows against the plain model."""
    return discrepancy_growth(results, "l2", "Growth of L2 discrepancy", "Rotation, Fig. 7")


def svcca_by_size(results: Sequence[Result]) -> Pictures:
    """Draw SVCCA coefficients between heads, of models of several sizes."""
    sized = [result for result in results if SIZED.fullmatch(result.variant.method)]
    return svcca_curves(sized, "SVCCA coefficients by size", "Diversity, Fig. 3", lambda result: result.column.name)


def svcca_by_method(results: Sequence[Result]) -> Pictures:
    """Draw SVCCA coefficients between heads, by what acted on them."""
    others = [result for result in results if not SIZED.fullmatch(result.variant.method)]
    return svcca_curves(others, "SVCCA coefficients by method", "Diversity, Fig. 4", group_of)


def overlap_while_training(results: Sequence[Result]) -> Pictures:
    """Draw the overlap of heads while training, with the penalty and without."""
    return history_curves(
        results, "bhattacharyya", "Overlap of heads while training", "The lower, the less heads look at the same.",
        "Bhattacharyya, Fig. 1", "Bhattacharyya coefficient, sum over layers",
    )  # fmt: skip


def cross_entropy_while_training(results: Sequence[Result]) -> Pictures:
    """Draw the task's loss, without penalty, while training."""
    return history_curves(
        [result for result in results if is_penalised(result) is not None], "task_loss",
        "Cross-entropy while training, without penalty", "Curves that meet learn the task equally well.",
        "Bhattacharyya, Fig. 2", "nats",
    )  # fmt: skip


def plain_losses(results: Sequence[Result]) -> Pictures:
    """Draw all losses of models without the penalty."""
    return loss_curves(results, "Losses without the penalty", "Bhattacharyya, Fig. 3", penalised=False)


def penalised_losses(results: Sequence[Result]) -> Pictures:
    """Draw all losses of models with the penalty."""
    return loss_curves(results, "Losses with the penalty", "Bhattacharyya, Fig. 4", penalised=True)


def bleu_while_training(results: Sequence[Result]) -> Pictures:
    """Draw BLEU on the validation set while training."""
    return history_curves(
        [result for result in results if is_penalised(result) is not None], "eval_bleu",
        "BLEU while training", "On the validation set, after each epoch.", "Bhattacharyya, Fig. 5", "BLEU",
    )  # fmt: skip


def schedules(results: Sequence[Result]) -> Pictures:
    """Draw the schedules of DropHead's probability, as they are; no record is needed."""
    steps = [step / 100 for step in range(101)]
    curves = tuple(
        Curve(name, tuple(100 * x for x in steps), tuple(schedule(x, 0.1, 0.2, 0.2) for x in steps))
        for name, schedule in SCHEDULES.items()
    )
    return [
        picture(
            "Probability of DropHead while training", "For p = 0.2 and warmup over a tenth of training.",
            "DropHead, Fig. 2", [("", curves)], "steps, %", "probability", bottom=0.0,
        )
    ]  # fmt: skip


def pruning(results: Sequence[Result]) -> Pictures:
    """Draw scores with more and more heads pruned, with DropHead and without."""
    pictures: Pictures = []
    for group, found in by_group(results).items():
        curves: dict[str, Points] = defaultdict(lambda: defaultdict(list))
        for result in found:
            measured = result.measures.get("pruning")
            if measured and (is_plain(result) or (result.recipe.get("heads") or {}).get("drophead")):
                for share, score in zip(measured["shares"], measured["scores"], strict=True):
                    curves[name_of(result)][100 * share].append(score)
        if curves:
            pictures.append(
                picture(
                    f"Score with heads pruned, {group}", "The later a curve falls, the more heads can go.",
                    "DropHead, Fig. 3", [("mean over seeds", drawn(curves))], "heads pruned, %",
                    score_label(found[0]),
                )
            )  # fmt: skip
    return pictures


RUN = "`collab-sweep {}`, whose records have {}"
FIGURES: dict[str, tuple[Figure, ...]] = {
    "collaborate": (
        Figure("Figure 1", "captured energy of queries and keys", nothing,
               "a trained model: `collab-analyze MODEL --sections energy`"),
        Figure("Figure 2", "mixing matrices", mixing_matrices, 'records of collaborative models with "mixing"'),
        Figure("Figure 3", "BLEU against width, parameters and time", bleu_by_width,
               RUN.format("collaborate.yaml", "several widths")),
        Figure("Figure 4", "time to decompose", seconds_by_width, 'records of conversions with "seconds"'),
        Figure("Figure 5", "scores against width, with and without a second fine-tuning", score_by_width,
               RUN.format("glue.yaml", "several widths")),
    ),
    "rotation": (
        Figure("Figure 3", "alphas without growth", alphas_alone, 'records of alphas without growth with "alphas"'),
        Figure("Figure 4", "alphas with growth", alphas_with_growth, 'records of alphas with growth with "alphas"'),
        Figure("Figure 5", "confidence", confidence, 'records with "confidence"'),
        Figure("Figure 6", "growth of cosine discrepancy", cosine_growth,
               'records with "difference" in "discrepancy", of plain training and with alphas or rotation, of the '
               "same seeds"),
        Figure("Figure 7", "growth of L2 discrepancy", l2_growth,
               'records with "discrepancy", of plain training and with alphas or rotation, of the same seeds'),
    ),
    "diversity": (
        Figure("Figure 1", "attention maps", nothing,
               "a trained model: `collab-analyze MODEL --sections attention_maps --data FILE`"),
        Figure("Figure 2", "SVCCA coefficients with a model of one head", nothing,
               "two trained models of `collab-sweep diversity.yaml scale=paper-widths`: "
               "`collab-analyze MODEL --against ONE-HEAD --sections similarity --data FILE`"),
        Figure("Figure 3", "SVCCA coefficients between heads, by size", svcca_by_size,
               RUN.format("diversity.yaml scale=paper-widths", '"svcca"')),
        Figure("Figure 4", "SVCCA coefficients between heads, by method", svcca_by_method,
               RUN.format("diversity.yaml", '"svcca"')),
    ),
    "bhattacharyya": (
        Figure("Figure 1", "overlap while training", overlap_while_training,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 2", "cross-entropy while training", cross_entropy_while_training,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 3", "losses without the penalty", plain_losses,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 4", "losses with the penalty", penalised_losses,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 5", "BLEU while training", bleu_while_training,
               "records of translation with `eval_strategy: epoch` and `predict_with_generate: true` in "
               "tuning.arguments"),
    ),
    "drophead": (
        Figure("Figure 2", "schedules", schedules, "nothing"),
        Figure("Figure 3", "scores with heads pruned", pruning, 'records with "pruning"'),
    ),
}  # fmt: skip
"""Key of the paper → its figures; those that only draw how a method works are left out."""
