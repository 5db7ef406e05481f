"""What modules of a model read while it runs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def recorded_inputs(model: nn.Module, batch: Mapping[str, Tensor], modules: Mapping[str, nn.Module]):
    """Run a model on a batch; return the name of each module → the first argument of each of its calls."""
    inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0]))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return inputs
