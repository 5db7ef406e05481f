"""Train a converted model towards the dense one, on inputs without labels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from collab_compress.errors import UnsupportedModelError, check_type

LOGITS = ("logits", "start_logits", "end_logits")  # outputs of heads, those of question answering by token


class DistillationTrainer(Trainer):  # type: ignore[misc]
    r"""A Transformers `Trainer` whose loss is the distance of a model's outputs from a teacher's.

    The loss of a batch is the relative squared error of the last hidden states h, and of the logits z that a head
    makes of them:

    $$\frac{\sum \|h - h_\text{teacher}\|^2}{\sum \|h_\text{teacher}\|^2} +
    \frac{\sum \|z - z_\text{teacher}\|^2}{\sum \|z_\text{teacher}\|^2}$$

    Sums are over tokens that `attention_mask` counts, in float32. Logits are matched as in "Do Deep Nets Really Need
    to be Deep?" (Ba and Caruana, 2014), hidden states as in TinyBERT (Jiao et al., 2020). Labels are not read, and
    both models run in evaluation mode, without dropout and gradient checkpointing. Evaluation is that of a `Trainer`.

    Args:
        args: as `Trainer` takes them, a model first.
        teacher: the dense model, which reads the same inputs. It is moved to the device that trains.
        kwargs: as `Trainer` takes them.

    Raises:
        UnsupportedModelError: the model is an encoder–decoder or its own teacher, the teacher is no model, or the
            shapes of outputs or of `attention_mask` do not fit.

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
        if self.model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} is an encoder–decoder; DistillationTrainer trains models with one "
                "stack of layers, so fine-tune it on labels"
            )
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
        read = {name: value for name, value in inputs.items() if name not in {"labels", *self.label_names}}
        outputs = model(**read, output_hidden_states=True)
        with torch.no_grad():
            wanted = self.teacher(**read, output_hidden_states=True)
        loss = distance(outputs, wanted, read.get("attention_mask"))
        return (loss, outputs) if return_outputs else loss


def distance(outputs: Mapping[str, Any], teacher: Mapping[str, Any], mask: Tensor | None = None) -> Tensor:
    """Return the sum of relative squared errors of the last hidden states (B, T, D) and of all logits.

    Tokens where `mask` (B, T) is 0 are left out. Raises UnsupportedModelError where shapes differ.
    """
    pairs = {"hidden states": (outputs["hidden_states"][-1], teacher["hidden_states"][-1])}
    pairs |= {name: (outputs[name], teacher[name]) for name in LOGITS if name in outputs}
    errors = []
    for name, pair in pairs.items():
        values, wanted = (tensor.float() for tensor in pair)
        if values.shape != wanted.shape:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in (values, wanted))
            raise UnsupportedModelError(f"the {name} of the model and of its teacher have the shapes {shapes}")
        if mask is not None and (name != "logits" or values.dim() > 2):  # of tokens
            if mask.shape != values.shape[:2]:
                raise UnsupportedModelError(
                    f"attention_mask has the shape {tuple(mask.shape)}, and the {name} {tuple(values.shape)}; such "
                    "models cannot be distilled"
                )
            values, wanted = values[mask.bool()], wanted[mask.bool()]
        errors.append((values - wanted).square().sum() / wanted.square().sum())
    return torch.stack(errors).sum()
