"""English texts that come with the package.

640 are of many kinds, 480 are pairs, 1,350 are short; there are 300 articles by sentence, and 900 search queries.
"""

from importlib.resources import files

from transformers import PreTrainedTokenizerBase

from collab_compress.calibration.encode import encode
from collab_compress.calibration.files import Text

MOST_UNKNOWN = 0.1  # share of tokens that a tokenizer does not know, in texts of a language that it knows
LEAST_CHARACTERS = 2.0  # a token, likewise; a tokenizer that spells English words has about one
PROBED = 64  # texts that show it


def builtin_texts(pairs: bool, more: bool = True) -> list[Text]:
    """Return the texts, the two of a pair as a tuple if `pairs`; if `more`, short ones, articles and queries too."""
    texts: list[Text] = [*_lines("sentences.txt")]
    for line in _lines("pairs.tsv"):
        first, second = line.split("\t")
        texts += [(first, second)] if pairs else [first, second]
    for name in ("short.txt", "articles.txt", "queries.txt") if more else ():
        texts += _lines(name)
    return texts


def why_not_english(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return why a tokenizer does not suit English texts, as a clause, or None."""
    texts = _lines("sentences.txt")[:PROBED]
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
