"""Models for search: converted, saved, loaded and compared in every kind that Sentence Transformers has.

Tiny models of random weights show that nothing is lost on the way; they say nothing about quality.
"""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from collab_compress_cli import start
from commands import ran
from tiny_words import bert_config, sentences, word_tokenizer
from torch import nn
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel, LlamaConfig, LlamaModel

from collab_compress import Compression, Solver, compress, is_converted

library = pytest.importorskip("sentence_transformers", minversion="6")
modules = pytest.importorskip("sentence_transformers.base.modules")
pooled = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
sparse = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
vectors = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")

COMPRESSION = Compression(dk=12, dv=12, dff=16, solver=Solver(sweeps=1))
OPTIONS = ("--dk", 12, "--dv", 12, "--dff", 16, "--sweeps", 1)
DATA, TEXTS = sentences(64), [*sentences(5, seed=3), "red cat"]  # of two lengths, so that batches are padded
PROMPTS = {"query": "red cat sings ", "document": "blue "}
TASKS = ("query", "document")
WIDTH = 24


@pytest.fixture
def backbone(tmp_path):
    def backbone(model_class=BertModel, seed=0, task="feature-extraction", **options):
        """Return the Transformer module of a tiny model of random weights."""
        torch.manual_seed(seed)
        tokenizer = word_tokenizer()
        if model_class is LlamaModel:
            sizes = {"num_attention_heads": 3, "num_hidden_layers": 2, "initializer_range": 0.4, "hidden_size": WIDTH}
            sizes |= {"intermediate_size": 32, "max_position_embeddings": 40, "pad_token_id": tokenizer.pad_token_id}
            config = LlamaConfig(vocab_size=len(tokenizer), **sizes)
        else:
            config = bert_config(tokenizer, num_labels=1)
        folder = tmp_path / f"backbone-{model_class.__name__}-{seed}"
        for part in (model_class(config), tokenizer):
            part.save_pretrained(folder)
        return modules.Transformer(str(folder), transformer_task=task, **options)

    return backbone


def sentence_model(*parts):
    return library.SentenceTransformer(modules=list(parts), prompts=PROMPTS, device="cpu")


def first_token(backbone):
    return sentence_model(backbone(), pooled.Pooling(WIDTH, "cls"), modules.Normalize())


def dense_layer(backbone):
    transformer = backbone()
    return sentence_model(transformer, pooled.Pooling(WIDTH), modules.Dense(WIDTH, 12))  # not normalised


def last_token(backbone):
    """Return a decoder as instruct models are: padded on the left, with prompts that are read but not pooled."""
    transformer = backbone(LlamaModel)
    transformer.tokenizer.padding_side = "left"
    pooling = pooled.Pooling(WIDTH, "lasttoken", include_prompt=False)
    return sentence_model(transformer, pooling, modules.Normalize())


def splade(backbone):
    transformer = backbone(BertForMaskedLM, task="fill-mask")
    return library.SparseEncoder(modules=[transformer, sparse.SpladePooling()], device="cpu")


def splade_of_documents(backbone):
    transformer = backbone(BertForMaskedLM, task="fill-mask")
    queries = [sparse.SparseStaticEmbedding(tokenizer=transformer.tokenizer)]
    router = modules.Router.for_query_document(queries, [transformer, sparse.SpladePooling()])
    return library.SparseEncoder(modules=[router], device="cpu")


def late_interaction(backbone, **options):
    transformer = backbone(query_length=16, **options)
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    projection = modules.Dense(WIDTH, 12, bias=False, activation_function=nn.Identity(), **names)
    parts = [transformer, projection, vectors.MultiVectorMask(), modules.Normalize()]
    return library.MultiVectorEncoder(modules=parts, prompts=PROMPTS, device="cpu")


def expanded_queries(backbone, attend=False):
    """Return a model as ColBERT is: queries are filled up with a token that is scored, but to which none attends."""
    expansion = {"strategy": "fixed", "length": 12, "attend": attend, "token": "never"}
    return late_interaction(backbone, query_expansion=expansion)


def encoded(model):
    """Return the embeddings of queries and of documents, in one list."""
    found = []
    for encode in (model.encode_query, model.encode_document):
        is_stacked = not isinstance(model, library.MultiVectorEncoder)
        embeddings = encode(TEXTS, **({"convert_to_tensor": True} if is_stacked else {}))
        found += [part.to_dense() if part.is_sparse else part for part in embeddings]
    return found


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def distance(some, others):
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(
    "make",
    [first_token, dense_layer, last_token, splade, splade_of_documents, late_interaction, expanded_queries],
)
def test_converted_in_place_and_by_the_command(make, backbone, tmp_path, capsys):
    model, dense = make(backbone), tmp_path / "dense"
    kind = type(model)
    before = encoded(model)
    model.save_pretrained(str(dense))
    compress(model, COMPRESSION, DATA)
    after = encoded(model)
    assert distance(before, after) > 0.05
    model.save_pretrained(str(tmp_path / "saved"))
    again = kind(str(tmp_path / "saved"), device="cpu")
    if make is last_token:  # which fast tokenizers do not store
        again.tokenizer.padding_side = "left"
    assert_same(encoded(again), after)
    assert again.prompts == model.prompts
    if not (dense / "config.json").is_file():  # a Router's
        return
    (tmp_path / "texts.txt").write_text("\n".join(DATA), encoding="utf-8")
    data = ("--calibration", tmp_path / "texts.txt", "--output", tmp_path / "command")
    code, printed, error = ran(start.compress, (dense, *OPTIONS, *data), capsys)
    assert code == 0, error
    assert f'model = {kind.__name__}("{tmp_path / "command"}")' in printed
    loaded = kind(str(tmp_path / "command"), device="cpu")
    if make is last_token:
        loaded.tokenizer.padding_side = "left"
    assert_same(encoded(loaded), after)


@pytest.mark.parametrize("attend", [False, True])
def test_tokens_that_queries_are_filled_up_with_are_exact_at_full_width(attend, backbone):
    model = expanded_queries(backbone, attend)
    before = encoded(model)
    assert {len(query) for query in before[: len(TEXTS)]} == {12}
    report = compress(model, Compression(dk=WIDTH), calibration=None)
    assert is_converted(model)
    assert report.of("dk")
    for one, other in zip(before, encoded(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_a_reranker_is_printed_as_one(backbone, tmp_path, capsys):
    folder = backbone(BertForSequenceClassification, task="sequence-classification").model.config._name_or_path
    library.CrossEncoder(folder, device="cpu").save_pretrained(str(tmp_path / "dense"))
    arguments = (tmp_path / "dense", "--dff", 16, "--calibration", "synthetic", "--output", tmp_path / "out")
    code, printed, error = ran(start.compress, arguments, capsys)
    assert code == 0, error
    assert f'    model = CrossEncoder("{tmp_path / "out"}")' in printed
    assert 'model = CrossEncoder("out")' in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def towers(backbone):
    """Return the modules of a converted and of a dense model that were one."""
    converted, dense = ([backbone(), pooled.Pooling(WIDTH), modules.Normalize()] for _ in range(2))
    compress(converted[0], COMPRESSION, DATA)
    return converted, dense


def test_the_index_of_the_dense_model_stays(towers, tmp_path):
    converted, dense = (sentence_model(*parts) for parts in towers)
    router = modules.Router.for_query_document(list(converted.children()), list(dense.children()))
    options = {"prompts": dense.prompts, "similarity_fn_name": dense.similarity_fn_name}
    model = library.SentenceTransformer(modules=[router], device="cpu", **options)
    model.save_pretrained(str(tmp_path / "router"))
    same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for one in (model, library.SentenceTransformer(str(tmp_path / "router"), device="cpu")):
        for size in (None, 8):  # Matryoshka
            queries = one.encode_query(TEXTS, truncate_dim=size)
            assert queries.shape == (len(TEXTS), size or WIDTH)
            same(queries, converted.encode_query(TEXTS, truncate_dim=size))
            same(one.encode_document(TEXTS, truncate_dim=size), dense.encode_document(TEXTS, truncate_dim=size))
        same(one.encode(TEXTS), dense.encode(TEXTS))
    assert np.abs(dense.encode_query(TEXTS) - converted.encode_query(TEXTS)).max() > 0.05


def test_one_tower_of_a_router(backbone, tmp_path, capsys):
    """In memory, and by the command on its folder, whose result takes the folder's place."""
    parts = [[backbone(seed=seed), pooled.Pooling(WIDTH)] for seed in (1, 2)]
    model = sentence_model(modules.Router.for_query_document(*parts))
    folder = tmp_path / "router"
    model.save_pretrained(str(folder))
    before = encoded(model)
    names = [str(folder / f"{task}_0_Transformer") for task in sorted(TASKS)]
    code, _, error = ran(start.compress, (folder, "--output", tmp_path / "out"), capsys)
    assert code == 2
    assert f"it holds models in {', '.join(names)}: pass one of them, and put the result in its place\n" in error
    compress(model[0].sub_modules["query"][0], COMPRESSION, DATA)
    after = encoded(model)
    count = len(TEXTS)
    assert_same(before[count:], after[count:])
    assert distance(before[:count], after[:count]) > 0.05

    (tmp_path / "texts.txt").write_text("\n".join(DATA), encoding="utf-8")
    data = ("--calibration", tmp_path / "texts.txt", "--output", tmp_path / "tower")
    code, _, error = ran(start.compress, (names[1], *OPTIONS, *data), capsys)
    assert code == 0, error
    shutil.rmtree(names[1])
    shutil.move(tmp_path / "tower", names[1])
    assert_same(encoded(library.SentenceTransformer(str(folder), device="cpu")), after)
    model.save_pretrained(str(tmp_path / "saved"))
    assert_same(encoded(library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")), after)
