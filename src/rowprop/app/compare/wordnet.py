"""WordNet's glosses as a text set.

To classify, a row is one gloss, its class one of 45 lexicographer files. To predict tokens, a row is several glosses.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rowprop.errors import InvalidInput

DEBIAN_WORDNET = Path("/usr/share/wordnet")
PARTS = ("data.noun", "data.verb", "data.adj", "data.adv")
# In the order of their numbers, lexnames(5WN).
CLASSES = (
    "adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact", "noun.attribute",
    "noun.body", "noun.cognition", "noun.communication", "noun.event", "noun.feeling", "noun.food", "noun.group",
    "noun.location", "noun.motive", "noun.object", "noun.person", "noun.phenomenon", "noun.plant", "noun.possession",
    "noun.process", "noun.quantity", "noun.relation", "noun.shape", "noun.state", "noun.substance", "noun.time",
    "verb.body", "verb.change", "verb.cognition", "verb.communication", "verb.competition", "verb.consumption",
    "verb.contact", "verb.creation", "verb.emotion", "verb.motion", "verb.perception", "verb.possession",
    "verb.social", "verb.stative", "verb.weather", "adj.ppl",
)  # fmt: skip

NUM_WORDS = 8_000  # PADDING and UNKNOWN included
NUM_TOKENS = 24  # 93 % of the glosses are no longer
PADDING, UNKNOWN = 0, 1
NUM_WORDS_TO_PREDICT = 4_000  # PADDING, UNKNOWN and the end of a gloss included; 82 % of the glosses' words
ROW_TOKENS = 64  # tokens of a row to predict
OPEN_ROWS = 16  # rows that the next gloss is tried in: 1 leaves 13 % of the tokens to padding, 16 leave 2 %

_SYNSET = re.compile(r"\d{8} (\d\d) [nvasr] .*?\| (.*)")


@contextmanager
def reading(path: Path, needed: str) -> Generator[None]:
    """Refuse a data file that is missing, in a sentence that ends with ``needed``, or that the block cannot read."""
    if not path.is_file():
        raise InvalidInput(f"the data file {path} does not exist; {needed}")
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidInput(f"the data file {path} is corrupt ({error}); fetch it again.") from error


def read_glosses(folder: Path) -> tuple[list[str], list[int]]:
    """The gloss, untrusted text, and the class, a place in CLASSES, of every synset, in the order of PARTS and lines.

    Raises:
        InvalidInput: A file is missing, is not UTF-8, or a line of it is no synset.

    References:
        wndb(5WN) for the files' format; Miller, "WordNet: A Lexical Database for English", 1995.
    """
    glosses: list[str] = []
    classes: list[int] = []
    needed = (
        f"wordnet is four files named {', '.join(PARTS)} in one folder: install Debian's package (apt-get install "
        "wordnet-base), or name a folder that holds them with --data-dir."
    )
    for part in PARTS:
        with reading(folder / part, needed):
            for number, line in enumerate((folder / part).read_text("utf-8").splitlines(), start=1):
                if line.startswith("  "):  # the licence
                    continue
                found = _SYNSET.fullmatch(line)
                if found is None or int(found[1]) >= len(CLASSES):
                    raise ValueError(f"line {number} is no synset with a gloss")
                glosses.append(found[2].strip())
                classes.append(int(found[1]))
    return glosses, classes


def vocabulary(texts: Sequence[str], num_words: int = NUM_WORDS) -> dict[str, int]:
    """Number the most frequent words of ``texts`` from 2 on; words equally frequent go by the alphabet."""
    counts = Counter(word for text in texts for word in words(text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: num_words - 2]
    return {word: number for number, word in enumerate(frequent, start=2)}


def words(text: str) -> list[str]:
    """The words of a text in lower case, punctuation left out."""
    return re.findall(r"\w+", text.lower())


def encode(texts: Sequence[str], numbers: dict[str, int], num_tokens: int = NUM_TOKENS) -> Tensor:
    """Return the texts as numbers of words, cut or filled with PADDING to ``num_tokens``: ``(M, T)``, int64."""
    rows = torch.full((len(texts), num_tokens), PADDING)
    for row, text in enumerate(texts):
        tokens = [numbers.get(word, UNKNOWN) for word in words(text)[:num_tokens]]
        rows[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return rows


def packed(texts: Sequence[str], numbers: dict[str, int], end: int, num_tokens: int = ROW_TOKENS) -> Tensor:
    """Return the texts as numbers of words, whole texts side by side in each row, ``end`` behind each of them.

    A text goes into the first of the last OPEN_ROWS rows that has room for it; a text of ``num_tokens`` words or more
    is cut. A row begins with ``end``, so that its first word has a token before it, and PADDING fills its rest.

    Returns:
        Rows of shape ``(M, num_tokens + 1)``, int64: the first ``num_tokens`` of each are read, the last are predicted.
    """
    rows: list[list[int]] = [[end]]
    for text in texts:
        tokens = [numbers.get(word, UNKNOWN) for word in words(text)[: num_tokens - 1]] + [end]
        room = num_tokens + 1 - len(tokens)
        row = next((row for row in rows[-OPEN_ROWS:] if len(row) <= room), None)
        if row is None:
            rows.append(row := [end])
        row += tokens
    return torch.tensor([row + [PADDING] * (num_tokens + 1 - len(row)) for row in rows])
