"""Layouts without labels: parallel files for translation, and plain text for language modelling."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import unescape

from collab_compress.errors import DataError
from collab_compress.tasks.layouts import Layout, Placed
from collab_compress.tasks.lines import Place, malformed, read_lines

SEGMENT = re.compile(r"<seg\b[^>]*>(.*)</seg>", re.IGNORECASE)
ENTITIES = {"&quot;": '"', "&apos;": "'"}


@dataclass(frozen=True, kw_only=True)
class Parallel(Layout):
    """A file for each language, line for line.

    In the names, `{lang}` is the language, `{pair}` both joined by a hyphen (in either order), `{tight}` both joined
    without, and `{side}` src or ref. Files that the shared tasks give out in markup (.sgm, .xml, train.tags) are read
    for their sentences.
    """

    def candidates(self, part: str, languages: tuple[str, str] | None) -> list[tuple[str, ...]]:
        """List what a part of a split may be: a file of the source and a file of the target language."""
        if languages is None:
            raise DataError("parallel files need a source and a target language; pass source=… and target=…")
        source, target = languages
        found = []
        for name in part.split("|"):
            for pair in (f"{source}-{target}", f"{target}-{source}"):
                files = tuple(
                    _filled(name, lang=lang, side=side, pair=pair, tight=source + target)
                    for lang, side in ((source, "src"), (target, "ref"))
                )
                found += [files] if files not in found else []
        return found

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read two files side by side."""
        sources, targets = (read_sentences(path, self.encoding) for path in paths)
        count = 0
        for place, source in sources:
            other = next(targets, None)
            if other is None:
                raise _unequal(place, paths, count + 1 + sum(1 for _ in sources), count)
            count += 1
            yield place, {"source": source, "target": other[1]}
        for place, _ in targets:
            raise _unequal(place, paths, count, count + 1 + sum(1 for _ in targets))


def _filled(name: str, **words: str) -> str:
    try:
        return name.format(**words)
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{word}}}" for word in words)
        raise DataError(f"file name {name!r} cannot be filled in; it may have {known}") from error


def read_sentences(path: Path, encoding: str = "utf-8") -> Iterator[tuple[Place, str]]:
    """Read the sentences of a file, in markup or one a line."""
    segments = path.name.removesuffix(".gz").endswith((".sgm", ".xml"))
    tagged = path.name.startswith("train.tags.")
    for place, line in read_lines(path, encoding):
        if segments:
            if found := SEGMENT.search(line):
                yield place, unescape(found[1], ENTITIES).strip()
            elif "<seg" in line:
                raise malformed(place, "a segment that does not end on its line")
        elif not tagged:
            yield place, line
        elif not line.startswith("<"):
            yield place, unescape(line, ENTITIES).strip()


def _unequal(place: Place, paths: Sequence[Path], sources: int, targets: int) -> DataError:
    counts = f"{paths[0].name} has {sources} sentences and {paths[1].name} has {targets}"
    return malformed(place, f"no counterpart: {counts}; parallel files go line for line")


@dataclass(frozen=True, kw_only=True)
class Text(Layout):
    """A text a line.

    Args:
        strip: whether white space at the ends of a line goes.
    """

    strip: bool = False

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the lines of a file."""
        for place, line in read_lines(paths[0], self.encoding):
            yield place, {"text": line.strip() if self.strip else line}
