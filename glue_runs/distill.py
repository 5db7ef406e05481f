"""Convert a model, then bring its attention nearer to the dense model's, without labels.

    python glue_runs/distill.py minilm --dk 48 --output outputs/minilm-48
    python glue_runs/distill.py outputs/mrpc --dk 64 --calibration sentences.txt --steps 300 --output outputs/mrpc-64

Shared projections and mixing matrices are trained on the divergence of attention rows, on random tokens of which
sequences repeat some, or on texts; nothing else changes.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from collab_compress_cli.model import load_source

from collab_compress import CollabCompressError, Compression, Solver, compress
from collab_compress.checkpoint.directory import atomic_directory, refuse_existing
from collab_compress.conversion import recover_


@dataclass(frozen=True)
class Arguments:
    """Convert a model, then bring its attention nearer to the dense model's, without labels."""

    model: tyro.conf.Positional[str]
    """minilm, a model directory, or a name on the hub."""

    dk: int
    """Shared query/key width R."""

    output: Path
    """Where to save the model."""

    calibration: str = "synthetic"
    """Random tokens, or a file with one text a line."""

    steps: int = 150
    """Batches of 16 sequences to train on."""

    learning_rate: float = 1e-3
    """At its highest; it rises over the first eighth and falls along a cosine."""

    seed: int = 0
    """Of conversion and training; tokens of the training are other ones."""


def main(arguments: Arguments) -> None:
    refuse_existing(arguments.output)
    source = load_source(arguments.model)
    dense, model = source.model, copy.deepcopy(source.model)
    options = Compression(dk=arguments.dk, solver=Solver(seed=arguments.seed))
    report = compress(model, options, arguments.calibration, source.tokenizer)
    errors = [module.data_error or 0.0 for module in report.modules]
    print(f"converted: score error {sum(errors) / len(errors):.4f} on average", flush=True)
    with atomic_directory(arguments.output) as directory:
        done = recover_(
            model, dense, source.tokenizer, arguments.calibration, steps=arguments.steps,
            learning_rate=arguments.learning_rate, seed=arguments.seed, logging_steps=25,
        )  # fmt: skip
        model.save_pretrained(directory)
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(directory)
    print(f"trained: {done.global_step} steps, mean divergence {done.training_loss:.4f} nats")
    print(f"saved to {arguments.output}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments))
    except CollabCompressError as error:
        sys.exit(f"error: {error}")
