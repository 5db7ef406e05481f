"""The tokens of a fast tokenizer: which must stay, which of the others stay, and the tokenizer that has these alone.

A text whose tokens all stay keeps them, in each of the three models that `tokenizers` has for parts of words:

* WordPiece takes the longest token that matches. If that one stays, it is still the longest.
* BPE merges the pair of the lowest rank. Inside a token of the result, the merges are those of that token by itself,
  so they are kept for every token that stays, with the tokens between (`Vocabulary.with_parts`).
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
ALSO_WITH_BYTES = frozenset(map(chr, range(128))) | {"▁"}  # "▁" becomes a space only where it is a token, not bytes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Vocabulary:
    """The tokens of a fast tokenizer, with the ids and the rules of its `tokenizer.json`."""

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
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in self.model.get("merges", ()))
        self._ranks = {(first, second): rank for rank, (first, second) in enumerate(pairs)}
        self._merges = cache(self._find_merges)
        self._always = {*tokenizer.all_special_ids, *(token["id"] for token in self.state["added_tokens"])}
        self._always |= {*backend.encode("").ids, *backend.encode("", "").ids}  # of the post-processor and of padding
        if self.state["padding"] is not None:
            self._always.add(self.state["padding"]["pad_id"])

    def must_stay(self, named: Iterable[int]) -> set[int]:
        """Return the ids of the tokens that stay whatever the texts are."""
        tokens = {self.tokens[number] for number in {*self._always, *named} if number in self.tokens}
        writes_bytes = self.model.get("byte_fallback") and "ByteFallback" in json.dumps(self.state["decoder"])
        if writes_bytes and self.pieces >= BYTES:
            tokens |= BYTES | (self.pieces & ALSO_WITH_BYTES)
        else:
            symbols = {piece: self._symbols(piece) for piece in self.pieces}
            tokens |= {piece for piece, own in symbols.items() if len(own) == 1 or not self.pieces.issuperset(own)}
        if self.kind == "Unigram":
            tokens.add(min(self.model["vocab"], key=lambda pair: pair[1])[0])
            tokens.add(self.model["vocab"][self.model["unk_id"] or 0][0])
        elif self.model.get("unk_token") in self.ids:
            tokens.add(self.model["unk_token"])
        return self.with_parts(self.ids[token] for token in tokens)

    def with_parts(self, numbers: Iterable[int]) -> set[int]:
        """Return ids together with those of the tokens that BPE merges these from."""
        closed = set(numbers)
        for number in list(closed) if self.kind == "BPE" else ():
            closed.update(self.ids[part] for pair in self._merges(self.tokens[number]) or () for part in pair)
        return closed

    def most_frequent(self, counts: Counter[int], size: int, stay: Collection[int]) -> set[int]:
        """Return `size` ids: those that stay, then the most frequent ones, then the first in the tokenizer's order.

        That is the order of scores in Unigram, else that of ids, which trainers give by frequency.
        """
        scores = dict(map(tuple, self.model["vocab"])) if self.kind == "Unigram" else {}
        order = sorted(self.tokens, key=lambda number: (-counts[number], -scores.get(self.tokens[number], 0), number))
        kept = set(stay)
        for number in order:
            if len(kept) == size:
                break
            if self.kind == "BPE" and not counts[number] and self._merges(self.tokens[number]) is None:
                continue  # no text has a token that merges do not reach
            needed = self.with_parts([number]) - kept
            if len(kept) + len(needed) <= size:
                kept |= needed
        return kept

    def _symbols(self, token: str) -> list[str]:
        """Return the characters of a token as its model writes them: with a prefix inside, a suffix at the end."""
        body = token.removeprefix(self.prefix) or token
        word = body.removesuffix(self.suffix) or body
        symbols = [self.prefix * (index > 0 or body != token) + character for index, character in enumerate(word)]
        return [*symbols[:-1], *(last + body.removeprefix(word) for last in symbols[-1:])]

    def _find_merges(self, token: str) -> list[tuple[str, str]] | None:
        """Return the merges that BPE makes a token with, in order; None if they do not lead to it."""
        parts, merges = self._symbols(token), list[tuple[str, str]]()
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            index = min(range(len(pairs)), key=lambda index: self._ranks.get(pairs[index], len(self._ranks)))
            if pairs[index] not in self._ranks:
                return None
            first, second = pairs[index]
            merges.append(pairs[index])
            parts[index : index + 2] = [first + second.removeprefix(self.prefix)]
        return merges if parts == [token] else None

    def reduce(self, new: Mapping[int, int]) -> dict[str, Any]:
        """Return the `tokenizer.json` that has some of the tokens, in the order of their ids."""
        model = dict(self.model)
        if self.kind == "Unigram":
            model["vocab"] = [pair for number, pair in enumerate(model["vocab"]) if number in new]
            model["unk_id"] = None if model["unk_id"] is None else new[model["unk_id"]]
        else:
            model["vocab"] = {token: new[number] for token, number in model["vocab"].items() if number in new}
        if self.kind == "BPE":
            used = {pair for number in new for pair in self._merges(self.tokens[number]) or ()}
            model["merges"] = [list(pair) for pair in sorted(used, key=self._ranks.__getitem__)]

        def renumber(part: dict[str, Any]) -> dict[str, Any]:
            for name, value in part.items():
                if name in ("id", "pad_id") and isinstance(value, int):  # of added tokens, of padding
                    part[name] = new[value]
                elif name == "ids" and isinstance(value, list):  # of TemplateProcessing
                    part[name] = [new[number] for number in value]
                elif name in ("sep", "cls") and isinstance(value, list):  # of BertProcessing and RobertaProcessing
                    part[name] = [value[0], new[value[1]]]
            return part

        others = {name: part for name, part in self.state.items() if name != "model"}
        state: dict[str, Any] = json.loads(json.dumps(others), object_hook=renumber)
        return state | {"model": model}


def reload(tokenizer: PreTrainedTokenizerBase, state: Mapping[str, Any], new: Mapping[int, int]) -> Any:
    """Return the tokenizer that its class reads from another `tokenizer.json`, with all its other settings."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            if path.is_file() and path.name not in TOKENIZER_FILES:
                path.unlink()  # vocabularies in other forms
        (folder / TOKENIZER_FILES[0]).write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
        config = json.loads((folder / TOKENIZER_FILES[1]).read_text(encoding="utf-8"))
        if "added_tokens_decoder" in config:
            tokens = config["added_tokens_decoder"].items()
            config["added_tokens_decoder"] = {str(new[int(number)]): token for number, token in tokens}
            (folder / TOKENIZER_FILES[1]).write_text(json.dumps(config), encoding="utf-8")
        return type(tokenizer).from_pretrained(folder)
