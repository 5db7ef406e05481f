"""Rotate heads during training: Multi-Head Rotation, epoch by epoch."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, AttentionSite, Kind, find_attention, transformers_model
from collab_compress.errors import HeadError
from collab_compress.heads.blocks import head_blocks
from collab_compress.heads.importance import average_distance, confidence
from collab_compress.heads.pairing import PAIRINGS
from collab_compress.heads.rotation import RotationOptions, as_pairs
from collab_compress.heads.swap import Pair, check_optimizer, matched_blocks, swap_heads_


@dataclass(frozen=True)
class RotationEvent:
    """Heads that swapped places at the start of an epoch.

    Args:
        epoch: from 0.
        reason: whether they were swapped, or swapped back.
        pairs: the heads.
    """

    epoch: int
    reason: Literal["swap", "swap-back"]
    pairs: tuple[Pair, ...]


class Rotator:
    """Swap heads of a model at the epochs that a `RotationOptions` names (Multi-Head Rotation, §3.1).

    Between epochs the model is always a whole one, which can be saved as it is: a swap changes weights only.

    Args:
        model: stock or edited, whole or sharded by FSDP2; not its `DistributedDataParallel` wrapper.
        rotation: which heads swap, and when.

    Raises:
        HeadError: the model does not have the heads that the strategy needs, or they cannot be swapped, as under
            FSDP1 and ZeRO-3.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """

    def __init__(self, model: PreTrainedModel, rotation: RotationOptions) -> None:
        self.model, self.rotation = transformers_model(model), rotation
        self.history: list[RotationEvent] = []
        self._pairing = PAIRINGS[rotation.strategy]
        self._latest: int | None = None  # epoch that `epoch` was last called for
        self._swapped: tuple[Pair, ...] = ()  # what is to be swapped back
        self._due = 0  # epoch to swap it back
        self._awake = 0  # first epoch after the rest
        matched_blocks(model, rotation.pairs)
        for sites in self._sites().values():
            for site in sites if not rotation.pairs else ():
                head_blocks(site, 0)
            zeros = {site.name: torch.zeros(site.heads) for site in sites}
            self._pairing.pair(rotation, sites, zeros, 0)
            for site in sites[1:] if self._pairing.crosses else ():
                matched_blocks(model, [((sites[0].name, 0), (site.name, 0))])

    def epoch(
        self, epoch: int, optimizer: Any = None, batches: Iterable[Mapping[str, Tensor]] | None = None
    ) -> tuple[RotationEvent, ...]:
        """Swap what is due at the start of an epoch; nothing if it has begun before, as after resuming.

        Every process of a distributed training must call it; where importance decides, it is measured on the batches
        of all of them, so that all swap the same heads. Where FSDP shards the model, each must give as many batches.

        Args:
            epoch: from 0.
            optimizer: whose state moves with the heads, as for `swap_heads_`.
            batches: held-out data that importance is measured on, if the strategy looks at it and swaps now.

        Returns:
            What was done, also added to `history`.

        Raises:
            HeadError: the epoch lies before one that has already begun, importance cannot be measured, or
                `swap_heads_` refuses.
            CalibrationError: the model does not take such batches.
        """
        if self._latest is not None and epoch < self._latest:
            raise HeadError(
                f"epoch {epoch} comes after epoch {self._latest}; when training resumes from a checkpoint, give a "
                "new Rotator the state saved with it"
            )
        if epoch == self._latest:
            return ()
        before = len(self.history)
        if self._swapped and epoch >= self._due:
            self._swap(RotationEvent(epoch, "swap-back", self._swapped), optimizer)
            self._swapped, self._awake = (), epoch + self.rotation.rest
        if epoch in self.rotation.epochs and not self._swapped and epoch >= self._awake:
            pairs = self._choose(epoch, batches)
            self._swap(RotationEvent(epoch, "swap", pairs), optimizer)
            if self.rotation.swap_back_after is not None:
                self._swapped, self._due = pairs, epoch + self.rotation.swap_back_after
        self._latest = epoch
        return tuple(self.history[before:])

    def check(self, optimizer: Any) -> None:
        """Refuse, before training, an optimizer whose state could not move with the heads.

        Raises:
            HeadError: it does not step the parameters of heads that may swap.
        """
        pairs = [block for blocks in matched_blocks(self.model, self.rotation.pairs) for block in blocks]
        sites = [] if self.rotation.pairs else [site for sites in self._sites().values() for site in sites]
        check_optimizer(optimizer, pairs + [block for site in sites for block in head_blocks(site, 0)])

    def state_dict(self) -> dict[str, Any]:
        """Describe in JSON types all that a resumed training needs beside the model's and optimizer's own states."""
        return {
            "latest": self._latest,
            "swapped": self._swapped,
            "due": self._due,
            "awake": self._awake,
            "history": [asdict(event) for event in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; swaps nothing, for weights saved with it are swapped already.

        Raises:
            HeadError: the state is none, or names heads that this model does not have.
        """
        try:
            latest, due, awake = state["latest"], int(state["due"]), int(state["awake"])
            swapped = as_pairs(state["swapped"])
            events = [RotationEvent(e["epoch"], e["reason"], as_pairs(e["pairs"])) for e in state["history"]]
        except (KeyError, TypeError, ValueError) as error:
            raise HeadError(
                f"cannot read the state of a Rotator ({error!r}); pass what its state_dict() gave"
            ) from error
        matched_blocks(self.model, swapped)
        self._latest, self._swapped, self._due, self._awake, self.history = latest, swapped, due, awake, events

    def _swap(self, event: RotationEvent, optimizer: Any) -> None:
        swap_heads_(self.model, event.pairs, optimizer)
        self.history.append(event)

    def _sites(self) -> dict[Kind, list[AttentionSite]]:
        """Modules of each kind that rotates, by layer."""
        if self.rotation.strategy == "manual":
            sites = find_attention(self.model, FAMILIES)
        else:
            sites = find_attention(self.model, FAMILIES, kinds=self.rotation.kinds)
        return {kind: [site for site in sites if site.kind == kind] for kind in dict.fromkeys(s.kind for s in sites)}

    def _choose(self, epoch: int, batches: Iterable[Mapping[str, Tensor]] | None) -> tuple[Pair, ...]:
        scores = self._measure(epoch, batches) if self._pairing.measures else {}
        pairs = [
            pair
            for sites in self._sites().values()
            for pair in self._pairing.pair(self.rotation, sites, scores, epoch)
        ]
        return tuple(pairs)  # the same in all processes, which measure together

    def _measure(self, epoch: int, batches: Iterable[Mapping[str, Tensor]] | None) -> dict[str, Tensor]:
        if batches is None:
            raise HeadError(
                f"strategy {self.rotation.strategy!r} swaps heads by importance at epoch {epoch} and got no batches; "
                "pass batches=, of held-out data"
            )
        measure = confidence if self.rotation.importance == "confidence" else average_distance
        return measure(self.model, batches, exclude=self.rotation.exclude, kinds=self.rotation.kinds, together=True)
