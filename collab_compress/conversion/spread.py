"""Share the decomposition of a model's modules between processes, and what each has found between them all."""

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import broadcast, gather_object
from torch import Tensor

from collab_compress.architectures import DenseSite
from collab_compress.conversion.plan import Planned, empty_parts
from collab_compress.errors import CompressionError
from collab_compress.processes import processes


def plan_together(sites: Sequence[DenseSite], plan: Callable[[Sequence[DenseSite]], list[Planned]]) -> list[Planned]:
    """Let each process plan some of the modules, and give all of them the plans of all modules, in order.

    Args:
        sites: modules of the model, which every process has.
        plan: what one process does for its modules.

    Raises:
        CompressionError: the plan of another process fails; in that process, what it failed with.
    """
    state = processes()
    rank, count = state.process_index, state.num_processes
    mine: list[Planned] = []
    error: Exception | None = None
    try:
        mine = plan(sites[rank::count]) if sites[rank::count] else []
    except Exception as found:  # whatever it is, the others wait for this process
        error = found
    failed = [message for message in gather_object([None if error is None else str(error)]) if message is not None]
    if error is not None:
        raise error
    if failed:
        raise CompressionError(failed[0])
    own = {planned.site.name: planned for planned in mine}
    described: dict[str, Any] = {
        name: (spec, report)
        for name, spec, report in gather_object([(item.site.name, item.spec, item.report) for item in mine])
    }
    planned = []
    for place, site in enumerate(sites):
        spec, report = described[site.name]
        item = own.get(site.name) or Planned(site, spec, empty_parts(site, spec), report)
        for tensor in _tensors(item):
            sent = tensor.to(state.device)  # where processes can reach each other
            tensor.copy_(broadcast(sent, place % count))
        planned.append(item)
    return planned


def _tensors(planned: Planned) -> list[Tensor]:
    """What a process has to be told, as the memory that holds it."""
    parts = planned.parts
    return [parts.query.proj.weight.data, parts.key.proj.weight.data, parts.mixing.data]
