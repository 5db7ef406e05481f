"""The tokens of a fast tokenizer: which must stay, which of the others stay, and the tokenizer that has these alone.

A text whose tokens all stay keeps them, in each of the three models that `tokenizers` has for parts of words:

* WordPiece takes the longest token that matches. If that one stays, it is still the longest.
* BPE merges the pair of the lowest rank. Inside a token of the result, the merges are those of that token by itself,
  so they are kept for every token that stays, with the tokens between (`Vocabulary.needs`).
* Unigram takes the tokens of the largest sum of scores. If these stay, so does their sum, and no other one rises: the
  token of the lowest score stays too, because the score of an unknown character is counted from it.

Every other text still has tokens, because all single characters stay, or all bytes where a tokenizer writes what it
does not know as bytes (and characters of ASCII, which a model has seldom read as bytes). A token with a character
that is none of the tokens by itself stays.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from collab_compress.errors import CompressionError

MODELS = ("WordPiece", "BPE", "Unigram")
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
SPACE = "▁"  # which decoders turn into a space only where it is a token, not bytes
READ = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Vocabulary:
    """The tokens of a fast tokenizer, with the ids and the rules of its `tokenizer.json`.

    Args:
        tokenizer: with a backend of `tokenizers`.

    Raises:
        CompressionError: the tokenizer is a slow one, or its model is not WordPiece, BPE or Unigram.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CompressionError(
                f"{type(tokenizer).__name__} is a slow tokenizer, whose vocabulary cannot be trimmed; load the fast "
                "one, with a tokenizer.json (AutoTokenizer.from_pretrained)"
            )
        self.state: dict[str, Any] = json.loads(backend.to_str())
        self.model: dict[str, Any] = self.state["model"]
        self.kind = self.model["type"]
        if self.kind not in MODELS:
            raise CompressionError(
                f"{type(tokenizer).__name__} has a {self.kind} model, in which words without a token are unknown; "
                f"expected one of {', '.join(MODELS)}"
            )
        self.ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.tokens = {number: token for token, number in self.ids.items()}
        self.pieces: set[str] = set(backend.get_vocab(with_added_tokens=False))
        self.prefix = self.model.get("continuing_subword_prefix") or ""
        self.suffix = self.model.get("end_of_word_suffix") or ""
        self._ranks: dict[tuple[str, str], int] = {}
        for rank, merge in enumerate(self.model.get("merges", ())):
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            self._ranks[first, second] = rank
        self._merges = cache(self._merged)
        self._always = {*tokenizer.all_special_ids, *(token["id"] for token in self.state["added_tokens"])}
        self._always |= {*backend.encode("").ids, *backend.encode("", "").ids}  # of the post-processor and of padding
        if self.state["padding"] is not None:
            self._always.add(self.state["padding"]["pad_id"])

    def must_stay(self, named: Iterable[int]) -> set[int]:
        """Return the ids of the tokens that stay whatever the texts are.

        Args:
            named: further ids, as those in the config of the model.
        """
        tokens = {self.tokens[number] for number in {*self._always, *named} if number in self.tokens}
        writes_bytes = self.model.get("byte_fallback") and "ByteFallback" in json.dumps(self.state["decoder"])
        if writes_bytes and self.pieces >= BYTES:
            tokens |= BYTES | {
                piece for piece in self.pieces if piece == SPACE or (len(piece) == 1 and piece.isascii())
            }
        else:
            for piece in self.pieces:
                symbols = self._symbols(piece)
                if len(symbols) == 1 or not self.pieces.issuperset(symbols):
                    tokens.add(piece)
        if self.kind == "Unigram":
            tokens.add(min(self.model["vocab"], key=lambda pair: pair[1])[0])
            tokens.add(self.model["vocab"][self.model["unk_id"] or 0][0])
        elif self.model.get("unk_token") in self.ids:
            tokens.add(self.model["unk_token"])
        return self.closed(self.ids[token] for token in tokens)

    def closed(self, numbers: Iterable[int]) -> set[int]:
        """Return ids together with those of the tokens that these are built from."""
        return {self.ids[part] for number in numbers for part in self.needs(self.tokens[number])}

    def most_frequent(self, counts: Counter[int], size: int, stay: Collection[int]) -> set[int]:
        """Return `size` ids: those that stay, then the most frequent ones, then the first in the tokenizer's order.

        That is the order of scores in Unigram, else that of ids, which trainers give by frequency.

        Args:
            counts: id → how often the texts have it.
            size: number of tokens; a few less may be left where a token needs others.
            stay: what `must_stay` returns.
        """
        scores = dict(map(tuple, self.model["vocab"])) if self.kind == "Unigram" else {}
        order = sorted(self.tokens, key=lambda number: (-counts[number], -scores.get(self.tokens[number], 0), number))
        kept = set(stay)
        for number in order:
            if len(kept) == size:
                break
            token = self.tokens[number]
            if number in kept or (self.kind == "BPE" and not counts[number] and self._merges(token) is None):
                continue  # no text has a token that merges do not reach
            needed = {self.ids[part] for part in self.needs(token)} - kept
            if len(kept) + len(needed) <= size:
                kept |= needed
        return kept

    def needs(self, token: str) -> set[str]:
        """Return a token and those that it is merged from."""
        merges = self._merges(token) if self.kind == "BPE" and token in self.pieces else None
        return {token, *(part for pair in merges or () for part in pair)}

    def _symbols(self, token: str) -> list[str]:
        """Return the characters of a token as its model writes them: with a prefix inside, a suffix at the end."""
        inside = bool(self.prefix) and token.startswith(self.prefix) and token != self.prefix
        body = token.removeprefix(self.prefix) if inside else token
        ends = bool(self.suffix) and body.endswith(self.suffix) and body != self.suffix
        characters = list(body.removesuffix(self.suffix) if ends else body)
        symbols = [self.prefix * (inside or place > 0) + character for place, character in enumerate(characters)]
        return [*symbols[:-1], symbols[-1] + self.suffix] if ends else symbols

    def _merged(self, token: str) -> list[tuple[str, str]] | None:
        """Return the merges that BPE makes a token with, in order; None if they do not lead to it."""
        parts, merges = self._symbols(token), list[tuple[str, str]]()
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            place = min(range(len(pairs)), key=lambda place: self._ranks.get(pairs[place], len(self._ranks)))
            if pairs[place] not in self._ranks:
                return None
            first, second = pairs[place]
            merges.append(pairs[place])
            parts[place : place + 2] = [first + second.removeprefix(self.prefix)]
        return merges if parts == [token] else None

    def reduced(self, new: Mapping[int, int]) -> dict[str, Any]:
        """Return the `tokenizer.json` that has some of the tokens, in the order of their ids.

        Args:
            new: id of each token that stays → its new id.
        """
        state, model = dict(self.state), dict(self.model)
        if self.kind == "Unigram":
            model["vocab"] = [pair for number, pair in enumerate(model["vocab"]) if number in new]
            model["unk_id"] = None if model["unk_id"] is None else new[model["unk_id"]]
        else:
            model["vocab"] = {token: new[number] for token, number in model["vocab"].items() if number in new}
        if self.kind == "BPE":
            used = {pair for number in new for pair in self._merges(self.tokens[number]) or ()}
            model["merges"] = [list(pair) for pair in sorted(used, key=self._ranks.__getitem__)]
        state["model"] = model
        state["added_tokens"] = [token | {"id": new[token["id"]]} for token in state["added_tokens"]]
        state["post_processor"] = _renumbered(state["post_processor"], new)
        if state["padding"] is not None:
            state["padding"] = state["padding"] | {"pad_id": new[state["padding"]["pad_id"]]}
        return state


def _renumbered(value: Any, new: Mapping[int, int]) -> Any:
    """Return a post-processor with the new ids of its special tokens."""
    if isinstance(value, list):
        return [_renumbered(part, new) for part in value]
    if not isinstance(value, dict):
        return value
    renumbered = {name: _renumbered(part, new) for name, part in value.items()}
    if isinstance(value.get("ids"), list):  # of TemplateProcessing
        renumbered["ids"] = [new[number] for number in value["ids"]]
    for name in ("sep", "cls"):  # of BertProcessing and RobertaProcessing
        if isinstance(value.get(name), list):
            renumbered[name] = [value[name][0], new[value[name][1]]]
    return renumbered


def reloaded(tokenizer: PreTrainedTokenizerBase, state: Mapping[str, Any], new: Mapping[int, int]) -> Any:
    """Return the tokenizer that its class reads from another `tokenizer.json`, with all its other settings.

    Args:
        tokenizer: as it was.
        state: what `Vocabulary.reduced` returns.
        new: id of each token that stays → its new id.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            if path.is_file() and path.name not in READ:
                path.unlink()  # vocabularies in other forms
        (folder / READ[0]).write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        config = json.loads((folder / READ[1]).read_text(encoding="utf-8"))
        if "added_tokens_decoder" in config:
            tokens = config["added_tokens_decoder"].items()
            config["added_tokens_decoder"] = {str(new[int(number)]): token for number, token in tokens}
            (folder / READ[1]).write_text(json.dumps(config), encoding="utf-8")
        return type(tokenizer).from_pretrained(folder)
