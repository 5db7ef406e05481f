r"""How much an error in a head's scores changes what its layer adds to the residual stream, to first order.

With attention probabilities $p_{ij}$, values $v_j$, head output $o_i = \sum_j p_{ij} v_j$ and the head's rows O of
the output projection, errors $\delta s_{ij}$ of the scores change what the head adds by
$\sum_j p_{ij} \delta s_{ij} (v_j - o_i) O$. Of independent errors with variance 1 the mean square is

$$w^2 = E_i \sum_j p_{ij}^2 \|(v_j - o_i) O\|^2$$

which is small for a head that attends to tokens without content, and large for one that picks few tokens and adds
much.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite
from collab_compress.attention.install import HeadCall, for_each_head
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import sample_sequences
from collab_compress.calibration.gather import AttentionMasks, MaskKind, batch_masks, masks_of, resize_mask
from collab_compress.heads.hooks import HeadHooks

ENOUGH = 128  # sequences, for one number a head
LEAST = 1e-3  # of the heads' mean square: every head's scores count


def head_weights(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batches: Sequence[Batch]
) -> dict[str, Tensor | None]:
    """Return the weight w of each head's score errors, by their first-order effect on the residual stream.

    Args:
        model: dense; left in the mode it was in.
        sites: attention modules of `model`. One that serves several layers (ALBERT) pools them.
        batches: keyword arguments for the model, of which enough, evenly spaced, are run; padding does not count.

    Returns:
        Path of each module → w (H,) in float64 with mean square 1; None if no head adds anything.

    Raises:
        CalibrationError: the model does not take such batches.
    """
    if not sites or not batches:
        return {}
    with evaluation_mode(model), HeadWeights(sites) as watcher:
        for batch in sample_sequences(batches, ENOUGH):
            watcher.masks = batch_masks(model, batch)
            run_batch(model, batch)
    return watcher.weights()


class HeadWeights(HeadHooks):
    """The weights of `head_weights`, summed while modules run inside a `with` block.

    Args:
        sites: dense attention modules.
    """

    needs_probs = True
    masks: Mapping[MaskKind, AttentionMasks] = {}
    """Masks of the batch that runs next."""

    def __init__(self, sites: Sequence[AttentionSite]) -> None:
        self._tokens = {site.name: 0 for site in sites}
        self._squares = {site.name: torch.zeros(site.heads, dtype=torch.float64, device="cpu") for site in sites}
        self._add(sites)

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Add w² of one call of a module."""
        assert call.probs is not None
        values = for_each_head(call.value, site.heads)
        squares = _squares(call.probs, values, outputs.transpose(1, 2), _gram(site, values.shape[-1]))
        masks = masks_of(site, self.masks)
        for dim, mask in ((2, masks.query), (3, masks.key)):
            mask = resize_mask(mask, squares.shape[dim])
            if mask is not None and mask.shape == (squares.shape[0], squares.shape[dim]):
                squares = squares * mask.to(squares.device).unsqueeze(1).unsqueeze(5 - dim)
        self._squares[site.name] += squares.sum((0, 2, 3)).cpu().double()
        mask = resize_mask(masks.query, outputs.shape[1])
        self._tokens[site.name] += outputs.shape[0] * outputs.shape[1] if mask is None else int(mask.sum())
        return outputs

    def mean_squares(self) -> dict[str, float]:
        """Return the mean of w² over the heads of each module, for one token."""
        return {name: float(squares.mean()) / max(1, self._tokens[name]) for name, squares in self._squares.items()}

    def weights(self) -> dict[str, Tensor | None]:
        """Return the weights by path of the module, as `head_weights`."""
        return {name: _normalised(squares) for name, squares in self._squares.items()}


def _gram(site: AttentionSite, width: int) -> Tensor | None:
    """Return O·Oᵀ of each head, (H, s, s); None if the output projection is no plain layer."""
    output = site.part(site.family.output)
    if type(output) not in (nn.Linear, Conv1D):
        return None
    weight: Tensor = output.weight if isinstance(output, Conv1D) else output.weight.mT
    if len(weight) != site.heads * width:
        return None
    heads = weight.detach().reshape(site.heads, width, -1)
    return heads @ heads.mT


def _normalised(squares: Tensor) -> Tensor | None:
    """Return w (H,) with mean square 1 of sums of w²; None if no head adds anything."""
    mean = squares.mean()
    if not bool(torch.isfinite(mean)) or float(mean) <= 0:
        return None
    return (squares / mean + LEAST).sqrt()


def _squares(probs: Tensor, values: Tensor, outputs: Tensor, gram: Tensor | None) -> Tensor:
    """Return p² ‖(v − o) O‖² of each query and key, (B, H, T, S); `gram` is O·Oᵀ (H, s, s), None for the identity."""
    probs, values, outputs = (
        probs.float(),
        values.float(),
        outputs.float(),
    )  # (B, H, T, S), (B, H, S, s), (B, H, T, s)
    projected = values if gram is None else values @ gram.float()
    distance = (projected * values).sum(-1).unsqueeze(2) - 2 * outputs @ projected.mT
    distance = distance + ((outputs if gram is None else outputs @ gram.float()) * outputs).sum(-1, keepdim=True)
    return probs.square() * distance.clamp_min(0)
