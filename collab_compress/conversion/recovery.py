"""Bring converted attention nearer to the dense model's, on tokens without labels."""

from collections.abc import Callable, Sequence
from copy import copy
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput

from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.calibration import Batch, Calibration, calibration_batches
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.heads import Tap
from collab_compress.losses import kl_divergence

StepProgress: TypeAlias = Callable[[int, int], None]
"""Called after each step with how many are done, and how many there are."""


def recover_(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration = "synthetic",
    *,
    steps: int = 150,
    learning_rate: float = 1e-3,
    seed: int = 0,
    length: int | None = None,
    progress: StepProgress | None = None,
    **arguments: Any,
) -> TrainOutput:
    """Bring the attention of a converted model nearer to the dense model's, without labels, in place.

    `distil_` with the settings that were tried: Adam, a cosine after a rise over the first eighth of the steps, 16
    sequences a step. Random tokens are repeated within a sequence (`with_copies`).

    Args:
        model: converted, in the shared or per-head form.
        dense: the model it was converted from.
        tokenizer: of both; as for `compress`.
        calibration: as for `compress`; texts are fewer steps where there are fewer than 16 a step.
        steps: at most how many; processes that were started together take 16 sequences each.
        learning_rate: at its highest.
        seed: of tokens and order; the tokens are others than those of a conversion with the same seed.
        length: tokens of a random sequence, or where texts are cut; as for `calibration_batches`.
        progress: called with (done, total) after each step, in place of the `Trainer`'s own bar.
        arguments: more of `TrainingArguments`.

    Returns:
        What the `Trainer` says.

    Raises:
        HeadError: as for `distil_`.
        CalibrationError: calibration data is missing or unusable.
    """
    with TemporaryDirectory() as scratch:
        settings = {
            "output_dir": scratch, "num_train_epochs": 1, "learning_rate": learning_rate,
            "adam_beta2": 0.99, "lr_scheduler_type": "cosine", "warmup_steps": 0.125, "seed": seed, "report_to": [],
            "save_strategy": "no", "dataloader_pin_memory": torch.accelerator.is_available(),
            "use_cpu": not torch.accelerator.is_available(),
        }  # fmt: skip
        training = TrainingArguments(**{**settings, **arguments})
        count = steps * training.world_size
        batches = calibration_batches(
            calibration, dense, tokenizer, sequences=16 * count, length=length, seed=seed + 1000
        )
        if calibration == "synthetic" and batches and "input_ids" in batches[0]:
            separator = getattr(tokenizer, "sep_token_id", None)
            batches = with_copies(batches, separator, getattr(dense.config, "type_vocab_size", 0) > 1, seed)
        return distil_(model, dense, batches[:count], training, progress)


def distil_(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    batches: Sequence[Batch],
    arguments: TrainingArguments,
    progress: StepProgress | None = None,
) -> TrainOutput:
    """Train the shared projections and mixing matrices of a converted model, and nothing else, in place.

    The loss is the divergence of the model's attention rows from the dense model's, mean over converted modules. Both
    models see the same tokens, and there is no dropout.

    Args:
        model: converted, in the shared or per-head form.
        dense: the model it was converted from; moved to the device of the training.
        batches: keyword arguments for the models, one batch a step, as `calibration_batches` makes them.
        arguments: learning rate, schedule, epochs, precision and the rest.
        progress: as for `recover_`.

    Returns:
        What the `Trainer` says: steps, mean loss, speed.

    Raises:
        HeadError: the model is not converted, or has other attention modules than the dense one; several GPUs in one
            process.
        CalibrationError: there are no batches.
        UnsupportedModelError: the models' family is not known.
    """
    if not batches:
        raise CalibrationError("no batches to train on; pass 'synthetic', texts or batches")
    sites, others = (find_attention(each, FAMILIES) for each in (model, dense))
    converted: list[Any] = [site.module for site in sites if hasattr(site.module, "score_form")]
    if not converted:
        raise HeadError(f"{type(model).__name__} is not converted, so there is nothing to bring nearer")
    if [site.name for site in sites] != [site.name for site in others]:
        raise HeadError(
            f"{type(dense).__name__} has other attention modules than {type(model).__name__}; pass the dense "
            "model that was converted"
        )
    trained = {parameter for module in converted for parameter in module.score_form.trained(module)}
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modes = {module: module.training for each in (model, dense) for module in each.modules()}
    use_cache = vars(model.config).get("use_cache")  # a Trainer switches it off
    try:
        for parameter in before:
            parameter.requires_grad_(parameter in trained)
        with Tap(model, "rows") as tap, Tap(dense, "rows") as target:
            distiller = _Distiller(model, dense, (tap, target), batches, arguments)
            if progress is not None:
                distiller.remove_callback(ProgressCallback)
                distiller.remove_callback(PrinterCallback)
                distiller.add_callback(_Steps(progress))
            return distiller.train()
    finally:
        vars(model.config).pop("use_cache", None)
        if use_cache is not None:
            model.config.use_cache = use_cache
        for module, training in modes.items():
            module.training = training
        for parameter, requires_grad in before.items():
            parameter.requires_grad_(requires_grad)


def with_copies(batches: Sequence[Batch], separator: int | None, types: bool, seed: int = 0) -> list[Batch]:
    """Let the second half of each sequence repeat tokens of its first half, in another order.

    Random tokens never occur twice, so heads that look for equal tokens in another sentence show nothing of it. How
    many tokens are repeated is drawn for each sequence, from none to all.

    Args:
        batches: random tokens without padding, (B, T) as `input_ids`; other than those and masks nothing is kept.
        separator: token to put between the halves, or None.
        types: whether to mark the second half, as the second text of a pair, by `token_type_ids`.
        seed: of the draws.

    Returns:
        New batches; those with `decoder_input_ids` as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        batch if "decoder_input_ids" in batch else _copied(batch["input_ids"], separator, types, generator)
        for batch in batches
    ]


def _copied(tokens: Tensor, separator: int | None, types: bool, generator: torch.Generator) -> Batch:
    ids, (rows, length) = tokens.clone(), tokens.shape
    middle = length // 2
    first, second = ids[:, 1:middle], ids[:, middle + 1 : length - 1]  # special tokens stand at the ends
    count = min(first.shape[1], second.shape[1])
    order = torch.rand(rows, first.shape[1], generator=generator).argsort(1)[:, :count]
    repeated = torch.rand(rows, count, generator=generator) < torch.rand(rows, 1, generator=generator)
    second[:, :count] = torch.where(repeated, first.gather(1, order), second[:, :count])
    if separator is not None:
        ids[:, middle] = separator
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if types:
        batch["token_type_ids"] = (torch.arange(length) > middle).long().expand_as(ids)
    return batch


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Tells how far a training is."""

    def __init__(self, progress: StepProgress) -> None:
        self.progress = progress

    def on_step_end(self, arguments: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        """Tell."""
        self.progress(state.global_step, state.max_steps)


class _Distiller(Trainer):  # type: ignore[misc]
    """A `Trainer` whose loss is the divergence of attention rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        dense: PreTrainedModel,
        taps: tuple[Tap, Tap],
        batches: Sequence[Batch],
        arguments: TrainingArguments,
    ) -> None:
        one_batch = copy(arguments)
        one_batch.per_device_train_batch_size = 1
        if one_batch.n_gpu > 1:
            raise HeadError(
                f"{one_batch.n_gpu} GPUs in one process would share out each batch's heads; start a process for each "
                "with torchrun, or show one by CUDA_VISIBLE_DEVICES"
            )
        super().__init__(model, one_batch, train_dataset=list(batches), data_collator=_first)
        self.dense, self.taps = dense.eval().to(arguments.device), taps
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:
        model.eval()
        with torch.no_grad():
            self.dense(**inputs)
        model(**inputs)
        losses = [
            kl_divergence(here.rows, there.rows, here.real.query)
            for here, there in zip(*(tap.take() for tap in self.taps), strict=True)
            if hasattr(here.site.module, "score_form") and here.rows is not None and there.rows is not None
        ]
        return torch.stack(losses).mean()


def _first(batches: list[Batch]) -> Batch:
    return batches[0]
