"""Settings of recipes that take seconds, and records of runs that never took place."""

from pathlib import Path
from typing import Any

from collab_compress_glue_runs.experiments import Recipe, read_recipe
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def mrpc(model: Path, data_dir: Path, output: Path, *more: str) -> list[str]:
    """Return the settings of a recipe on MRPC; later ones replace earlier ones."""
    settings = f"task=mrpc model={model} data_dir={data_dir} output={output} max_length=24 trackers=[]"
    return [*settings.split(), *more]


FRESH = "{layers: 2, width: 24, heads: 3, feed_forward: 32, dropout: 0.0, max_length: 40, vocab_size: 60}"
TUNING = "{epochs: 2, learning_rate: 1.0e-3, batch_size: 8, arguments: {disable_tqdm: true}}"


def fresh_recipe(output: Path, *more: str) -> Recipe:
    """Return the recipe of an untrained model; later settings replace earlier ones."""
    settings = [f"output={output}", f"fresh={FRESH}", f"tuning={TUNING}", "trackers=[]", "max_length=24"]
    return read_recipe(overrides=[*settings, *more])


def trained(folder: Path, model_class: Any = AutoModelForSequenceClassification) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a stage."""
    return model_class.from_pretrained(folder / "model").eval(), AutoTokenizer.from_pretrained(folder / "model")


def make_record(task: str, method: str, stage: str, seed: int, score: float, **more: Any) -> dict[str, Any]:
    """Return the record of a stage: tuned, given, or a conversion, with `-again` after a second fine-tuning."""
    return {
        "task": task,
        "method": method,
        "conversion": None if stage in ("tuned", "given") else stage.removesuffix("-again"),
        "again": stage.endswith("-again"),
        "stage": stage,
        "seed": seed,
        "score": score,
        "recipe": {"model": "minilm"},
        **more,
    }
