"""Run a function in two processes that train together on the CPU, forked, so that they need not import anew."""

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState


def run_both(function: Callable[..., Any], *arguments: Any, seconds: float = 240) -> list[Any]:
    """Call `function(rank, *arguments)` in both and return their results; an error in one fails the test."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    processes = [
        context.Process(target=_run, args=(rank, port, results, function, arguments), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    returned: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, failure, result = results.get(timeout=seconds)
            assert failure is None, f"process {rank}: {failure}"
            returned[rank] = torch.load(io.BytesIO(result), weights_only=False)
    finally:
        for process in processes:
            process.join(timeout=20 if len(returned) == 2 else 0)
            if process.is_alive():
                process.kill()
    return [returned[rank] for rank in range(2)]


def _run(rank: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    try:
        torch.distributed.init_process_group("gloo")
        buffer = io.BytesIO()
        torch.save(function(rank, *arguments), buffer)  # as bytes, for shared memory is freed when the process ends
        results.put((rank, None, buffer.getvalue()))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        results.close()
        results.join_thread()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def sharding_on_cpus() -> Iterator[None]:
    """Let Accelerate shard on CPUs, as PyTorch can; by itself it shards on accelerators only."""
    stock = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        stock(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            for state in (self, PartialState()):
                state.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = stock
