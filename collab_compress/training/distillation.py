"""Train a converted model towards the dense one, on inputs without labels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from collab_compress.errors import UnsupportedModelError, check_type
from collab_compress.transformers_parts import UNLABELLED

LOGITS = ("logits", "start_logits", "end_logits")  # outputs of heads, those of question answering by token
HIDDEN = {
    "hidden_states": "attention_mask",
    "encoder_last_hidden_state": "attention_mask",
    "decoder_hidden_states": "decoder_attention_mask",
}
"""Output that holds hidden states → mask of its tokens."""


class DistillationTrainer(Trainer):  # type: ignore[misc]
    r"""A Transformers `Trainer` whose loss is the distance of a model's outputs from a teacher's.

    The loss of a batch is the relative squared error of the last hidden states h, of an encoder–decoder those of
    both, and of the logits z that a head makes of them:

    $$\frac{\sum \|h - h_\text{teacher}\|^2}{\sum \|h_\text{teacher}\|^2} +
    \frac{\sum \|z - z_\text{teacher}\|^2}{\sum \|z_\text{teacher}\|^2}$$

    Sums are over tokens that `attention_mask` (of decoders that read an encoder, `decoder_attention_mask`) counts, in
    float32. Logits are matched as in "Do Deep Nets Really Need
    to be Deep?" (Ba and Caruana, 2014), hidden states as in TinyBERT (Jiao et al., 2020). Labels are not read,
    but for the tokens that such a decoder reads. Both models run in evaluation mode, without dropout and gradient
    checkpointing. Evaluation is that of a `Trainer`.

    Args:
        args: as `Trainer` takes them, a model first.
        teacher: the dense model, which reads the same inputs. It is moved to the device that trains.
        kwargs: as `Trainer` takes them.

    Raises:
        UnsupportedModelError: the model is its own teacher, the teacher is no model, or the shapes of outputs or of
            masks do not fit.

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
        loss = distance(outputs, wanted, read)
        return (loss, outputs) if return_outputs else loss

    def _without_labels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs without labels; a decoder that reads an encoder reads them shifted, as in training."""
        read = {name: value for name, value in inputs.items() if name not in {"labels", *self.label_names}}
        labels = inputs.get("labels")
        if self.model.config.is_encoder_decoder and labels is not None and labels.dim() == 2:  # tokens, not classes
            if "decoder_input_ids" not in read:
                read["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
            read.setdefault("decoder_attention_mask", labels.ne(UNLABELLED).long())
        return read


def distance(outputs: Mapping[str, Any], teacher: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
    """Return the sum of relative squared errors of the last hidden states (B, T, D) and of all logits.

    Tokens where a mask (B, T) of the inputs is 0 are left out. Raises UnsupportedModelError where shapes differ.
    """
    of_logits = HIDDEN["decoder_hidden_states" if "decoder_hidden_states" in outputs else "hidden_states"]
    masks = {name: mask for name, mask in HIDDEN.items() if name in outputs} | dict.fromkeys(LOGITS, of_logits)
    errors = []
    for name, mask_name in masks.items():
        if name not in outputs:
            continue
        words, mask = name.replace("_", " "), inputs.get(mask_name)
        if name not in teacher:
            raise UnsupportedModelError(f"the model gives {words}, and its teacher gives none; pass the dense model")
        values, wanted = (_last(of_model[name]).float() for of_model in (outputs, teacher))
        if values.shape != wanted.shape:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in (values, wanted))
            raise UnsupportedModelError(f"the {words} of the model and of its teacher have the shapes {shapes}")
        if mask is not None and (name != "logits" or values.dim() > 2):  # of tokens
            if mask.shape != values.shape[:2]:
                raise UnsupportedModelError(
                    f"{mask_name} has the shape {tuple(mask.shape)}, and the {words} {tuple(values.shape)}; such "
                    "models cannot be distilled"
                )
            values, wanted = values[mask.bool()], wanted[mask.bool()]
        errors.append((values - wanted).square().sum() / wanted.square().sum())
    return torch.stack(errors).sum()


def _last(output: Any) -> Tensor:
    """Return a tensor, or the last of several."""
    return output if isinstance(output, Tensor) else output[-1]
