"""Recovery: train converted attention towards the dense model's, without labels."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
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

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention, transformers_model
from collab_compress.attention import ScoreForm
from collab_compress.attention.install import FORMS_AT
from collab_compress.calibration import Batch, Calibration, calibration_batches
from collab_compress.calibration.batches import first_batches, is_synthetic
from collab_compress.conversion.refit import check_finite
from collab_compress.errors import CalibrationError, CompressionError, HeadError
from collab_compress.heads import Tap
from collab_compress.losses import kl_divergence

StepProgress: TypeAlias = Callable[[int, int], None]
"""Called after each step with how many are done, and how many there are."""


SCORES_RATE = 1e-3
VALUES_RATE = 2e-4
LARGEST_RATE = 1.0
RANDOM_LENGTH = 64
SAMPLED = 4096


def recover_(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration = "synthetic",
    *,
    steps: int = 150,
    learning_rate: float | None = None,
    seed: int = 0,
    length: int | None = None,
    progress: StepProgress | None = None,
    parameters: Callable[[AttentionSite], list[nn.Parameter]] | None = None,
    **arguments: Any,
) -> TrainOutput:
    """Train the attention of a converted model towards the dense model's, without labels, in place.

    `distil_` with the settings that were tried: Adam, a cosine after a rise over the first eighth of the steps, 16
    sequences a step. Random tokens are repeated within a sequence (`with_copies`).

    Args:
        model: converted, in whatever form. A float16 model is trained in float32, then cast back.
        dense: the model it was converted from; another object.
        tokenizer: of both; as for `compress`.
        calibration: as for `compress`; texts are fewer steps where there are fewer than 16 a step.
        steps: at most how many; processes that were started together take 16 sequences each.
        learning_rate: at its highest; 1e-3 if not given, or 2e-4 where values are converted, which a higher one makes
            worse than they were.
        seed: of tokens and order; the tokens are others than those of a conversion with the same seed.
        length: tokens of a random sequence, 64 if not given, or where texts are cut; as for `calibration_batches`.
        progress: called with (done, total) after each step, in place of the `Trainer`'s own bar.
        parameters: as for `distil_`.
        arguments: more of `TrainingArguments`.

    Returns:
        What the `Trainer` says.

    Raises:
        HeadError: as for `distil_`.
        CompressionError: steps, learning rate or other arguments are unusable.
        CalibrationError: calibration data is missing or unusable.
    """
    model, dense = transformers_model(model), transformers_model(dense)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise CompressionError(f"steps is {steps!r}; expected a whole number, at least 1")
    if learning_rate is None:
        narrow = any(hasattr(module, "value_form") for module in model.modules())
        learning_rate = VALUES_RATE if narrow else SCORES_RATE
    _check_models(model, dense)
    with TemporaryDirectory() as scratch:
        settings = {
            "output_dir": scratch, "num_train_epochs": 1, "learning_rate": learning_rate,
            "adam_beta2": 0.99, "lr_scheduler_type": "cosine", "warmup_steps": 0.125, "seed": seed, "report_to": [],
            "save_strategy": "no", "dataloader_pin_memory": torch.accelerator.is_available(),
            "use_cpu": not torch.accelerator.is_available(),
        }  # fmt: skip
        try:
            training = TrainingArguments(**{**settings, **arguments})
        except (TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0].replace("TrainingArguments.__init__() ", "")
            raise CompressionError(f"recover_ {reason}; expected arguments of TrainingArguments") from error
        _check_rate(training.learning_rate)
        count = steps * training.world_size
        synthetic = is_synthetic(calibration)
        length = RANDOM_LENGTH if length is None and synthetic else length
        calibration, ready = first_batches(calibration, count)
        sequences = None if ready else 16 * count
        batches = calibration_batches(
            calibration, dense, tokenizer, sequences=sequences, length=length, seed=seed + 1000
        )
        if synthetic and batches and "input_ids" in batches[0]:
            separator = getattr(tokenizer, "sep_token_id", None)
            batches = with_copies(batches, separator, getattr(dense.config, "type_vocab_size", 0) > 1, seed)
        return distil_(model, dense, batches[:count], training, progress, parameters)


def _check_rate(learning_rate: float) -> None:
    if not 0 < learning_rate <= LARGEST_RATE:
        raise CompressionError(
            f"learning_rate is {learning_rate}; expected a number above 0, up to {LARGEST_RATE}; begin with 1e-3"
        )


def _check_models(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Refuse models that are one, and weights that training can only spread.

    Raises:
        HeadError: the two share parameters, or hold values that are not finite.
    """
    if not {*model.parameters()}.isdisjoint(dense.parameters()):
        raise HeadError(
            "the converted and the dense model share parameters; pass the dense model loaded again, or a copy made "
            "before the conversion"
        )
    for role, part in (("converted", model), ("dense", dense)):
        check_finite(part, role)


@contextmanager
def _in_float32(*models: PreTrainedModel) -> Iterator[None]:
    """Hold float16 weights in float32 for a while: gradients overflow in float16."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    half = [tensor for tensor in tensors if tensor.dtype == torch.float16]
    try:
        for tensor in half:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor in half:
            tensor.data = tensor.data.half()
            tensor.grad = None


def distil_(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    batches: Sequence[Batch],
    arguments: TrainingArguments,
    progress: StepProgress | None = None,
    parameters: Callable[[AttentionSite], list[nn.Parameter]] | None = None,
) -> TrainOutput:
    """Train the converted parameters of a model, in place; all others are frozen.

    Converted queries, keys and mixing matrices learn from the divergence of the model's attention probabilities from
    the dense model's. Converted values and their output projections learn from the squared error of what the layer's
    attention adds, over its variance. Each loss is a mean over converted modules; the two are summed.

    Both models see the same tokens, and there is no dropout.

    Args:
        model: converted, in whatever form.
        dense: the model it was converted from; moved to the device of the training.
        batches: keyword arguments for the models, one batch a step, as `calibration_batches` makes them.
        arguments: learning rate, schedule, epochs, precision and the rest.
        progress: as for `recover_`.
        parameters: gives what of a module learns; all that the conversion put in (`converted_parameters`) if not
            given.

    Returns:
        What the `Trainer` says: steps, mean loss, speed.

    Raises:
        HeadError: the model is not converted, or has other attention modules or heads than the dense one; they share
            parameters, or hold values that are not finite, or training made some; several GPUs in one process.
        CalibrationError: there are no batches.
        UnsupportedModelError: the models' family is not known.
    """
    if not batches:
        raise CalibrationError("no batches to train on; pass 'synthetic', texts or batches")
    model, dense = transformers_model(model), transformers_model(dense)
    _check_models(model, dense)
    sites, others = (find_attention(each, FAMILIES) for each in (model, dense))
    choose = converted_parameters if parameters is None else parameters
    trained = {parameter for site in sites for parameter in choose(site)}
    if not trained:
        raise HeadError(f"{type(model).__name__} is not converted, so there is nothing to bring nearer")
    if [site.name for site in sites] != [site.name for site in others]:
        raise HeadError(
            f"{type(dense).__name__} has other attention modules than {type(model).__name__}; pass the dense "
            "model that was converted"
        )
    for site, other in zip(sites, others, strict=True):
        if site.heads != other.heads and hasattr(site.module, ScoreForm.at):
            raise HeadError(
                f"{site.name} has {site.heads} heads, and {other.heads} in the dense model; remove the same heads "
                "there first, or recover before pruning"
            )
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modes = {module: module.training for each in (model, dense) for module in each.modules()}
    use_cache = vars(model.config).get("use_cache")  # a Trainer switches it off
    weights = {parameter: parameter.detach().clone() for parameter in trained}
    try:
        for parameter in before:
            parameter.requires_grad_(parameter in trained)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _in_float32(model, dense),
            _Watched(model, sites) as watched,
            _Watched(dense, others, like=sites) as target,
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
    finally:
        vars(model.config).pop("use_cache", None)
        if use_cache is not None:
            model.config.use_cache = use_cache
        for module, training in modes.items():
            module.training = training
        for parameter, requires_grad in before.items():
            parameter.requires_grad_(requires_grad)


def with_copies(batches: Sequence[Batch], separator: int | None, types: bool, seed: int = 0) -> list[Batch]:
    """Make the second half of each sequence repeat tokens of its first half, in another order.

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
    """Callback that reports the training step."""

    def __init__(self, progress: StepProgress) -> None:
        self.progress = progress

    def on_step_end(self, arguments: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        """Report the step."""
        self.progress(state.global_step, state.max_steps)


def converted_parameters(site: AttentionSite) -> list[nn.Parameter]:
    """List the parameters that the conversion of a module put in."""
    module: Any = site.module
    scores, values = (getattr(module, name, None) for name in FORMS_AT)
    found = [] if scores is None else scores.trained(module)
    return [*found, *([] if values is None else values.trained(module, values.output_of(module, site.parent)))]


def attention_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model's attention weights, by which to know the dense model of a conversion again.

    It is the SHA-256 of about `SAMPLED` values of each parameter of the attention modules, evenly spaced.
    """
    digest = hashlib.sha256()
    for site in find_attention(model, FAMILIES):
        for name, parameter in site.module.named_parameters():
            values = parameter.detach().flatten()
            sample = values[:: max(1, len(values) // SAMPLED)].float().cpu()
            digest.update(f"{site.name} {name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


class _Seen(NamedTuple):
    """Tensors recorded in one call of an attention module.

    Args:
        site: the module.
        probs: attention probabilities (B, H, T, S), or None where its queries and keys are dense.
        added: what the output projection returned, (B, T, D), or None where its values are dense.
        real: which queries are no padding, (B, T), or None where all are.
    """

    site: AttentionSite
    probs: Tensor | None
    added: Tensor | None
    real: Tensor | None


class _Watched:
    """Attention probabilities and attention outputs of a model's forward passes.

    Args:
        model: what to watch.
        sites: its attention modules.
        like: the same modules of the converted model, which says what is wanted; `sites` if not given.
    """

    def __init__(
        self, model: PreTrainedModel, sites: Sequence[AttentionSite], like: Sequence[AttentionSite] | None = None
    ) -> None:
        converted: list[Any] = [site.module for site in like or sites]
        self._probs, self._values = (
            {site.name for site, module in zip(sites, converted, strict=True) if hasattr(module, name)}
            for name in FORMS_AT
        )
        self._tap = Tap(model, "probs" if self._probs else ())
        self._added: list[Tensor] = []  # of modules whose values are converted, in the order of calls
        self._handles = [
            site.part(site.family.output).register_forward_hook(self._note)
            for site in sites
            if site.name in self._values
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tap.remove()
        for handle in self._handles:
            handle.remove()

    def _note(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self._added.append(output)

    def take(self) -> list[_Seen]:
        """Hand over what the last pass showed, in the order of calls."""
        added, self._added = iter(self._added), []
        return [
            _Seen(
                each.site,
                each.probs if each.site.name in self._probs else None,
                next(added) if each.site.name in self._values else None,
                each.real.query,
            )
            for each in self._tap.take()
        ]


def _output_error(here: Tensor, there: Tensor, real: Tensor | None) -> Tensor:
    """Squared error of attention outputs (B, T, D) over the variance of what they are to be, over real tokens."""
    if real is not None:
        here, there = here[real], there[real]
    here, there = here.flatten(0, -2).float(), there.flatten(0, -2).float()
    return (here - there).square().sum() / (there - there.mean(0)).square().sum().clamp_min(1e-12)


class _Distiller(Trainer):  # type: ignore[misc]
    """A `Trainer` whose loss is the divergence of attention probabilities, and the error of attention outputs."""

    def __init__(
        self,
        model: PreTrainedModel,
        dense: PreTrainedModel,
        watched: tuple[_Watched, _Watched],
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
        self.dense, self.watched = dense.eval().to(arguments.device), watched
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:
        model.eval()
        return _loss(model, self.dense, inputs, self.watched)


def _loss(model: nn.Module, dense: nn.Module, batch: Batch, watched: tuple[_Watched, _Watched]) -> Tensor:
    """Run both models on a batch; return the divergence of attention probabilities plus the error of outputs."""
    with torch.no_grad():
        dense(**batch)
    model(**batch)
    calls = list(zip(*(part.take() for part in watched), strict=True))
    divergences = [
        kl_divergence(here.probs, there.probs, here.real)
        for here, there in calls
        if here.probs is not None and there.probs is not None
    ]
    errors = [
        _output_error(here.added, there.added, here.real)
        for here, there in calls
        if here.added is not None and there.added is not None
    ]
    return torch.stack([torch.stack(losses).mean() for losses in (divergences, errors) if losses]).sum()


def _first(batches: list[Batch]) -> Batch:
    return batches[0]
