"""Train a converted model towards the dense one, on inputs without labels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from collab_compress.architectures import transformers_model
from collab_compress.calibration.encode import is_one_of
from collab_compress.errors import UnsupportedModelError, check_type
from collab_compress.transformers_parts import UNLABELLED

TOKENS = 256  # whose probabilities are compared at a time
EPS = 1e-6  # added to the mean square of a token's hidden states
HIDDEN = {
    "hidden_states": "attention_mask",
    "encoder_hidden_states": "attention_mask",
    "decoder_hidden_states": "decoder_attention_mask",
}
"""Output with the hidden states of a stack → mask of its tokens."""


class DistillationTrainer(Trainer):  # type: ignore[misc]
    r"""A Transformers `Trainer` whose loss is the distance of a model from a teacher.

    Of a model that Transformers lists for causal language modelling it is the Kullback–Leibler divergence of its
    probabilities p of the next token from the teacher's,

    $$\sum_v p_\text{teacher}(v) \ln(p_\text{teacher}(v) / p(v)),$$

    and its mean over tokens (Hinton et al., 2015, at temperature 1).

    Of any other model it is the relative squared error of the hidden states h of a token after a layer,

    $$\frac{\|h - h_\text{teacher}\|^2}{\|h_\text{teacher}\|^2},$$

    and its mean over layers and tokens, as in TinyBERT (Jiao et al., 2020). Of a stack with fewer layers than the
    teacher's, only the last hidden states are compared; heads stay as they are.

    Both are computed in float32, at the tokens that `attention_mask` (of decoders that read an encoder,
    `decoder_attention_mask`) counts. Labels are not read, but for the tokens that such a decoder reads. Both models
    run in evaluation mode, without dropout and gradient checkpointing. Evaluation is that of a `Trainer`.

    Args:
        args: as `Trainer` takes them, a model first.
        teacher: the dense model, which reads the same inputs. It is moved to the device that trains.
        kwargs: as `Trainer` takes them.

    Raises:
        UnsupportedModelError: the model is its own teacher, the teacher is no model, outputs lack what is
            compared, or the shapes of that or of masks do not fit.

    Example:
        >>> from copy import deepcopy
        >>> from tempfile import TemporaryDirectory
        >>> from transformers import TrainingArguments
        >>> with TemporaryDirectory() as folder:
        ...     arguments = TrainingArguments(folder, report_to="none", use_cpu=True)
        ...     trainer = DistillationTrainer(model, arguments, teacher=deepcopy(model))
        >>> trainer.compute_loss(model.train(), batch).item()
        0.0
    """

    def __init__(self, *args: Any, teacher: PreTrainedModel, **kwargs: Any) -> None:
        check_type("teacher", teacher, nn.Module, UnsupportedModelError)
        super().__init__(*args, **kwargs)
        if teacher is self.model:
            raise UnsupportedModelError(
                "the teacher is the model that is trained; conversions change a model in place, so pass a copy of "
                "the dense one, or load it again"
            )
        self.teacher = teacher.to(self.args.device).eval()
        self.model_accepts_loss_kwargs = False  # the trainer divides the loss by the passes of a step

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Compute the distance from the teacher while the model trains, and otherwise what a `Trainer` does."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        model.eval()  # without dropout; the trainer calls `train` before each pass
        read = self._without_labels(inputs)
        outputs = model(**read, output_hidden_states=True)
        with torch.no_grad():
            wanted = self.teacher(**read, output_hidden_states=True)
        loss = (divergence if self._predicts_tokens(outputs) else distance)(outputs, wanted, read)
        return (loss, outputs) if return_outputs else loss

    def _predicts_tokens(self, outputs: Mapping[str, Any]) -> bool:
        """Return whether the model is a language model, with logits of each token."""
        try:
            language = is_one_of(transformers_model(self.model), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        except UnsupportedModelError:  # of no Transformers model
            return False
        return language and outputs["logits"].shape[:2] == outputs["hidden_states"][-1].shape[:2]

    def _without_labels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs without labels; a decoder that reads an encoder reads them shifted, as in training."""
        read = {name: value for name, value in inputs.items() if name not in {"labels", *self.label_names}}
        labels = inputs.get("labels")
        if self.model.config.is_encoder_decoder and labels is not None and labels.dim() == 2:  # tokens, not classes
            if "decoder_input_ids" not in read:
                read["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
            read.setdefault("decoder_attention_mask", labels.ne(UNLABELLED).long())
        return read


def divergence(outputs: Mapping[str, Any], teacher: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
    """Return the Kullback–Leibler divergence of probabilities from a teacher's, given logits (B, T, V).

    It is the mean over tokens; those where `attention_mask` (B, T) of the inputs is 0 are left out. Raises
    UnsupportedModelError where shapes differ. Some tokens are computed at a time, and again in the backward pass, so
    that little is held beside the logits.
    """
    ours, theirs = _of_both("logits", outputs, teacher)
    counted = _tokens("logits", ours, theirs, "attention_mask", inputs.get("attention_mask")).flatten()
    parts = zip(
        *(values.flatten(0, 1).split(TOKENS) for values in (ours, theirs)), counted.split(TOKENS), strict=True
    )
    sums = [checkpoint(_divergences, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / counted.sum()


def _divergences(ours: Tensor, theirs: Tensor, counted: Tensor) -> Tensor:
    """Return the sum of the divergences of some tokens, given their logits (n, V) and which count (n,)."""
    logs, wanted = (values[counted].float().log_softmax(-1) for values in (ours, theirs))
    return kl_div(logs, wanted, reduction="sum", log_target=True)


def distance(outputs: Mapping[str, Any], teacher: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
    """Return the relative squared error of hidden states (B, T, D), its mean over tokens and then over layers.

    Of a stack that has not as many as the teacher's only the last ones are compared. Tokens where a mask (B, T) of
    the inputs is 0 are left out. Raises UnsupportedModelError where shapes differ.
    """
    errors = []
    for name, mask_name in HIDDEN.items():
        if name not in outputs:
            continue
        ours, theirs = _of_both(name, outputs, teacher)
        first = 1 if len(ours) == len(theirs) else -1  # the first of all are the embeddings
        for values, wanted in zip(ours[first:], theirs[first:], strict=True):
            counted = _tokens(name, values, wanted, mask_name, inputs.get(mask_name))
            values, wanted = values[counted].float(), wanted[counted].float()
            errors.append(((values - wanted).square().mean(-1) / (wanted.square().mean(-1) + EPS)).mean())
    if not errors:
        raise UnsupportedModelError("the model's outputs hold no hidden states, so it cannot be distilled")
    return torch.stack(errors).mean()


def _of_both(name: str, outputs: Mapping[str, Any], teacher: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return an output of both models."""
    if name not in teacher:
        raise UnsupportedModelError(f"the model has {name}, and its teacher has none; pass the dense model")
    return outputs[name], teacher[name]


def _tokens(name: str, values: Tensor, wanted: Tensor, mask_name: str, mask: Tensor | None) -> Tensor:
    """Return which tokens of an output (B, T, D) count, (B, T) bool, if it and that of the teacher fit."""
    shape = tuple(values.shape)
    if values.shape != wanted.shape:
        theirs = tuple(wanted.shape)
        raise UnsupportedModelError(f"{name} of the model and of its teacher have the shapes {shape} and {theirs}")
    if mask is None:
        return torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    if mask.shape != values.shape[:2]:
        raise UnsupportedModelError(
            f"{mask_name} has the shape {tuple(mask.shape)}, and {name} {shape}; such models cannot be distilled"
        )
    return mask.bool()
