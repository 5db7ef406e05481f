"""Trim the vocabulary of a model and its tokenizer, in place and all or nothing."""

import copy
import gc
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import tokenizer_of, transformers_model
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.calibration.batches import evenly_spaced
from collab_compress.calibration.builtin import builtin_texts, why_not_english
from collab_compress.calibration.encode import encode
from collab_compress.calibration.files import Text, read_texts, texts_of
from collab_compress.calibration.gather import forward_arguments
from collab_compress.calibration.source import kinds_of, reads_tokens_alone
from collab_compress.checkpoint import all_or_nothing, is_quantized
from collab_compress.checkpoint.edits import built_shapes, configs_inside, models_in, shapes_of
from collab_compress.errors import CalibrationError, CompressionError, UnsupportedModelError, one_line
from collab_compress.heads.sharding import refuse_unwritable
from collab_compress.vocabulary.tokens import Vocabulary, reload

_logger = logging.getLogger(__name__)

Texts: TypeAlias = str | Path | Sequence[Text]

HELD_BACK = 8  # one text in so many is not counted
PROBE_TOKENS = 16  # that the model reads before and after
STATES_RTOL = 1e-3  # error of the hidden states on them, relative to the largest
SIZE_NAMES = ("vocab_size", "decoder_vocab_size", "n_words", "num_embeddings", "out_features")
NAMES_IDS = re.compile(
    r"(token_ids?|token_index|^(pad|bos|eos|unk|mask)_index|padding_idx|suppress_tokens|(bad|force)_words_ids"
    r"|sequence_bias|(lang|task|lang_code)_to_id|lang_to_code_id|forced_decoder_ids)$"
)
"""Names of settings and attributes that hold ids of tokens."""
MAY_NAME_IDS = re.compile(r"(^|_)(ids?|codes?|lang(uage)?s?)(_|$)|2id|id2")
"""Parts of the names of generation settings that may hold ids of tokens."""


@dataclass(frozen=True)
class VocabularyReport:
    """What trimming a vocabulary removes, and what it does to texts that were not counted.

    Args:
        tokens_before: number of rows of the input embeddings.
        tokens_after: the same, afterwards.
        parameters_before: number of parameters of the model.
        parameters_after: the same, afterwards.
        texts: number of texts held back.
        same: how many of these keep their tokens.
        length: number of tokens in all of them, as a multiple of what it was.
    """

    tokens_before: int
    tokens_after: int
    parameters_before: int
    parameters_after: int
    texts: int
    same: int
    length: float

    def __str__(self) -> str:
        share = self.parameters_after / self.parameters_before - 1
        return (
            f"Of the vocabulary of {self.tokens_before:,} tokens {self.tokens_after:,} stay; parameters "
            f"{self.parameters_before:,} → {self.parameters_after:,} ({share:+.1%}).\n"
            f"{self.same} of {self.texts} held-back texts keep their tokens, and so their hidden states; all have "
            f"{self.length - 1:+.1%} tokens."
        )


@torch.inference_mode(False)
def trim_vocabulary_(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    texts: Texts | tuple[Texts, ...] = "builtin",
    *,
    tokens: int | Iterable[str],
) -> VocabularyReport:
    """Keep some tokens of `tokenizer` and their rows of the embeddings of `model`, in place and all or nothing.

    Special and added tokens stay, single characters or bytes, tokens that the config names, then the most frequent
    tokens of the texts, then the first ones in the tokenizer's own order. A text whose tokens all stay has the same
    hidden states. Any other text is divided into more tokens, and is never unknown where it was not before. Both are
    checked, on the held-back texts and on a few tokens that the model reads. Ids keep their order. Rows of the
    embeddings without a token are removed. Both stay ordinary: save them with `save_pretrained`. Changed parameters
    are new objects: make an optimizer afterwards.

    Args:
        model: reads texts; a Transformers model, or a SentenceTransformer that holds one.
        tokenizer: of the model, a fast one; not needed for a SentenceTransformer.
        texts: what is counted, but for an eighth: "builtin" (English texts that come with the package), a file or a
            data set (`read_texts`), or a list of texts and text pairs; a tuple is several of these together.
        tokens: how many stay, or which, as the tokenizer writes them ("##ing", "Ġthe").

    Returns:
        Sizes, and how the held-back texts changed.

    Raises:
        CompressionError: too few tokens for those that must stay, or no fewer than before; a token that there is not;
            a slow tokenizer, or one of another kind; embeddings with fewer rows than tokens; a quantized or a sharded
            model.
        CalibrationError: there are no texts, or the tokenizer does not know the language of the built-in ones.
        UnsupportedModelError: the model has no plain embeddings, or other weights of the vocabulary's size; it is
            part of a model that holds such weights; a generation setting may hold ids in a form that is not known.
    """
    if tokenizer is None:
        tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise CompressionError(
            f"{type(model).__name__} comes without its tokenizer, whose tokens are to be chosen; save that beside "
            "the model's files, or, in Python, pass tokenizer=…"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CompressionError(f"tokenizer is a {type(tokenizer).__name__}; expected the fast tokenizer of the model")
    model = transformers_model(model)
    refuse_unwritable(model, "trim_vocabulary_", CompressionError)
    vocabulary = Vocabulary(tokenizer)
    size = _count_rows(model)
    _refuse_body(model, size)
    if max(vocabulary.tokens) >= size:
        raise CompressionError(
            f"the tokenizer has token {max(vocabulary.tokens)}, but {type(model).__name__} has embeddings of {size} "
            "tokens; the tokenizer is not this model's"
        )
    _refuse_unknown_ids(model, size)
    named: set[int] = set()
    for _, name, value in _settings(model):
        _change_ids(name, value, named.add)
    named &= set(range(size))
    counted, held_back = _split(texts, tokenizer)
    kept = _choose(vocabulary, tokens, vocabulary.must_stay(named), _encode(tokenizer, counted))
    rows = [*sorted(kept), *sorted(named - vocabulary.tokens.keys())]
    new = {old: index for index, old in enumerate(rows)}
    trimmed = reload(tokenizer, vocabulary.reduce({old: new[old] for old in kept}), new)
    if trimmed.get_vocab() != {vocabulary.tokens[old]: new[old] for old in kept}:
        raise CompressionError(
            f"{type(tokenizer).__name__} gives tokens other ids than its tokenizer.json; load it as a "
            "PreTrainedTokenizerFast first"
        )
    before, after = _encode(tokenizer, held_back), _encode(trimmed, held_back)
    same = _count_unchanged(before, after, new, tokenizer.unk_token_id)
    parameters = model.num_parameters()
    probe = evenly_spaced(sorted(kept - set(tokenizer.all_special_ids)), PROBE_TOKENS)
    attributes = vars(trimmed) | {"name_or_path": tokenizer.name_or_path}
    with all_or_nothing(model), _restored_on_errors(tokenizer):
        states = _states(model, probe)
        _cut_(model, size, rows, new)
        changed = _states(model, [new[number] for number in probe])
        states = states[..., rows] if states.shape[-1] == size else states  # logits
        if not torch.allclose(states, changed, rtol=0, atol=STATES_RTOL * float(states.abs().max())):
            raise UnsupportedModelError(
                f"{type(model).__name__} computes something else with a smaller vocabulary, so it depends on the ids "
                "of tokens in a way that is not known here; keep its vocabulary"
            )
        _refuse_other_sizes(model, size)
        vars(tokenizer).clear()
        vars(tokenizer).update(attributes)
    length = sum(map(len, after)) / max(1, sum(map(len, before)))
    return VocabularyReport(size, len(rows), parameters, model.num_parameters(), len(before), same, length)


@contextmanager
def _restored_on_errors(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Restore the attributes of a tokenizer if the block fails or is interrupted."""
    before = dict(vars(tokenizer))
    try:
        yield
    except BaseException:
        vars(tokenizer).clear()
        vars(tokenizer).update(before)
        raise


def _split(
    texts: Texts | tuple[Texts, ...], tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the texts to count, and those held back."""
    rows = [row for source in kinds_of(texts, "texts") for row in _read(source, tokenizer)]
    singles = list(chain.from_iterable((row,) if isinstance(row, str) else row for row in rows))
    held_back = singles[HELD_BACK - 1 :: HELD_BACK]
    counted = [text for index, text in enumerate(singles) if (index + 1) % HELD_BACK]
    return counted, held_back or counted


def _read(texts: Any, tokenizer: PreTrainedTokenizerBase) -> list[Text]:
    """Return the texts of one source."""
    if isinstance(texts, str) and texts == "builtin":
        if (reason := why_not_english(tokenizer)) is not None:
            raise CalibrationError(f"the built-in texts are English, and {reason}; pass texts")
        return builtin_texts(pairs=False)
    if isinstance(texts, str | Path):
        rows, notes = read_texts(texts)
    elif isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise CalibrationError(f"texts is {texts!r:.80}; expected 'builtin', a file of texts, or a list of texts")
    else:
        rows, notes = texts_of(texts, "texts")
    for note in notes:
        _logger.warning(note)
    return rows


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    try:
        rows: list[list[int]] = encode(tokenizer, list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # tokenizers raises plain exceptions
        raise CalibrationError(f"the texts cannot be encoded: {one_line(error)}") from error
    return rows


def _choose(
    vocabulary: Vocabulary, tokens: int | Iterable[str], stay: Collection[int], rows: Sequence[Sequence[int]]
) -> set[int]:
    """Return the ids of the tokens that stay."""
    most = len(vocabulary.tokens)
    if isinstance(tokens, str) or not isinstance(tokens, int | Integral | Iterable):
        raise CompressionError(f"tokens is {tokens!r}; expected how many tokens stay, or a list of them")
    if isinstance(tokens, Iterable):
        named = list(tokens)
        unknown = next((token for token in named if token not in vocabulary.ids), None)
        if unknown is not None:
            raise CompressionError(
                f"the tokenizer has no token {unknown!r}; expected tokens as it writes them, such as "
                f"{vocabulary.tokens[most // 2]!r}"
            )
        return {*stay, *vocabulary.with_parts(vocabulary.ids[token] for token in named)}
    if not len(stay) <= int(tokens) < most:
        raise CompressionError(
            f"a vocabulary of {tokens} tokens is asked for; expected at least {len(stay)}, as many as must stay "
            f"(special and added tokens, single characters or bytes), and fewer than the {most} that there are"
        )
    return vocabulary.most_frequent(Counter(chain.from_iterable(rows)), int(tokens), stay)


def _count_unchanged(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], new: Mapping[int, int], unknown: int | None
) -> int:
    """Return how many texts keep their tokens, or raise if one should and does not, or has more that is unknown."""
    same = 0
    for old, row in zip(before, after, strict=True):
        keeps = all(number in new for number in old)
        more = unknown is not None and row.count(new[unknown]) > old.count(unknown)
        if more or (keeps and [new[number] for number in old] != list(row)):
            raise CompressionError(
                "the trimmed tokenizer divides a held-back text in another way than expected, because its class "
                "changes what tokenizer.json says; load it as a PreTrainedTokenizerFast first"
            )
        same += keeps
    return same


def _embeddings(model: PreTrainedModel) -> list[Any]:
    """Return the input and output embeddings of a model and the models inside it."""
    layers: list[Any] = []
    for inner in models_in(model):
        for get in (inner.get_input_embeddings, inner.get_output_embeddings):
            with suppress(NotImplementedError):
                layers.append(get())
    return [layer for layer in layers if layer is not None]


def _count_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of the embeddings, or raise unless these can be cut."""
    what = type(model).__name__
    if is_quantized(model):
        raise CompressionError(f"{what} is quantized; trim the vocabulary of the unquantized checkpoint instead")
    if not reads_tokens_alone(model):
        raise UnsupportedModelError(f"{what} reads more than texts; its vocabulary cannot be trimmed")
    layers = _embeddings(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CompressionError(f"{what} has weights that are not in memory; load it without offloading")
    rows = {len(layer.weight) for layer in layers if isinstance(layer, nn.Embedding | nn.Linear)}
    if len(rows) != 1 or not all(isinstance(layer, nn.Embedding | nn.Linear) for layer in layers):
        raise UnsupportedModelError(
            f"{what} has embeddings of {' and '.join(map(str, sorted(rows))) or 'no'} tokens in "
            f"{', '.join(sorted({type(layer).__name__ for layer in layers})) or 'no layer'}; expected plain ones "
            "of one size"
        )
    return rows.pop()


def _settings(model: PreTrainedModel) -> list[tuple[dict[str, Any], str, Any]]:
    """Return each attribute of modules, configs and generation settings: all of its holder's, its name, its value."""
    holders: list[Any] = list(model.modules())
    for inner in models_in(model):
        holders += [*configs_inside(inner.config), getattr(inner, "generation_config", None)]
    unique = {id(holder): vars(holder) for holder in holders if holder is not None}
    return [(attributes, name, value) for attributes in unique.values() for name, value in attributes.items()]


def _refuse_unknown_ids(model: PreTrainedModel, size: int) -> None:
    """Refuse generation settings that may hold ids of tokens under a name that is not known."""
    for inner in models_in(model):
        settings = vars(getattr(inner, "generation_config", None) or object.__new__(GenerationConfig))
        for name, value in settings.items():
            numbers: set[int] = set()
            _map_ids(value, numbers.add)
            if MAY_NAME_IDS.search(name) and not NAMES_IDS.search(name) and numbers & set(range(size)):
                raise UnsupportedModelError(
                    f"generation_config.{name} of {type(inner).__name__} may hold ids of tokens, in a form that is "
                    "not known here; remove it from the generation settings, and set it again with the new ids"
                )


def _refuse_body(model: PreTrainedModel, size: int) -> None:
    """Refuse a part of a larger model whose other parts have weights of the vocabulary's size, as a tied head."""
    outside = _outside(model, size)
    if outside and gc.collect() >= 0:  # models that nothing holds any more may wait to be collected
        outside = _outside(model, size)
    if outside:
        raise UnsupportedModelError(
            f"{type(model).__name__} is part of {outside[0]}, which has further weights of {size} tokens; pass the "
            "whole model"
        )


def _outside(model: PreTrainedModel, size: int) -> list[str]:
    """Return the classes of the models around one that hold parameters of the vocabulary's size outside of it."""
    modules = [
        thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "_modules" in vars(thing)
    ]
    inside, around = set(model.modules()), list[nn.Module]()
    level: list[nn.Module] = [model]
    while level:
        level = [module for module in modules if any(part in level for part in module._modules.values())]
        level = [module for module in level if module not in around]
        around += level
    return [
        type(module).__name__
        for module in around
        if any(
            parameter is not None and size in parameter.shape
            for part in set(module.modules()) - inside
            for parameter in part._parameters.values()
        )
    ]


def _change_ids(name: str, value: Any, change: Any) -> Any:
    """Return a setting with the ids of tokens in it changed; others as they are."""
    if name.endswith("forced_decoder_ids") and value:
        return [[position, _map_ids(number, change)] for position, number in value]
    if NAMES_IDS.search(name):
        return _map_ids(value, change)
    if type(value) is dict and not name.startswith("_"):  # task_specific_params has settings by their names
        return {key: _change_ids(str(key), part, change) for key, part in value.items()}
    return value


def _map_ids(value: Any, change: Any) -> Any:
    """Return nested ids, each changed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return change(value)
    if isinstance(value, dict):
        return {_map_ids(key, change): _map_ids(part, change) for key, part in value.items()}
    return type(value)(_map_ids(part, change) for part in value) if isinstance(value, list | tuple) else value


def _cut_(model: PreTrainedModel, size: int, rows: Sequence[int], new: Mapping[int, int]) -> None:
    """Leave some rows of everything of the vocabulary's size, and write the new ids and sizes, in place."""
    shared = {id(layer.weight) for layer in _embeddings(model)}
    modules = list(model.modules())
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    positions = {id(vars(module)) for module in embeddings if id(module.weight) not in shared}  # padding is no token
    cut = {
        id(tensor): _cut_tensor(path, tensor, rows, size, id(tensor) in shared)
        for path, tensor in chain(model.named_parameters(), model.named_buffers())
        if size in tensor.shape
    }
    for module in modules:
        for held in (module._parameters, module._buffers):  # tied parameters stay tied
            held.update({name: cut[id(tensor)] for name, tensor in held.items() if id(tensor) in cut})
    for inner in models_in(model):
        if getattr(inner, "generation_config", None) is not None:
            inner.generation_config = copy.deepcopy(inner.generation_config)  # the old one is restored after an error
    for attributes, name, value in _settings(model):
        if name in SIZE_NAMES and value == size:
            attributes[name] = len(rows)
        elif id(attributes) not in positions:
            attributes[name] = _change_ids(name, value, lambda number: new.get(number, number))


def _refuse_other_sizes(model: PreTrainedModel, size: int) -> None:
    """Refuse a model whose config still makes weights of the old number of tokens, as that would not load."""
    built = built_shapes(model, model.config)
    for name, shape in shapes_of(model).items():
        if size in built.get(name, ()) and size not in shape:
            raise UnsupportedModelError(
                f"{name} is made with {size} rows by {type(model.config).__name__}, whatever its vocabulary is; keep "
                "the vocabulary"
            )


def _cut_tensor(path: str, tensor: Tensor, rows: Sequence[int], size: int, is_embedding: bool) -> Tensor:
    """Return some rows of an embedding, or some numbers of a bias of the head; raise if the tensor is neither."""
    if not is_embedding and not (path.endswith("bias") and tensor.numel() == size):
        raise UnsupportedModelError(
            f"{path} has shape {tuple(tensor.shape)} and is no input or output embedding, so it is not known whether "
            f"it belongs to the {size} tokens; keep the vocabulary"
        )
    index = torch.tensor(rows, device=tensor.device)
    remaining = tensor.detach().index_select(0 if is_embedding else tensor.dim() - 1, index)
    return nn.Parameter(remaining, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else remaining


def _states(model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
    """Return the outputs of the base model for a few tokens, (1, T, …)."""
    base: Any = model.base_model
    ids = torch.tensor([list(numbers)], device="cpu")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    known = forward_arguments(base)
    known = known if "input_ids" in known else ["input_ids", "attention_mask"]  # a wrapper passes all on
    with evaluation_mode(base):
        states: Tensor = run_batch(base, {name: value for name, value in batch.items() if name in known})[0]
    return states.float()
