"""Others' yardsticks: MTEB for embedding models, the LM evaluation harness for decoders, word error rate for Whisper.

Tasks, metrics and normalisation are the others' own code, which `pip install 'collab-compress[eval]'` brings; it is
imported where it is used. What is scored here is any model that Transformers can load, converted or not.
"""

import math
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from collab_compress.errors import CheckpointError, DataError, one_line

__all__ = ["Score", "lm_eval_scores", "mteb_scores", "read_recordings", "transcribe", "word_error_rate"]


@dataclass(frozen=True)
class Score:
    """What a yardstick says.

    Args:
        task: its name there.
        metric: as it is called there.
        value: in the yardstick's own scale.
        error: its standard error, where the yardstick tells one.
    """

    task: str
    metric: str
    value: float
    error: float | None = None


def mteb_scores(model: Any, tasks: Sequence[Any], *, batch_size: int = 32, progress: bool = False) -> list[Score]:
    """Score an embedding model on tasks of MTEB (Muennighoff et al. 2023, arXiv 2210.07316).

    Args:
        model: a SentenceTransformer, or whatever else `mteb.evaluate` takes.
        tasks: names of tasks, or tasks.
        batch_size: texts in a batch.
        progress: whether to show progress bars.

    Returns:
        Of each task its main metric, mean over its evaluated splits and languages.

    Raises:
        DataError: mteb has no such task, or its data cannot be had.
        ModuleNotFoundError: mteb is not installed.
    """
    import mteb

    chosen = [_mteb_task(mteb, each) if isinstance(each, str) else each for each in tasks]
    scores = []
    for task in chosen:
        name = task.metadata.name
        try:
            found = mteb.evaluate(
                model, task, cache=None, co2_tracker=False, encode_kwargs={"batch_size": batch_size},
                show_progress_bar=progress,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # the hub's own errors are among both
            raise _unreachable("mteb", name, error) from error
        [result] = found.task_results
        scores.append(Score(name, task.metadata.main_score, float(result.get_score())))
    return scores


def _mteb_task(mteb: Any, name: str) -> Any:
    try:
        return mteb.get_task(name)
    except (KeyError, ValueError) as error:
        raise DataError(f"mteb has no task {name!r}: {one_line(error)}") from error


def lm_eval_scores(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    shots: int | None = None,
    limit: int | None = None,
    include: str | Path | None = None,
) -> list[Score]:
    """Score a decoder, or an encoder–decoder, on tasks of the LM evaluation harness of EleutherAI.

    The harness takes what follows a context's tokens for its continuation. So where a decoder's tokenizer ends every
    text in a special token, as those that recipes train do, texts are encoded without special tokens.

    Args:
        model: with a head that predicts tokens, on the device where it is to run.
        tokenizer: its tokenizer.
        tasks: names of tasks, or of groups of them.
        batch_size: rows in a batch.
        shots: examples in a prompt; the task's own number if not given.
        limit: questions of each task at most; scores of less than a task are for trying out.
        include: a folder of further tasks, as YAML files.

    Returns:
        Of each task, and each group, every metric that it has.

    Raises:
        DataError: there is no such task, its data cannot be had, or the model predicts no tokens.
        ModuleNotFoundError: lm_eval is not installed.
    """
    if tokenizer is None or not model.can_generate():
        what = "has no tokenizer" if tokenizer is None else "predicts no tokens"
        raise DataError(f"{type(model).__name__} {what}; lm_eval takes a decoder, such as GPT2LMHeadModel, with one")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if include is None else str(include))
    for name in tasks:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f"lm_eval has no task {name!r}{meant}")
    ends = bool(tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"][-1])
    harnessed = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size,
        add_bos_token=False if ends and not model.config.is_encoder_decoder else None,
    )  # fmt: skip
    try:
        found = lm_eval.simple_evaluate(
            harnessed, tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager, log_samples=False
        )
    except (OSError, ValueError) as error:
        raise _unreachable("lm_eval", ", ".join(tasks), error) from error
    return [
        score
        for name, metrics in {**found["results"], **found.get("groups", {})}.items()
        for score in _lm_eval_metrics(name, metrics)
    ]


def _lm_eval_metrics(task: str, metrics: dict[str, Any]) -> Iterator[Score]:
    """Read `{"acc,none": 0.5, "acc_stderr,none": 0.1}`: a metric and the filter that answers went through."""
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = metrics.get(f"{metric}_stderr,{filtered}")
        told = metric if filtered == "none" else f"{metric} ({filtered})"
        yield Score(task, told, float(value), error if isinstance(error, float) else None)


def _unreachable(package: str, tasks: str, error: Exception) -> DataError:
    return DataError(
        f"{package} cannot run {tasks}: {one_line(error)}; its data are on the hub, which must be reachable, or have "
        "been once"
    )


RATE = 16_000  # samples a second that Whisper hears


def read_recordings(folder: str | Path) -> dict[str, tuple[np.ndarray, str]]:
    """Read a folder of recordings, NAME.wav, each with what is said in it, NAME.txt.

    Args:
        folder: where they are; folders in it are read too.

    Returns:
        Name → samples, (T) in float32, mono, 16 000 a second; and the text.

    Raises:
        DataError: there are none, one has no text, or something cannot be read.
    """
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    folder, found = Path(folder), {}
    for path in sorted(folder.rglob("*.wav")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of chunks beside the sound
                rate, samples = wavfile.read(path)
            text = path.with_suffix(".txt").read_text(encoding="utf-8")
        except (OSError, ValueError, struct.error) as error:
            raise DataError(f"{path} cannot be read, or {path.stem}.txt beside it: {one_line(error)}") from error
        common = math.gcd(rate, RATE)
        mono = resample_poly(_scaled(samples), RATE // common, rate // common)
        found[path.relative_to(folder).with_suffix("").as_posix()] = mono.astype(np.float32), text
    if not found:
        raise DataError(f"{folder} has no recordings; expected NAME.wav, each with its text in NAME.txt")
    return found


def _scaled(samples: np.ndarray) -> np.ndarray:
    """Give samples from −1 to 1, the mean of all channels."""
    if samples.dtype == np.uint8:
        samples = (samples.astype(np.float64) - 128) / 128
    elif np.issubdtype(samples.dtype, np.integer):
        samples = samples / -float(np.iinfo(samples.dtype).min)
    return samples.mean(1) if samples.ndim == 2 else samples


def transcribe(
    model: PreTrainedModel, processor: Any, recordings: Mapping[str, np.ndarray], *, batch_size: int = 8
) -> dict[str, str]:
    """Write down what is said in English, by greedy search.

    Args:
        model: Whisper, on the device where it is to run.
        processor: its feature extractor and tokenizer.
        recordings: name → samples, (T), 16 000 a second; as long as Whisper hears at once, 30 seconds, at most.
        batch_size: recordings in a batch.

    Returns:
        Name → text.

    Raises:
        DataError: the model is no Whisper with its processor, or a recording is too long.
    """
    if (
        model.config.model_type != "whisper"
        or not model.can_generate()
        or not hasattr(processor, "feature_extractor")
    ):
        raise DataError(
            f"{type(model).__name__} writes nothing down; expected WhisperForConditionalGeneration with its processor"
        )
    most = processor.feature_extractor.chunk_length
    for name, samples in recordings.items():
        if len(samples) > most * RATE:
            raise DataError(f"{name} is {len(samples) / RATE:.1f} seconds long; cut it to {most} at most")
    many = getattr(model.generation_config, "is_multilingual", False)
    options = {"language": "en", "task": "transcribe"} if many else {}
    texts: list[str] = []
    sounds = list(recordings.values())
    for start in range(0, len(sounds), batch_size):
        heard = processor.feature_extractor(
            sounds[start : start + batch_size], sampling_rate=RATE, return_tensors="pt", return_attention_mask=True
        )  # fmt: skip
        with torch.no_grad():
            tokens = model.generate(
                heard["input_features"].to(model.device, model.dtype),
                attention_mask=heard["attention_mask"].to(model.device), num_beams=1, do_sample=False, **options,
            )  # fmt: skip
        texts += processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return dict(zip(recordings, texts, strict=True))


def word_error_rate(texts: Sequence[str], references: Sequence[str], tokenizer: Any) -> float:
    """Give the share of words that are wrong, missing or too many, in percent, over all texts together.

    Both sides are normalised as Whisper's authors do it (Radford et al. 2022, arXiv 2212.04356, appendix C), by the
    tokenizer, as on the Open ASR leaderboard.

    Args:
        texts: what was heard.
        references: what was said.
        tokenizer: Whisper's, with its table of spellings.

    Raises:
        CheckpointError: the tokenizer has no such table.
        DataError: a reference has no words.
        ModuleNotFoundError: jiwer is not installed.
    """
    import jiwer

    if not getattr(tokenizer, "english_spelling_normalizer", None):
        raise CheckpointError(
            "the tokenizer has no English spellings; put the normalizer.json of Whisper beside its tokenizer.json"
        )
    wanted = [tokenizer.normalize(reference) for reference in references]
    for reference, normal in zip(references, wanted, strict=True):
        if not normal:
            raise DataError(f"{reference.strip()!r} has no words once it is normalised; take it out")
    return 100 * float(jiwer.wer(wanted, [tokenizer.normalize(text) for text in texts]))
