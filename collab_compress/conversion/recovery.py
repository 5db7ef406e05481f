"""Recovery: train converted attention towards the dense model's, without labels."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from operator import itemgetter
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self, TypeAlias

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

from collab_compress.architectures import AttentionSite, find_attention, transformers_model
from collab_compress.attention import ScoreForm
from collab_compress.attention.install import FORMS_AT
from collab_compress.calibration import Batch, Calibration, calibration_batches, evaluation_mode
from collab_compress.calibration.batches import is_named
from collab_compress.calibration.tokenization import BATCH_SIZE
from collab_compress.conversion.refit import check_models
from collab_compress.errors import CalibrationError, CompressionError, HeadError
from collab_compress.heads import Tap
from collab_compress.losses import kl_divergence
from collab_compress.options import Solver

StepProgress: TypeAlias = Callable[[int, int], None]
"""Called after each step with the number of steps done, and of all."""

SCORES_RATE = 1e-3
VALUES_RATE = 2e-4
LARGEST_RATE = 1.0
RANDOM_LENGTH = 64
SAMPLED = 4096


def recover_(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration = "auto",
    *,
    steps: int = 150,
    learning_rate: float | None = None,
    seed: int = 0,
    length: int | None = None,
    progress: StepProgress | None = None,
    **arguments: Any,
) -> TrainOutput:
    """Train the attention of a converted model towards the dense model's, without labels, in place.

    `distil_` with the settings that were tried: Adam, a cosine schedule with warmup over the first eighth of the
    steps, 16 sequences a step. Random tokens are repeated within a sequence (`with_copies`).

    Args:
        model: converted, in any form. A model in half precision is trained in float32, then cast back.
        dense: the model it was converted from; another object.
        tokenizer: of both; as for `compress`.
        calibration: as for `compress`, but "auto" is random tokens; with fewer than 16 texts a step, or larger
            batches, there are fewer steps.
        steps: most steps; each process takes 16 sequences a step.
        learning_rate: its maximum; 1e-3 by default, or 2e-4 if values are converted, which higher rates make worse.
        seed: of tokens and order; the tokens differ from those of a conversion with the same seed.
        length: tokens of a random sequence, 64 by default, or where texts are cut; as for `calibration_batches`.
        progress: called with (done, total) after each step, in place of the `Trainer`'s own bar.
        arguments: more of `TrainingArguments`.

    Returns:
        Of the `Trainer`.

    Raises:
        HeadError: as for `distil_`.
        CompressionError: steps, learning rate or other arguments are unusable.
        CalibrationError: calibration data is missing or unusable.
    """
    model, dense = transformers_model(model), transformers_model(dense)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise CompressionError(f"steps is {steps!r}; expected a whole number, at least 1")
    seed = Solver(seed=seed).seed  # checks it
    if learning_rate is None:
        has_values = any(hasattr(module, FORMS_AT[1]) for module in model.modules())
        learning_rate = VALUES_RATE if has_values else SCORES_RATE
    with TemporaryDirectory() as scratch:
        settings = {
            "output_dir": scratch,
            "num_train_epochs": 1,
            "learning_rate": learning_rate,
            "adam_beta2": 0.99,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.125,
            "seed": seed,
            "report_to": [],
            "save_strategy": "no",
            "dataloader_pin_memory": torch.accelerator.is_available(),
            "use_cpu": not torch.accelerator.is_available(),
        }
        try:
            training = TrainingArguments(**{**settings, **arguments})
        except (TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0].replace("TrainingArguments.__init__() ", "")
            raise CompressionError(f"recover_ {reason}; expected arguments of TrainingArguments") from error
        rate = training.learning_rate
        if not isinstance(rate, int | float) or not 0 < rate <= LARGEST_RATE:
            raise CompressionError(
                f"learning_rate is {rate!r}; expected a number above 0, up to {LARGEST_RATE}; begin with 1e-3"
            )
        _check_models(model, dense)
        count = steps * training.world_size
        synthetic = is_named(calibration, "auto", "synthetic")
        batches = calibration_batches(
            "synthetic" if synthetic else calibration,
            dense,
            tokenizer,
            sequences=BATCH_SIZE * count,
            length=RANDOM_LENGTH if length is None and synthetic else length,
            seed=seed + 1000,
        )
        if synthetic and batches and "input_ids" in batches[0]:
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
    """Train the converted parameters of a model (`converted_parameters`), in place; all others are frozen.

    Converted queries, keys and mixing matrices learn from the divergence of the model's attention probabilities from
    the dense model's. Converted values and their output projections learn from the squared error of the attention
    output over its variance. Each loss is a mean over converted modules; the two are added.

    Both models see the same tokens, without dropout.

    Args:
        model: converted, in any form.
        dense: the model it was converted from; moved to the device of the training.
        batches: keyword arguments for the models, one batch a step, as `calibration_batches` makes them.
        arguments: learning rate, schedule, epochs, precision and the rest.
        progress: as for `recover_`.

    Returns:
        Of the `Trainer`: steps, mean loss, speed.

    Raises:
        HeadError: the model is not converted, or has other attention modules or heads than the dense one; they share
            parameters, or weights are offloaded or not finite, before or after training; several GPUs in one process.
        CalibrationError: there are no batches.
        UnsupportedModelError: the models' family is not known.
    """
    if not batches:
        raise CalibrationError("no batches to train on; pass 'synthetic', texts or batches")
    model, dense = transformers_model(model), transformers_model(dense)
    _check_models(model, dense)
    sites, dense_sites = find_attention(model), find_attention(dense)
    trained = {parameter for site in sites for parameter in converted_parameters(site)}
    if not trained:
        raise HeadError(f"{type(model).__name__} is not converted, so there is nothing to recover")
    _check_sites(model, sites, dense, dense_sites)
    weights = {parameter: parameter.detach().clone() for parameter in trained}
    with _restored(model), evaluation_mode(model), evaluation_mode(dense):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trained)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _in_float32(model, dense),
            _Watched(model, sites) as watched,
            _Watched(dense, dense_sites, like=sites) as target,
        ):
            distiller = _Distiller(model, dense, (watched, target), batches, arguments)
            if progress is not None:
                distiller.remove_callback(ProgressCallback)
                distiller.remove_callback(PrinterCallback)
                distiller.add_callback(_Steps(progress))
            output = distiller.train()
        if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
            for parameter, weight in weights.items():
                parameter.data.copy_(weight)
            raise HeadError(
                f"recovery of {type(model).__name__} ended in values that are not finite, and was undone; pass a "
                "lower learning_rate"
            )
        return output


def _check_models(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Refuse models that share parameters, and weights that training can only spread."""
    if not {*model.parameters()}.isdisjoint(dense.parameters()):
        raise HeadError(
            "the converted and the dense model share parameters; pass the dense model loaded again, or a copy made "
            "before the conversion"
        )
    check_models(model, dense)


def _check_sites(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    dense: PreTrainedModel,
    dense_sites: Sequence[AttentionSite],
) -> None:
    if [site.name for site in sites] != [site.name for site in dense_sites]:
        raise HeadError(
            f"{type(dense).__name__} has other attention modules than {type(model).__name__}; pass the dense "
            "model that was converted"
        )
    for site, other in zip(sites, dense_sites, strict=True):
        if site.heads != other.heads and hasattr(site.module, ScoreForm.at):
            raise HeadError(
                f"{site.name} has {site.heads} heads, and {other.heads} in the dense model; remove the same heads "
                "there first, or recover before pruning"
            )


@contextmanager
def _restored(model: PreTrainedModel) -> Iterator[None]:
    """Restore what a `Trainer` changes beside weights and modes: requires_grad, and use_cache of the config."""
    requires_grad = {parameter: parameter.requires_grad for parameter in model.parameters()}
    use_cache = vars(model.config).get("use_cache")
    try:
        yield
    finally:
        vars(model.config).pop("use_cache", None)
        if use_cache is not None:
            model.config.use_cache = use_cache
        for parameter, required in requires_grad.items():
            parameter.requires_grad_(required)


@contextmanager
def _in_float32(*models: PreTrainedModel) -> Iterator[None]:
    """Hold weights in half precision in float32, and cast them back afterwards.

    Gradients overflow in float16, and small steps are rounded away in bfloat16.
    """
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    half = [(tensor, tensor.dtype) for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16)]
    try:
        for tensor, _ in half:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in half:
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None


def with_copies(batches: Sequence[Batch], separator: int | None, types: bool, seed: int = 0) -> list[Batch]:
    """Repeat tokens of the first half of each sequence in its second half, in another order.

    Random tokens rarely occur twice, so heads that look for equal tokens in another sentence would not show. The
    share of tokens that are repeated is drawn for each sequence, from none to all.

    Args:
        batches: random tokens without padding, `input_ids` (B, T), and other inputs, such as images, which stay.
        separator: token to put between the halves, or None.
        types: whether `token_type_ids` mark the second half as the second text of a pair.
        seed: of the draws.

    Returns:
        New batches; those with `decoder_input_ids` as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        batch if "decoder_input_ids" in batch else _with_copies(batch, separator, types, generator)
        for batch in batches
    ]


def _with_copies(original: Batch, separator: int | None, types: bool, generator: torch.Generator) -> Batch:
    ids, (sequences, length) = original["input_ids"].clone(), original["input_ids"].shape
    middle = length // 2
    first, second = ids[:, 1:middle], ids[:, middle + 1 : length - 1]  # without the special tokens at the ends
    count = min(first.shape[1], second.shape[1])
    order = torch.rand(sequences, first.shape[1], generator=generator).argsort(1)[:, :count]
    repeated = torch.rand(sequences, count, generator=generator) < torch.rand(sequences, 1, generator=generator)
    second[:, :count] = torch.where(repeated, first.gather(1, order), second[:, :count])
    if separator is not None:
        ids[:, middle] = separator
    batch = {**original, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch.pop("token_type_ids", None)
    if types:
        batch["token_type_ids"] = (torch.arange(length) > middle).long().expand_as(ids)
    return batch


def converted_parameters(site: AttentionSite) -> list[nn.Parameter]:
    """Return the parameters of a module that the conversion made."""
    module: Any = site.module
    scores, values = (getattr(module, at, None) for at in FORMS_AT)
    parameters = [] if scores is None else scores.trained(module)
    return parameters + ([] if values is None else values.trained(module, values.output_of(module, site.parent)))


def attention_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model's attention weights, to recognise the dense model of a conversion.

    It is the SHA-256 of about `SAMPLED` values of each parameter of the attention modules, evenly spaced.
    """
    digest = hashlib.sha256()
    for site in find_attention(model):
        for name, parameter in site.module.named_parameters():
            values = parameter.detach().flatten()
            sample = values[:: max(1, len(values) // SAMPLED)].float().cpu()
            digest.update(f"{site.name} {name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


class _Call(NamedTuple):
    """One call of an attention module."""

    probs: Tensor | None  # attention probabilities (B, H, T, S); None if queries and keys are dense
    output: Tensor | None  # of the output projection (B, T, D); None if values are dense
    mask: Tensor | None  # attention mask of queries (B, T)


class _Watched:
    """Record the attention probabilities and attention outputs of a model's forward passes.

    For the dense model, record the maps that are converted in the corresponding modules of `like`.
    """

    def __init__(
        self, model: PreTrainedModel, sites: Sequence[AttentionSite], like: Sequence[AttentionSite] | None = None
    ) -> None:
        self._with_scores, self._with_values = (
            {site.name for site in like or sites if hasattr(site.module, at)} for at in FORMS_AT
        )
        self._tap = Tap(model, "probs" if self._with_scores else ())
        self._outputs: list[Tensor] = []  # in the order of calls
        self._handles = [
            site.part(site.family.output).register_forward_hook(lambda _, __, output: self._outputs.append(output))
            for site in sites
            if site.name in self._with_values
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tap.remove()
        for handle in self._handles:
            handle.remove()

    def take(self) -> list[_Call]:
        """Return the calls of the last forward pass, in order, and forget them."""
        outputs, self._outputs = iter(self._outputs), []
        return [
            _Call(
                probs=reading.probs if reading.site.name in self._with_scores else None,
                output=next(outputs) if reading.site.name in self._with_values else None,
                mask=reading.masks.query,
            )
            for reading in self._tap.take()
        ]


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Report each training step."""

    def __init__(self, progress: StepProgress) -> None:
        self.progress = progress

    def on_step_end(self, arguments: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        self.progress(state.global_step, state.max_steps)


class _Distiller(Trainer):  # type: ignore[misc]
    """A `Trainer` whose loss is the divergence of attention probabilities plus the error of attention outputs."""

    def __init__(
        self,
        model: PreTrainedModel,
        dense: PreTrainedModel,
        watched: tuple[_Watched, _Watched],
        batches: Sequence[Batch],
        arguments: TrainingArguments,
    ) -> None:
        arguments = copy(arguments)
        arguments.per_device_train_batch_size = 1
        if arguments.n_gpu > 1:
            raise HeadError(
                f"{arguments.n_gpu} GPUs in one process would share out each batch's heads; start a process for each "
                "with torchrun, or show one by CUDA_VISIBLE_DEVICES"
            )
        super().__init__(model, arguments, train_dataset=list(batches), data_collator=itemgetter(0))
        self.dense, self.watched = dense.to(arguments.device), watched
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:
        model.eval()
        return _loss(model, self.dense, inputs, self.watched)


def _loss(model: nn.Module, dense: nn.Module, batch: Batch, watched: tuple[_Watched, _Watched]) -> Tensor:
    """Run both models on a batch; return the divergence of attention probabilities plus the error of outputs."""
    with torch.no_grad():
        dense(**batch)
    model(**batch)
    divergences, errors = [], []
    for call, target in zip(*(part.take() for part in watched), strict=True):
        if call.probs is not None and target.probs is not None:
            divergences.append(kl_divergence(call.probs, target.probs, call.mask))
        if call.output is not None and target.output is not None:
            errors.append(_output_error(call.output, target.output, call.mask))
    return torch.stack([torch.stack(losses).mean() for losses in (divergences, errors) if losses]).sum()


def _output_error(output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Return the squared error of attention outputs (B, T, D) over the variance of the target, without padding."""
    if mask is not None:
        output, target = output[mask], target[mask]
    output, target = output.flatten(0, -2).float(), target.flatten(0, -2).float()
    return (output - target).square().sum() / (target - target.mean(0)).square().sum().clamp_min(1e-12)
