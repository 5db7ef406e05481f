"""Rivals: known ways to make feed-forward blocks narrower without retraining, to N neurons in every layer.

* `kwon`: "A Fast Post-Training Pruning Framework for Transformers" (Kwon et al., 2022): the Fisher information of
  masks on labelled data, rearranged by its off-diagonal entries, then one scalar for each neuron; for each head too
  if heads are removed.
* `k-prune`: "Accurate Retraining-free Pruning for Pretrained Encoder-based Language Models" (Park et al., 2024): what
  a neuron adds to its block's output, and the effect of its mask on the model's, measured again for each block.
* `flap`: "Fluctuation-based Adaptive Structured Pruning for Large Language Models" (An et al., 2024): the variance of
  what a neuron adds; the mean of the loss goes into the bias.
* `grail`: "GRAIL: Post-hoc Compensation by Linear Reconstruction for Compressed Networks" (Tang et al., 2026):
  Wanda's neurons; a ridge regression rebuilds the others from them, in the model that is narrow so far.
* `magnitude`: the norm of the weights into a neuron times the norm of those out of it.
* `random`: any neurons, in our own conversion (`chosen_by`).
* `wanda`: the norm of a neuron's activations times that of its weights out ("A Simple and Effective Pruning Approach
  for Large Language Models", Sun et al., 2024, for whole neurons), in our own conversion.

All get what our conversion gets: the same batches, from the lowest layer up, and the dense model's residual stream as
the target. K-prune and magnitude are refitted as ours is, with attention's output projections; FLAP can be.
Models of the BERT family, and MPNet, are changed in place; the width in their config stays, and removed heads become
zeros. `chosen_by` takes models of any family.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, mse_loss

from collab_compress.calibration import Batch
from collab_compress.calibration.batches import split_held_back
from collab_compress.conversion.sequential import DAMPINGS, inverse_squares
from collab_compress.factorization.least_squares import ResidualMoments
from collab_compress.factorization.moments import damped_

KINDS = ("kwon", "k-prune", "flap", "grail", "magnitude")
RIDGE = 1e-3  # GRAIL's, of the mean variance
TEMPERATURE, REPRESENTATION = 2.0, 2.5e-4  # K-prune's: of the divergence, and the weight of a block's output


@dataclass(frozen=True)
class Block:
    """A feed-forward block whose neurons are to be chosen, or attention whose heads are."""

    index: int  # of its layer
    layer: Any  # of the model that gets narrower
    weight: Tensor  # of the linear layer that adds to the residual stream, transposed, (N, D), in float64
    moments: ResidualMoments  # of the activations, and of the error of the residual stream


Choose = Callable[[Block], Tensor]
"""Returns the neurons, or the channels of heads, to keep, in ascending order."""

Tune = Callable[[ResidualMoments, ResidualMoments, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Returns the changes of Wᵀ (N, D), which make all but the neurons to keep zero, and of the bias (D,).
Arguments: moments to fit to, held-back moments, Wᵀ (N, D), the neurons to keep."""

Step = tuple[Choose, Tune]
"""What is done to one part of every layer."""

Loss = Callable[[Any, Mapping[str, Any]], Tensor]


def narrow_blocks_(
    kind: str,
    model: Any,
    width: int,
    batches: Sequence[Batch],
    *,
    heads: int | None = None,
    labelled: tuple[Iterable[Mapping[str, Any]], Loss | None, int] | None = None,
    refitted: bool = False,
) -> None:
    """Narrow all feed-forward blocks to `width` neurons as a rival does, in place.

    `kwon` keeps `heads` of each layer (None keeps all, without scalars), and `labelled` are its last arguments of
    `mask_gradients`; `refitted` says whether `flap` is refitted as ours is.
    """
    if kind == "kwon":
        assert labelled is not None
        narrow_(model, batches, kwon(model, width, heads, labelled), cls_only=True)
        return
    score: Callable[[Block], Tensor]
    if kind == "k-prune":
        with torch.no_grad():
            targets = [outputs_of(model, batch) for batch in batches]
        score = partial(knowledge, model=model, batches=batches, targets=targets)
    else:
        score = {"flap": fluctuation, "grail": partial(fluctuation, centred=False), "magnitude": magnitude}[kind]
    own: dict[str, Tune] = {"flap": refit if refitted else folded, "grail": reconstructed}
    tune = own.get(kind, refit)
    steps: dict[str, Step] = {"attention": (every, refit)} if tune is refit else {}
    steps["feed-forward"] = (lambda block: largest(score(block), width), tune)
    narrow_(model, batches, steps)


@contextmanager
def chosen_by(kind: str, seed: int = 0) -> Iterator[None]:
    """Let conversions choose neurons as `wanda` or `random` does, and do all else as they do."""
    generator = torch.Generator().manual_seed(seed)

    def moments(used: ResidualMoments, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return used.moments(centred=False)[0], weight

    def choose(second: Tensor, weight: Tensor, count: int) -> Tensor:
        if kind == "random":
            return largest(torch.rand(len(weight), generator=generator), count)
        return largest(contributions(second, weight), count)

    with patch.multiple("collab_compress.conversion.sequential", choice_moments=moments, choose_neurons=choose):
        yield


def kwon(model: Any, width: int, heads: int | None, labelled: tuple[Any, ...]) -> dict[str, Step]:
    """Return what Kwon et al. do to both parts of a layer; None keeps all heads, without scalars."""
    layers = model.base_model.encoder.layer
    linears = [output_of(layer, part).dense for part in ("feed-forward", "attention") for layer in layers]
    gradients = mask_gradients(model, linears, *labelled)
    steps: dict[str, Step] = {"feed-forward": (lambda block: rearranged(gradients[block.index], width), scaled)}
    if heads is not None:
        size = model.config.hidden_size // model.config.num_attention_heads

        def choose(block: Block) -> Tensor:
            of_heads = gradients[len(layers) + block.index].unflatten(1, (-1, size)).sum(2)
            return (rearranged(of_heads, heads)[:, None] * size + torch.arange(size)).flatten()

        steps["attention"] = (choose, partial(scaled, size=size))
    return steps


@dataclass
class Pass:
    """One batch on its way through both models."""

    hidden: Tensor  # states in the model that gets narrower, (B, T, D)
    dense: Tensor  # states in the dense model, (B, T, D)
    mask: Tensor  # added to attention scores, (B, 1, 1, T), or (B, H, T, T) with MPNet's biases of positions
    fitted: Tensor  # tokens to fit to, (B, T)

    @classmethod
    def of(cls, model: Any, batch: Batch) -> "Pass":
        """Return the embeddings of a batch."""
        hidden = model.base_model.embeddings(batch["input_ids"], batch.get("token_type_ids"))
        mask = batch["attention_mask"].bool()
        added = torch.where(mask, 0.0, torch.finfo(hidden.dtype).min)[:, None, None]
        if model.config.model_type == "mpnet":
            added = added + model.base_model.encoder.compute_position_bias(hidden)
        return cls(hidden, hidden, added, mask)


@torch.no_grad()
def narrow_(model: Any, batches: Sequence[Batch], steps: Mapping[str, Step], *, cls_only: bool = False) -> None:
    """Choose neurons of every block, or heads, and tune the remaining weights, from the lowest layer up, in place.

    A part without a step ("feed-forward" or "attention") stays as it is. With `cls_only` a classifier's last block is
    fitted to the first tokens alone, the only ones it reads.
    """
    dense = copy.deepcopy(model)
    used, held_back = split_held_back(batches)
    passes = [Pass.of(model, batch) for batch in (*used, *held_back)]
    layers = list(zip(model.base_model.encoder.layer, dense.base_model.encoder.layer, strict=True))
    for index, (layer, dense_layer) in enumerate(layers):
        for part in ("attention", "feed-forward"):
            output, dense_output = output_of(layer, part), output_of(dense_layer, part)
            if cls_only and part == "feed-forward" and index == len(layers) - 1 and model is not model.base_model:
                for step in passes:
                    step.fitted = torch.arange(step.fitted.shape[1]).eq(0).expand_as(step.fitted)
            moments, inputs = (ResidualMoments(), ResidualMoments()), []
            weighted = part in steps and steps[part][1] is refit  # our fit weighs tokens, those of the papers do not
            for place, step in enumerate(passes):
                inputs.append(inputs_of(layer, part, step.hidden, step.mask))
                target = dense_output.dense(inputs_of(dense_layer, part, step.dense, step.mask)) + step.dense
                error = target - output.dense(inputs[-1]) - step.hidden
                weights = inverse_squares(target[step.fitted]) if weighted else None
                moments[place >= len(used)].add(inputs[-1][step.fitted], error[step.fitted], weights)
                step.dense = dense_output.LayerNorm(target)
            if part in steps:
                choose, tune = steps[part]
                weight = output.dense.weight.mT.double()
                kept = choose(Block(index, layer, weight, moments[0]))
                change, shift = tune(*moments, weight, kept)
                output.dense.weight.copy_((weight + change).mT)
                if shift is not None:
                    output.dense.bias.add_(shift)
                if part == "feed-forward":
                    cut_(layer.intermediate.dense, kept, 0)
                    cut_(output.dense, kept, 1)
                    inputs = [read[..., kept] for read in inputs]
            for read, step in zip(inputs, passes, strict=True):
                step.hidden = output.LayerNorm(output.dense(read) + step.hidden)


def inputs_of(layer: Any, part: str, hidden: Tensor, mask: Tensor) -> Tensor:
    """Return what the last linear layer of attention, or of the feed-forward block, reads, (B, T, N)."""
    inputs: Tensor
    if part == "feed-forward":
        inputs = layer.intermediate(hidden)
    elif hasattr(layer.attention, "self"):
        inputs = layer.attention.self(hidden, mask)[0]
    else:  # MPNet projects within
        read: list[Tensor] = []
        with layer.attention.attn.o.register_forward_pre_hook(lambda _, args: read.append(args[0])):
            layer.attention.attn(hidden, mask)
        inputs = read[0]
    return inputs


def output_of(layer: Any, part: str) -> Any:
    """Return the module that adds to the residual stream, or for MPNet's attention its parts by BERT's names."""
    if part == "attention" and hasattr(layer.attention, "attn"):
        return SimpleNamespace(dense=layer.attention.attn.o, LayerNorm=layer.attention.LayerNorm)
    return layer.attention.output if part == "attention" else layer.output


def cut_(linear: nn.Linear, kept: Tensor, axis: int) -> None:
    """Keep these outputs (axis 0) or inputs (axis 1) of a linear layer, in place."""
    linear.weight = nn.Parameter(linear.weight.index_select(axis, kept))
    if axis == 0:
        linear.bias = nn.Parameter(linear.bias[kept])
    linear.out_features, linear.in_features = linear.weight.shape


# Which neurons stay


def every(block: Block) -> Tensor:
    """Return the indices of all neurons."""
    return torch.arange(len(block.weight))


def largest(scores: Tensor, width: int) -> Tensor:
    """Return the indices of the largest scores, in ascending order."""
    return scores.topk(width).indices.sort().values


def contributions(second: Tensor, weight: Tensor) -> Tensor:
    """Return E[a_j²] ‖w_j‖² of each neuron j, the square of Wanda's score, from E[a aᵀ] (N, N) and Wᵀ (N, D)."""
    return second.diagonal() * weight.square().sum(1)


def fluctuation(block: Block, centred: bool = True) -> Tensor:
    """Return var(a_j) ‖w_j‖² of each neuron j, or E[a_j²] ‖w_j‖² if not `centred`."""
    return contributions(block.moments.moments(centred=centred)[0], block.weight)


def magnitude(block: Block) -> Tensor:
    """Return the norm of the weights into each neuron times the norm of those out of it."""
    first = block.layer.intermediate.dense.weight.double()
    norms: Tensor = first.norm(dim=1) * block.weight.norm(dim=1)
    return norms


def knowledge(block: Block, model: Any, batches: Sequence[Batch], targets: Sequence[Tensor]) -> Tensor:
    """Return K-prune's score of each neuron j: the effect of its mask on the model, and what it adds to the block.

        Σ_batches ½ (∂L/∂m_j)² / sequences + λ E[a_j²] mean_d(w_jd²)

    where L is the KL divergence of a classifier's probabilities from the dense model's, or the mean squared error of
    grades and vectors, whose dense ones are the `targets`.
    """
    is_classes = model is not model.base_model and targets[0].shape[1] > 1
    predictive = torch.zeros(len(block.weight), dtype=torch.float64)
    for batch, target in zip(batches, targets, strict=True):
        gate = torch.ones(len(block.weight), requires_grad=True)
        with torch.enable_grad(), gated([block.layer.output.dense], [gate]):
            outputs = outputs_of(model, batch)
            loss = divergence(outputs, target) if is_classes else mse_loss(outputs, target)
        predictive += torch.autograd.grad(loss, gate)[0].double().square() / 2
    added = fluctuation(block, centred=False) / block.weight.shape[1]
    return predictive / sum(map(len, targets)) + REPRESENTATION * added


def outputs_of(model: Any, batch: Batch) -> Tensor:
    """Return the logits of a classifier, or the mean-pooled vectors of an encoder, (B, C)."""
    outputs = model(**batch)
    if model is not model.base_model:
        logits: Tensor = outputs.logits
        return logits
    return mean_pooled(outputs.last_hidden_state, batch["attention_mask"])


def mean_pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average hidden states (B, T, D) over the tokens that are not padding, (B, D)."""
    weights = mask.unsqueeze(-1)
    return (hidden * weights).sum(1) / weights.sum(1)


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the KL divergence of the probabilities of logits (B, C), at K-prune's temperature."""
    logs = [(one / TEMPERATURE).log_softmax(-1) for one in (logits, targets)]
    return kl_div(logs[0], logs[1], log_target=True, reduction="batchmean") * TEMPERATURE**2


@contextmanager
def gated(linears: Iterable[nn.Linear], gates: Iterable[Tensor]) -> Iterator[None]:
    """Multiply the inputs of linear layers by gates that broadcast to (B, T, N)."""

    def times(gate: Tensor) -> Callable[[Any, Any], Any]:
        return lambda _, args: args[0] * gate

    handles = [linear.register_forward_pre_hook(times(gate)) for linear, gate in zip(linears, gates, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def mask_gradients(
    model: Any,
    linears: Sequence[nn.Linear],
    batches: Iterable[Mapping[str, Any]],
    loss: Loss | None = None,
    rows: int = 1,
) -> list[Tensor]:
    """Return for each linear layer the gradients ∂L_s/∂m of its inputs' masks, one row for each sample s, (S, N).

    `loss` returns one number for each row of a labelled batch, (B,); so many successive `rows` form a sample.
    """
    collected: list[list[Tensor]] = [[] for _ in linears]
    for batch in batches:
        samples = len(batch["input_ids"]) // rows
        gates = [torch.ones(samples, 1, linear.in_features, requires_grad=True) for linear in linears]
        with torch.enable_grad(), gated(linears, [gate.repeat_interleave(rows, 0) for gate in gates]):
            outputs = model(**batch)
            total = outputs.loss * samples if loss is None else loss(outputs, batch).sum() / rows
        for gradients, gradient in zip(collected, torch.autograd.grad(total, gates), strict=True):
            gradients.append(gradient.squeeze(1).double())
    return [torch.cat(gradients) for gradients in collected]


def rearranged(gradients: Tensor, width: int) -> Tensor:
    """Return the neurons to keep so that Σ_s (Σ_removed g_sj)², the Fisher information of the removed ones, is small.

    Start with those of the largest Σ_s g_sj². Then move each of them, the least first, to the removed ones, and take
    back the one whose return leaves the least information (Kwon et al., 3.2). The gradients are (S, N).
    """
    information = gradients.mT @ gradients
    order = information.diagonal().argsort()
    removed = order[: len(order) - width]
    with_removed = information[removed].sum(0)
    for neuron in order[len(removed) :] if len(removed) else ():
        removed, with_removed = torch.cat([removed, neuron[None]]), with_removed + information[neuron]
        without = (information.diagonal() - 2 * with_removed)[removed]  # less the information of all of them
        returned = removed[without.argmin()]
        removed, with_removed = removed[removed != returned], with_removed - information[returned]
    return torch.ones(len(order)).index_fill(0, removed, 0.0).nonzero()[:, 0]


# Weights of the neurons that stay


def lost(weight: Tensor, kept: Tensor) -> Tensor:
    """Return the weights (N, D) of removed neurons, and zeros for kept ones."""
    return weight.index_fill(0, kept, 0.0)


def refit(
    used: ResidualMoments, held_back: ResidualMoments, weight: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Fit all weights and the bias again, as our conversion does."""
    second, crossed = used.moments(centred=True)
    wanted = (crossed + second @ lost(weight, kept))[kept]
    mean, residual = used.means()
    fits = []
    for damping in DAMPINGS:
        change = torch.linalg.solve(damped_(second[kept][:, kept], damping), wanted)
        change = (-lost(weight, kept)).index_copy(0, kept, change)
        fits.append((change, residual - mean @ change))
    return min(fits, key=lambda fitted: held_back.squared_error(*fitted))


def scaled(
    used: ResidualMoments, held_back: ResidualMoments, weight: Tensor, kept: Tensor, size: int = 1
) -> tuple[Tensor, None]:
    """Multiply the weights of each neuron, or of `size` channels, by a scalar (Kwon et al., 3.3).

    It is fitted by least squares damped towards 1.
    """
    second, crossed = used.moments(centred=False)
    crossed = crossed + second @ lost(weight, kept)
    products = (second * (weight @ weight.mT))[kept][:, kept]
    products = products.unflatten(0, (-1, size)).unflatten(2, (-1, size)).sum((1, 3))
    target = (crossed * weight).sum(1)[kept].unflatten(0, (-1, size)).sum(1)
    changes = []
    for damping in DAMPINGS:
        damped = products + damping * products.diagonal().mean() * torch.eye(len(target), dtype=torch.float64)
        scalars = torch.linalg.solve(damped, target).repeat_interleave(size)  # minus 1
        changes.append((-lost(weight, kept)).index_copy(0, kept, scalars[:, None] * weight[kept]))
    return min(changes, key=lambda change: held_back.squared_error(change, None)), None


def folded(used: ResidualMoments, _: ResidualMoments, weight: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the weights of kept neurons; the mean output of the others goes into the bias."""
    removed = lost(weight, kept)
    return -removed, used.means()[0] @ removed


def reconstructed(used: ResidualMoments, _: ResidualMoments, weight: Tensor, kept: Tensor) -> tuple[Tensor, None]:
    """Rebuild all neurons from the kept ones by ridge regression, and multiply by their weights (GRAIL)."""
    second = used.moments(centred=False)[0]
    of_kept = damped_(second[kept][:, kept], RIDGE)
    return (-weight).index_copy(0, kept, torch.linalg.solve(of_kept, second[kept] @ weight) - weight[kept]), None
