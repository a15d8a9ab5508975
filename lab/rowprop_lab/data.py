"""The data that `rowprop compare` trains on: found, checked, images standardised, in memory."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import urllib.request
import zlib
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.app.lookup import load_object, require
from rowprop.backprop.pick import Unit
from rowprop.errors import InvalidInput, foreign
from rowprop.files import write_whole

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
# Digests of the decompressed content: the same data compressed again is still the same data.
FASHION_MNIST_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
# A row of WordNet is one gloss, its class one of 45 lexicographer files; or several glosses, to predict tokens.
DEBIAN_WORDNET = Path("/usr/share/wordnet")
WORDNET_FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
# In the order of their numbers, lexnames(5WN).
WORDNET_CLASSES = (
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
TRAIN_ROWS, TEST_ROWS = 800, 250  # of a text whose next token is predicted; all its rows would take an hour


@dataclass(frozen=True, eq=False)
class Dataset:
    """A set held in memory: rows to classify, or texts whose next token is to be predicted."""

    name: str  # as the user gave it
    train_x: Tensor  # rows (M, C, ...), float32, standardised; or tokens (M, T), int64, 0 where a row has ended
    train_y: Tensor  # classes (M,), int64; or the token that follows each token, (M, T), 0 for none
    test_x: Tensor
    test_y: Tensor
    class_names: tuple[str, ...]  # one per class, or per token that can be predicted; untrusted text
    train_ids: Tensor  # place of each training row in the data as they came, (M,), int64
    train_texts: tuple[str, ...] = ()  # of each training row, untrusted; empty if rows are no text
    num_words: int | None = None  # different tokens; None if rows are no text

    @property
    def unit(self) -> Unit:
        """What is kept or not: each row, or each token of a row."""
        return "row" if self.train_y.dim() == 1 else "token"

    def counted(self, y: Tensor) -> Tensor:
        """Which entries of ``train_y`` or ``test_y`` count, a mask: tokens after which none follows do not."""
        return torch.ones_like(y, dtype=torch.bool) if self.unit == "row" else y != PADDING

    @property
    def num_inputs(self) -> int:
        """What a model is built for: C channels of an image, or the number of different tokens."""
        return self.train_x.shape[1] if self.num_words is None else self.num_words

    def to(self, device: torch.device) -> Dataset:
        """The set with its rows and classes on ``device``."""
        moved = {name: getattr(self, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **moved)

    def fingerprint(self) -> str:
        """A sha256 over every value, by which a resumed comparison sees that its data changed."""
        digest = hashlib.sha256()
        for part in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(repr(tuple(part.shape)).encode())
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()


def load_data(name: str, data_dir: Path | None = None, train_rows: int | None = None, unit: Unit = "row") -> Dataset:
    """Load ``digits``, ``fashion-mnist``, ``wordnet`` or the data of ``module:callable``.

    A callable returns ``(train_x, train_y, test_x, test_y)`` and, if it likes, the class names. ``data_dir`` holds the
    files of ``fashion-mnist`` or ``wordnet``, None for the usual folder. Of a shuffle that is always the same the first
    ``train_rows`` are used, by default all; of tokens, TRAIN_ROWS. The unit ``"token"`` is for ``wordnet`` alone.

    Raises:
        InvalidInput: The name is unknown or no text, a file is missing or corrupt, or shapes disagree.
        MissingExtra: scikit-learn is needed and not installed.
    """
    loaders = {"digits": _digits, "fashion-mnist": _fashion_mnist, "wordnet": _wordnet}
    if unit == "token":
        data = _wordnet_tokens(name, data_dir)
    elif name in loaders:
        data = loaders[name](data_dir)
    elif ":" in name:
        data = _from_callable(name)
    else:
        raise InvalidInput(f"data {name!r} is unknown; it can be {', '.join(loaders)} or module:callable.")
    if unit == "row":
        _check(data)
    rows = len(data.train_y)
    if train_rows is None and unit == "token":
        train_rows = min(TRAIN_ROWS, rows)
    if train_rows is not None:
        if not 2 <= train_rows <= rows:
            raise InvalidInput(f"train rows is {train_rows}, but {name} has {rows} training rows; choose 2 to {rows}.")
        chosen = _shuffled(rows)[:train_rows]
        parts = {part: getattr(data, part)[chosen] for part in ("train_x", "train_y", "train_ids")}
        data = replace(data, **parts, train_texts=_at(data.train_texts, chosen) if data.train_texts else ())
    if data.num_words is not None:
        return data
    train_x, test_x = data.train_x.float(), data.test_x.float()
    if not bool(torch.isfinite(train_x).all() and torch.isfinite(test_x).all()):
        raise InvalidInput(f"the rows of {data.name} hold values that are not finite; clean the data first.")
    mean, deviation = train_x.mean(), train_x.std().clamp_min(1e-6)
    return replace(data, train_x=(train_x - mean) / deviation, test_x=(test_x - mean) / deviation)


def _shuffled(rows: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0))


def _at(texts: Sequence[str], rows: Tensor) -> tuple[str, ...]:
    return tuple(texts[int(row)] for row in rows)


def _digits(_: Path | None) -> Dataset:
    bunch = require("sklearn.datasets", "scikit-learn", "The digits data").load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1)
    classes = torch.from_numpy(bunch.target).long()
    order = _shuffled(len(classes))
    test, train = order[:450], order[450:]
    return Dataset("digits", images[train], classes[train], images[test], classes[test], tuple("0123456789"), train)


def _fashion_mnist(data_dir: Path | None) -> Dataset:
    folder = data_dir or (DEBIAN_FASHION_MNIST if DEBIAN_FASHION_MNIST.is_dir() else _downloaded_fashion_mnist())
    parts = [read_idx(folder / f"{stem}.gz") for stem in FASHION_MNIST_SHA256]
    parts = [part.unsqueeze(1) if part.dim() == 3 else part.long() for part in parts]  # images get their one channel
    return Dataset("fashion-mnist", *parts, FASHION_MNIST_CLASSES, torch.arange(len(parts[1])))


def read_idx(path: Path) -> Tensor:
    """Read one gzipped IDX file of bytes, uint8, or say what is wrong with it."""
    names = ", ".join(f"{stem}.gz" for stem in FASHION_MNIST_SHA256)
    with reading(path, f"fashion-mnist is four files named {names} in one folder (--data-dir)."):
        content = gzip.decompress(path.read_bytes())
        dims = content[3] if len(content) >= 4 else 0
        if content[:3] != b"\x00\x00\x08" or dims not in (1, 3):
            raise ValueError("not an IDX file of bytes")
        start = 4 + 4 * dims
        shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
        found = max(0, len(content) - start)
        if prod(shape) == 0 or found != prod(shape):
            raise ValueError(f"its header promises {prod(shape)} bytes for shape {shape}, {found} are there")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)


def _downloaded_fashion_mnist() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rowprop" / "fashion-mnist"
    for stem, expected in FASHION_MNIST_SHA256.items():
        path, url = folder / f"{stem}.gz", f"{FASHION_MNIST_URL}{stem}.gz"
        if path.is_file():
            continue
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                packed: bytes = response.read()
            found = hashlib.sha256(gzip.decompress(packed)).hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidInput(
                f"fashion-mnist could not be downloaded from {url} ({error}); install Debian's package "
                "dataset-fashion-mnist, or put its four .gz files in a folder and name it with --data-dir."
            ) from error
        if found != expected:
            raise InvalidInput(f"the file from {url} is not fashion-mnist: its sha256 is {found}, not {expected}.")
        write_whole(path, packed)
    return folder


def _read_wordnet(data_dir: Path | None) -> tuple[tuple[str, ...], tuple[str, ...], Tensor, Tensor, Tensor]:
    """Glosses to train and to test on, their classes, and the places of the former; every tenth is for testing."""
    glosses, numbers = read_glosses(data_dir or DEBIAN_WORDNET)
    order, classes = _shuffled(len(glosses)), torch.tensor(numbers)
    test, train = order[: len(glosses) // 10], order[len(glosses) // 10 :]
    return _at(glosses, train), _at(glosses, test), classes[train], classes[test], train


def _wordnet_tokens(name: str, data_dir: Path | None) -> Dataset:
    if name != "wordnet":
        raise InvalidInput(f"the model predicts the next token of a text, but {name} has classes; use --data wordnet.")
    train_texts, test_texts, *_ = _read_wordnet(data_dir)
    vocabulary = numbered(train_texts, NUM_WORDS_TO_PREDICT - 1)
    end = len(vocabulary) + 2
    train = packed(train_texts, vocabulary, end)
    test = packed(test_texts, vocabulary, end)[:TEST_ROWS]
    names = ("(padding)", "(unknown word)", *vocabulary, "(end)")
    places = torch.arange(len(train))
    return Dataset(name, train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], names, places, num_words=end + 1)


def _wordnet(data_dir: Path | None) -> Dataset:
    train_texts, test_texts, train_y, test_y, train = _read_wordnet(data_dir)
    vocabulary = numbered(train_texts)
    train_x, test_x = encode(train_texts, vocabulary), encode(test_texts, vocabulary)
    words, classes = len(vocabulary) + 2, WORDNET_CLASSES
    return Dataset("wordnet", train_x, train_y, test_x, test_y, classes, train, train_texts, num_words=words)


def _from_callable(name: str) -> Dataset:
    factory = load_object(name, "data")
    with foreign(f"data {name!r} failed when called"):
        returned: Any = factory()
    wanted = "(train_x, train_y, test_x, test_y) and, if you like, the class names"
    if not isinstance(returned, tuple | list):
        raise InvalidInput(f"data {name!r} returned a {type(returned).__name__}, but a tuple was needed: {wanted}.")
    entries = list(cast("Sequence[Any]", returned))
    if len(entries) not in (4, 5):
        raise InvalidInput(f"data {name!r} returned {len(entries)} parts, but 4 or 5 were needed: {wanted}.")
    with foreign(f"data {name!r} returned parts that are no tensors or no class names"):
        parts = [torch.as_tensor(entry).detach().cpu() for entry in entries[:4]]
        names = [str(label) for label in entries[4]] if len(entries) == 5 else None
    train_x, train_y, test_x, test_y = parts
    train_y, test_y = _whole(train_y, f"training classes of {name}"), _whole(test_y, f"test classes of {name}")
    if names is None:
        known = torch.cat([train_y.flatten(), test_y.flatten()])
        names = map(str, range(int(known.max()) + 1 if known.numel() else 0))
    return Dataset(name, train_x, train_y, test_x, test_y, tuple(names), torch.arange(train_y.numel()))


def _whole(classes: Tensor, what: str) -> Tensor:
    """Classes as int64; bools are 0 and 1, and whole floats, as many files hold them, are themselves."""
    _check_dense(what, classes)
    whole = classes.long()
    odd = classes[classes != whole]
    if odd.numel():
        raise InvalidInput(f"the {what} hold {odd[0].item():g}, but whole numbers were needed: 0, 1, 2, ...")
    return whole


def _check_dense(what: str, values: Tensor) -> None:
    if values.is_complex() or values.layout != torch.strided:
        kind = f"{values.dtype}, {values.layout}"
        raise InvalidInput(f"the {what} are {kind}, but a dense tensor of real numbers was needed.")


def _check(data: Dataset) -> None:
    for part, x, y in (("training", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        if y.dim() != 1 or x.dim() < 2 or len(x) != len(y) or len(y) == 0:
            shapes = f"have shape {tuple(x.shape)} and their classes {tuple(y.shape)}"
            needed = "needed are rows (M, C, ...) and classes (M,), at least one."
            raise InvalidInput(f"the {part} rows of {data.name} {shapes}; {needed}")
        _check_dense(f"{part} rows of {data.name}", x)
        low, high, classes = int(y.min()), int(y.max()), len(data.class_names)
        if low < 0 or high >= classes:
            named = f"{classes} classes are named: 0 to {classes - 1}."
            raise InvalidInput(f"the {part} classes of {data.name} run from {low} to {high}, but {named}")
    one, other = tuple(data.train_x.shape[1:]), tuple(data.test_x.shape[1:])
    if one != other:
        rows = f"a training row of {data.name} has shape {one} and a test row {other}"
        raise InvalidInput(f"{rows}; one model must take both.")


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
    """Each synset's gloss, untrusted text, and its class, a place in WORDNET_CLASSES; as the files and lines have them.

    A file that is missing, is not UTF-8, or has a line that is no synset is refused. wndb(5WN) has the files' format;
    Miller, "WordNet: A Lexical Database for English", 1995.
    """
    glosses: list[str] = []
    classes: list[int] = []
    remedy = (
        "install Debian's package (apt-get install wordnet-base), or name a folder that holds them with --data-dir."
    )
    needed = f"wordnet is four files named {', '.join(WORDNET_FILES)} in one folder: {remedy}"
    for part in WORDNET_FILES:
        with reading(folder / part, needed):
            for number, line in enumerate((folder / part).read_text("utf-8").splitlines(), start=1):
                if line.startswith("  "):  # the licence
                    continue
                found = _SYNSET.fullmatch(line)
                if found is None or int(found[1]) >= len(WORDNET_CLASSES):
                    raise ValueError(f"line {number} is no synset with a gloss")
                glosses.append(found[2].strip())
                classes.append(int(found[1]))
    return glosses, classes


def numbered(texts: Sequence[str], num_words: int = NUM_WORDS) -> dict[str, int]:
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
