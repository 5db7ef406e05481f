"""Whether translations differ by more than chance in the test set explains: paired bootstrap of BLEU."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from collab_compress.errors import RecipeError
from collab_compress.experiments.comparison import AS_IT_IS, REFERENCE
from collab_compress.experiments.results import Column, Result, read_results
from collab_compress.experiments.workload import REFERENCES, target_language
from collab_compress.tasks import TASKS

ROUNDING = 0.01  # BLEU: more is no rounding, but other sentences


def significance(folder: Path, against: str | None = None) -> list[dict[str, Any]]:
    """Compare the translations that runs kept, sentence by sentence, by sacreBLEU's own paired bootstrap.

    Runs of one model, task and seed are compared, where the reference is among them. The resamples are those of
    sacreBLEU's seed (12345, or SACREBLEU_SEED of the environment), 1,000 of them.

    Args:
        folder: with the outputs of experiments, translations and references included.
        against: method/stage of the reference; plain/tuned or plain/given, the first there is, if not given.

    Returns:
        For each run and split: `model`, `method`, `stage`, `task`, `split`, `seed`; `score`, its BLEU; `interval`,
        half of its 95 % interval over resamples of the sentences; `difference` to the score of the `reference`, and
        its two-sided `p` by paired bootstrap resampling (Koehn, 2004, "Statistical Significance Tests for Machine
        Translation Evaluation"), both None for the reference itself; and sacreBLEU's `signature`. Chance in training
        is not in p.

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


def _compared(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Compare results with the first of them."""
    first = results[0]
    folders = [Path(result.place).parent for result in results]
    translation, task = first.recipe.get("translation") or {}, TASKS[first.column.name.split()[0]]
    tokenize = "zh" if target_language(task, translation.get("target")) == "zh" else "13a"
    found = []
    for split in _splits(folders[0]):
        references = _lines(folders[0] / f"{split}{REFERENCES}")
        systems = []
        for folder in folders:
            if _lines(folder / f"{split}{REFERENCES}") != references:
                raise RecipeError(f"{folder} and {folders[0]} have other references in {split}{REFERENCES}")
            written = _lines(folder / f"{split}.txt")
            if len(written) != len(references):
                raise RecipeError(f"{folder}/{split}.txt has {len(written)} lines, its references {len(references)}")
            systems.append((folder.as_posix(), written))
        signatures, scores = PairedTest(systems, {"BLEU": BLEU(tokenize=tokenize)}, [references], test_type="bs")()
        for result, score in zip(results, scores["BLEU"], strict=True):
            other = result is not first
            line: dict[str, Any] = {
                "model": result.variant.model,
                "method": result.variant.method,
                "stage": result.variant.stage,
                "task": result.column.name,
                "split": split,
                "seed": result.seed,
                "score": float(score.score),
                "interval": float(score.ci),
                "difference": float(score.score - scores["BLEU"][0].score) if other else None,
                "p": float(score.p_value) if other else None,
                "reference": first.variant.label,
                "signature": str(signatures["BLEU"]),
            }
            found.append(line)
    for number, result in enumerate(results):
        mean = fmean(line["score"] for line in found[number :: len(results)])
        if not abs(mean - result.score) < ROUNDING:
            raise RecipeError(
                f"{folders[number]} was scored {result.score:.2f}, and its translations are {mean:.2f}: they, or the "
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
