"""Texts that come with the package: 640 English texts of many kinds, 480 pairs, and 1,350 short ones."""

from importlib.resources import files

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.files import Text
from collab_compress.calibration.tokenization import encode

MOST_UNKNOWN = 0.1  # share of tokens that a tokenizer does not know, in texts of a language that it knows
LEAST_CHARACTERS = 2.0  # a token, likewise; a tokenizer that spells English words has about one
SAMPLE = 64  # texts that show it


def builtin_texts(pairs: bool, short: bool = True) -> list[Text]:
    """Return the texts; the two texts of a pair as a tuple if `pairs`, else each by itself; then the short ones.

    Example:
        >>> len(builtin_texts(pairs=True)), len(builtin_texts(pairs=False))
        (2470, 2950)
        >>> len(builtin_texts(pairs=True, short=False))
        1120
    """
    texts: list[Text] = [*_lines("sentences.txt")]
    for line in _lines("pairs.tsv"):
        first, second = line.split("\t")
        texts += [(first, second)] if pairs else [first, second]
    return [*texts, *_lines("short.txt")] if short else texts


def reads_single_texts(model: PreTrainedModel) -> bool:
    """Return whether a model reads all built-in texts one by one, without random tokens: if it has no head.

    Its hidden states are then the outputs, as embeddings are made; a classifier of pairs needs the others too.
    """
    return model.base_model is model


def why_not_builtin(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return what keeps a model that reads tokens from the built-in texts, as a clause; None if nothing does.

    An encoder–decoder needs sources with their targets, and others a tokenizer whose tokens are pieces of English
    words: less than a tenth of them unknown, and two characters of text each.
    """
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} reads a source and a target"
    return why_not_english(tokenizer)


def why_not_english(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return what keeps a tokenizer from English texts, as a clause; None if nothing does."""
    texts = _lines("sentences.txt")[:SAMPLE]
    try:
        rows = encode(tokenizer, texts, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception:  # tokenizers raises plain exceptions
        return "the tokenizer cannot encode English"
    tokens = [token for row in rows for token in row]
    characters = sum(len("".join(text.split())) for text in texts)
    if characters < LEAST_CHARACTERS * len(tokens):
        return f"the tokenizer spells English, {characters / len(tokens):.1f} characters a token"
    if not tokens or tokens.count(tokenizer.unk_token_id) > MOST_UNKNOWN * len(tokens):
        return "the tokenizer does not know English"
    return None


def _lines(name: str) -> list[str]:
    file = files("collab_compress.calibration") / "texts" / name
    return file.read_text(encoding="utf-8").splitlines()
