"""Modules that are decomposed several at a time, in threads: interrupts, gradients and the default device."""

import signal
import threading
import time

import pytest
import torch
from tiny_families import make_rotary

from collab_compress import Compression, CompressionError, Solver, compress
from collab_compress.architectures import FAMILIES
from collab_compress.architectures.sites import find_dense_attention
from collab_compress.conversion import plan

NAMES = ["bert", "phi"]
ENDLESS = 10**6  # sweeps: minutes, of the smallest matrices


def make(make_tiny, name):
    return make_rotary(name) if name == "phi" else make_tiny(name)


@pytest.fixture
def interrupt():
    """Interrupt this process a little later, as Ctrl-C does; gives when it was."""
    times, main = [], threading.main_thread().ident

    def now():
        times.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, now)
    timer.start()
    yield times
    timer.cancel()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("two_threads", "decomposed_anew")
def test_an_interrupt_ends_all_at_once(make_tiny, batch, interrupt):
    model = make_tiny("bert")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        compress(model, Compression(dk=8, solver=Solver(sweeps=ENDLESS, tolerance=0.0)), [batch, batch])
    assert time.monotonic() - interrupt[0] < 5
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
    assert torch.get_num_threads() == 2
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.usefixtures("two_threads", "decomposed_anew")
@pytest.mark.parametrize("place", [0, 1])
def test_an_error_in_one_ends_the_others(place, make_tiny, batch, monkeypatch):
    """Whichever fails: waiting for the first does not hide the error of the second."""
    model, factorize = make_tiny("bert"), plan.factorize
    fails = find_dense_attention(model, FAMILIES)[place].query_heads()

    def failing(query_heads, *given, **options):
        if torch.equal(query_heads, fails):
            raise ValueError("no")
        return factorize(query_heads, *given, **options)

    monkeypatch.setattr(plan, "factorize", failing)
    started = time.monotonic()
    with pytest.raises(CompressionError, match="no"):
        compress(model, Compression(dk=8, solver=Solver(sweeps=ENDLESS, tolerance=0.0)), [batch, batch])
    assert time.monotonic() - started < 60


@pytest.mark.usefixtures("two_threads", "decomposed_anew")
@pytest.mark.parametrize("name", NAMES)
def test_threads_build_no_graphs_and_keep_to_the_models_device(name, make_tiny, batch, monkeypatch):
    """Gradients and the default device are each thread's own, and a new thread has neither set."""
    compression = Compression(dk=8, dv=12, solver=Solver(sweeps=3))
    expected = make(make_tiny, name)
    compress(expected, compression, [batch, batch])
    threads = set()
    for function in ("factorize", "factorize_rotary", "narrow_values"):
        monkeypatch.setattr(plan, function, watched(getattr(plan, function), threads))
    found = make(make_tiny, name)
    torch.set_default_device("meta")
    try:
        compress(found, compression, [batch, batch])
    finally:
        torch.set_default_device(None)
    assert threads - {threading.main_thread().ident}
    for (key, tensor), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), key
    assert all(parameter.requires_grad for parameter in found.parameters())
    assert all(parameter.grad_fn is None for parameter in found.parameters())


def watched(function, threads):
    def watch(*given, **options):
        threads.add(threading.get_ident())
        result = function(*given, **options)
        values = [*vars(result).values(), *vars(getattr(result, "factors", result)).values()]
        assert not any(value.requires_grad for value in values if isinstance(value, torch.Tensor))
        return result

    return watch
