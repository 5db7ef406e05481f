"""Whether translations differ by more than chance in the test set explains: paired bootstrap of BLEU."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from collab_compress.errors import RecipeError
from collab_compress.experiments.comparison import AS_IT_IS, REFERENCE
from collab_compress.experiments.results import Column, Result, Variant, read_results
from collab_compress.experiments.workload import REFERENCES, target_language
from collab_compress.tasks import TASKS

ROUNDING = 0.01  # BLEU: more is no rounding, but other sentences


@dataclass(frozen=True)
class Significance:
    """One run's BLEU on one split, beside that of a reference run.

    Args:
        variant: what was done.
        column: what was scored.
        seed: of the run, and of the one it is compared with.
        split: as in "test".
        score: BLEU.
        interval: half of its 95 % interval over resamples of the sentences.
        difference: score − that of the reference run; None for that run itself.
        p: of the difference, two-sided, by paired bootstrap resampling (Koehn, 2004, "Statistical Significance Tests
            for Machine Translation Evaluation"); None for the reference run. Chance in training is not in it.
        reference: method/stage of the reference run.
        signature: sacreBLEU's, with the seed and number of resamples.
    """

    variant: Variant
    column: Column
    seed: int
    split: str
    score: float
    interval: float
    difference: float | None
    p: float | None
    reference: str
    signature: str


def significance(folder: Path, against: str | None = None) -> list[Significance]:
    """Compare the translations that runs kept, sentence by sentence, by sacreBLEU's own paired bootstrap.

    Runs of one model, task and seed are compared, where the reference is among them. The resamples are those of
    sacreBLEU's seed (12345, or SACREBLEU_SEED of the environment), 1,000 of them.

    Args:
        folder: with the outputs of experiments, translations and references included.
        against: method/stage of the reference; plain/tuned or plain/given, the first there is, if not given.

    Raises:
        RecipeError: there are no translations, nothing to compare them with, or not what was scored.
    """
    if not folder.is_dir():
        raise RecipeError(f"{folder} has no translations; significance needs the folder with the outputs themselves")
    groups: dict[tuple[str, Column, int], dict[str, Result]] = defaultdict(dict)
    for result in read_results(folder):
        if result.column.metric == "bleu":
            groups[result.variant.model, result.column, result.seed][result.variant.label] = result
    wanted = [against] if against is not None else [REFERENCE, AS_IT_IS]
    found = []
    for group in groups.values():
        reference = next((name for name in wanted if name in group), None)
        if reference is not None and len(group) > 1:
            first = group.pop(reference)
            found += _compared([first, *group.values()])
    if not found:
        raise RecipeError(
            f"{folder} has no translations of one model, task and seed by {' or '.join(wanted)} and by another; "
            "choose what others are compared with by --against METHOD/STAGE"
        )
    return found


def _compared(results: Sequence[Result]) -> list[Significance]:
    """Compare results with the first of them."""
    first = results[0]
    folders = [Path(result.place).parent for result in results]
    splits = _splits(folders[0])
    translation, task = first.recipe.get("translation") or {}, TASKS[first.column.name.split()[0]]
    tokenize = "zh" if target_language(task, translation.get("target")) == "zh" else "13a"
    found = []
    for split in splits:
        references = _lines(folders[0] / f"{split}{REFERENCES}")
        for folder in folders[1:]:
            if _lines(folder / f"{split}{REFERENCES}") != references:
                raise RecipeError(f"{folder} and {folders[0]} have other references in {split}{REFERENCES}")
        systems = [(folder.as_posix(), _lines(folder / f"{split}.txt")) for folder in folders]
        for name, written in systems:
            if len(written) != len(references):
                raise RecipeError(f"{name}/{split}.txt has {len(written)} lines, its references {len(references)}")
        signatures, scores = PairedTest(systems, {"BLEU": BLEU(tokenize=tokenize)}, [references], test_type="bs")()
        for result, score in zip(results, scores["BLEU"], strict=True):
            found.append(
                Significance(
                    result.variant, result.column, result.seed, split, float(score.score), float(score.ci),
                    None if result is first else float(score.score - scores["BLEU"][0].score),
                    None if result is first else float(score.p_value),
                    first.variant.label, str(signatures["BLEU"]),
                )
            )  # fmt: skip
    for result, folder in zip(results, folders, strict=True):
        mean = fmean(each.score for each in found if each.variant == result.variant)
        if not abs(mean - result.score) < ROUNDING:
            raise RecipeError(
                f"{folder} was scored {result.score:.2f}, and its translations are {mean:.2f}: they, or the "
                "references beside them, are not those that were scored"
            )
    return found


def _splits(folder: Path) -> list[str]:
    """Name the splits whose scores count and whose references are kept: the tests, or all where there is none."""
    splits = sorted(path.name.removesuffix(REFERENCES) for path in folder.glob(f"*{REFERENCES}"))
    if not splits:
        raise RecipeError(
            f"{folder} has no references beside its translations; write them to test{REFERENCES}, one a line"
        )
    return [split for split in splits if split.startswith("test")] or splits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode().removesuffix("\n").split("\n")  # no other line ends than ours
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the translations in {path}: {error}") from error
