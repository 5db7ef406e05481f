"""Modules decomposed in groups and threads."""

import copy
import signal
import threading
import time

import pytest
import torch
from tiny_families import make_rotary
from transformers import BertModel

from collab_compress import Compression, CompressionError, Solver, compress
from collab_compress.architectures import find_dense_attention
from collab_compress.calibration import gather_moments
from collab_compress.conversion import plan


@pytest.fixture
def dense(make_tiny, tmp_path):
    config = copy.deepcopy(make_tiny("bert").config)
    config.num_hidden_layers = 3
    torch.manual_seed(0)
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path)
    return model


def test_moments_of_a_few_modules_at_a_time(dense, calibration, monkeypatch):
    """Two modules fit and a third does not: the same conversion, with at most two modules' moments at a time."""
    together = copy.deepcopy(dense)
    compress(together, Compression(dk=7), calibration)
    groups = []

    def watched(model, sites, batches):
        groups.append([site.name for site in sites])
        return gather_moments(model, sites, batches)

    monkeypatch.setattr(plan, "gather_moments", watched)
    monkeypatch.setattr(plan, "STATISTICS_SHARE", 0)
    monkeypatch.setattr(plan, "STATISTICS_BYTES", 2 * 8 * 24**2)
    names = [site.name for site in find_dense_attention(dense)]
    compress(dense, Compression(dk=7), calibration)
    assert groups == [names[:2], names[2:]]
    assert all(torch.equal(value, together.state_dict()[name]) for name, value in dense.state_dict().items())


def test_modules_decomposed_at_once_are_as_those_in_turn(dense, calibration, monkeypatch, two_threads):
    """Each in its own thread; progress is reported in order, and the number of threads is restored."""
    in_turn, reported, threads = copy.deepcopy(dense), [], set()
    with monkeypatch.context() as patch:
        patch.setattr(plan, "AT_ONCE", 1)
        compress(in_turn, Compression(dk=7, dv=12, solver=Solver(sweeps=2)), calibration)
    real = plan._decompose

    def watched(*args):
        threads.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return real(*args)

    monkeypatch.setattr(plan, "_decompose", watched)
    report = compress(
        dense,
        Compression(dk=7, dv=12, solver=Solver(sweeps=2)),
        calibration,
        progress=lambda *report: reported.append(report),
    )
    assert threads == {(False, 1)}
    assert torch.get_num_threads() == 2
    names = [module.name for module in (*report.modules, *report.values)]
    assert reported[:7] == [*((name, done, 6) for done, name in enumerate(names)), ("", 6, 6)]
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(value, in_turn.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_an_error_of_one_module_ends_all_and_gives_threads_back(dense, calibration, monkeypatch, two_threads):
    def broken(*_, **__):
        raise ValueError("this cannot be decomposed")

    monkeypatch.setattr(plan, "factorize", broken)
    with pytest.raises(CompressionError, match=r"layer\.0\.attention\.self: this cannot be decomposed"):
        compress(dense, Compression(dk=7), calibration)
    assert torch.get_num_threads() == 2


@pytest.fixture
def two_threads():
    """Let PyTorch use two threads on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


NAMES = ["bert", "phi"]
ENDLESS = 10**6  # sweeps, which take minutes even for the smallest matrices


def make(make_tiny, name):
    return make_rotary(name) if name == "phi" else make_tiny(name)


@pytest.fixture
def interrupt():
    """Interrupt this process after a moment, as Ctrl-C does; yield the time of the interrupt."""
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
        compress(model, Compression(dk=8, solver=Solver(sweeps=ENDLESS)), [batch, batch])
    assert time.monotonic() - interrupt[0] < 5
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
    assert torch.get_num_threads() == 2
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.usefixtures("two_threads", "decomposed_anew")
@pytest.mark.parametrize("place", [0, 1])
def test_an_error_in_one_ends_the_others(place, make_tiny, batch, monkeypatch):
    """Waiting for the first does not hide the error of the second, nor the other way round."""
    model, factorize = make_tiny("bert"), plan.factorize
    fails = find_dense_attention(model)[place].query_heads()

    def failing(query_heads, *arguments, **options):
        if torch.equal(query_heads, fails):
            raise ValueError("no")
        return factorize(query_heads, *arguments, **options)

    monkeypatch.setattr(plan, "factorize", failing)
    started = time.monotonic()
    with pytest.raises(CompressionError, match="no"):
        compress(model, Compression(dk=8, solver=Solver(sweeps=ENDLESS)), [batch, batch])
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
    model = make(make_tiny, name)
    torch.set_default_device("meta")
    try:
        compress(model, compression, [batch, batch])
    finally:
        torch.set_default_device(None)
    assert threads - {threading.main_thread().ident}
    for (key, tensor), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), key
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad_fn is None for parameter in model.parameters())


def watched(function, threads):
    def watch(*arguments, **options):
        threads.add(threading.get_ident())
        result = function(*arguments, **options)
        values = [*vars(result).values(), *vars(getattr(result, "factors", result)).values()]
        assert not any(value.requires_grad for value in values if isinstance(value, torch.Tensor))
        return result

    return watch
