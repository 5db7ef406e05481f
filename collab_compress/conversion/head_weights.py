r"""How much an error in a head's scores changes what its layer adds to the residual stream, to first order.

With attention probabilities $p_{ij}$, values $v_j$, head output $o_i = \sum_j p_{ij} v_j$ and the head's rows O of
the output projection, errors $\delta s_{ij}$ of the scores change what the head adds by
$\sum_j p_{ij} \delta s_{ij} (v_j - o_i) O$. Of independent errors with variance 1 the mean square is

$$w^2 = E_i \sum_j p_{ij}^2 \|(v_j - o_i) O\|^2$$

which is small for a head that attends to tokens without content, and large for one that picks few tokens and adds
much.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite
from collab_compress.attention.install import HeadCall, add_head_hook_, for_each_head, remove_head_hook_
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import sequence_count
from collab_compress.calibration.gather import AttentionMasks, batch_masks, masks_of, resize_mask

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
    watchers = [_Watcher(site) for site in sites]
    with evaluation_mode(model):
        try:
            for watcher in watchers:
                add_head_hook_(watcher.site.module, watcher)
            for batch in batches[:: max(1, sum(map(sequence_count, batches)) // ENOUGH)]:
                masks = batch_masks(model, batch)
                for watcher in watchers:
                    watcher.masks = masks_of(watcher.site, masks)
                run_batch(model, batch)
        finally:
            for watcher in watchers:
                remove_head_hook_(watcher.site.module, watcher)
    return {watcher.site.name: watcher.weights() for watcher in watchers}


class _Watcher:
    """A hook that adds up w² of one module's heads."""

    needs_probs = True

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.masks = AttentionMasks(None, None)
        self.squares = torch.zeros(site.heads, dtype=torch.float64, device="cpu")

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        assert call.probs is not None
        values = for_each_head(call.value, self.site.heads)
        squares = _squares(call.probs, values, outputs.transpose(1, 2), self._gram(values.shape[-1]))
        for dim, mask in ((2, self.masks.query), (3, self.masks.key)):
            mask = resize_mask(mask, squares.shape[dim])
            if mask is not None and mask.shape == (squares.shape[0], squares.shape[dim]):
                squares = squares * mask.to(squares.device).unsqueeze(1).unsqueeze(5 - dim)
        self.squares += squares.sum((0, 2, 3)).cpu().double()
        return outputs

    def _gram(self, width: int) -> Tensor | None:
        """Return O·Oᵀ of each head, (H, s, s); None if the output projection is no plain layer."""
        output = self.site.part(self.site.family.output)
        if type(output) not in (nn.Linear, Conv1D):
            return None
        weight: Tensor = output.weight if isinstance(output, Conv1D) else output.weight.mT
        if len(weight) != self.site.heads * width:
            return None
        heads = weight.detach().reshape(self.site.heads, width, -1)
        return heads @ heads.mT

    def weights(self) -> Tensor | None:
        """Return w (H,) with mean square 1; None if no head adds anything."""
        mean = self.squares.mean()
        if not bool(torch.isfinite(mean)) or float(mean) <= 0:
            return None
        return (self.squares / mean + LEAST).sqrt()


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
