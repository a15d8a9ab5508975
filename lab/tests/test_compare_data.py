"""The data, the models and the settings of `rowprop compare`: read as they are, or refused in one sentence."""

from __future__ import annotations

import gzip
import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import compare_cases
import rowprop
from compare_cases import settings
from rowprop.errors import InvalidInput, MissingExtra
from rowprop_lab import data as data_module
from rowprop_lab.data import load_data
from rowprop_lab.models import build_model, check_model
from rowprop_lab.run import compare
from rowprop_lab.settings import Settings

OPTIONS = [
    ({"keep": 0.0}, "keep is 0.0, but a fraction in (0, 1] was needed"),
    ({"seconds": 3.0}, "epochs and seconds are both given"),
    ({"epochs": 0}, "epochs is 0, but at least 1"),
    ({"seeds": 0}, "seeds is 0"),
    ({"batch_rows": 1}, "batch size is 1"),
    ({"threads": 100000}, "threads is 100000, but this machine has"),
    ({"lr": -1.0}, "lr is -1.0, but a positive number"),
    ({"methods": "full,biggest-losers", "epochs": 1}, "biggest-losers trains the first epoch whole and needs at l"),
    ({"device": "warp"}, "compare got device='warp', which cannot be used here: "),
    ({"device": "meta"}, "compare got device='meta', which holds no numbers"),
    ({"model": "gpt", "methods": "infobatch"}, "unknown for tokens; the methods are full, random, ohem, rho1"),
    ({"model": "gpt", "methods": "ohem@recompute"}, "unknown for tokens; the engines are sliced, cut, "),
    ({"model": "textnet", "methods": "ohem@cut"}, "engine 'cut' is unknown; the engines are sliced, recompute, "),
    ({"model": "textnet", "methods": "rho1"}, "method 'rho1' is unknown; the methods are full"),
    ({"data": "digits", "model": "gpt"}, "next token of a text, but digits has classes; use --data wordnet"),
]
NAMES = {
    "model": {
        "": "model '' is unknown",
        "vgg": "model 'vgg' is unknown; the models are convnet, resnet, vit, textnet, gpt and module:callable",
        "compare_cases:one_class_short": "returned shape (2, 2) for a batch of shape (2, 1, 8, 8), but logits of",
        "compare_cases:wants_colour": "failed on a batch of shape (2, 1, 8, 8): RuntimeError",
        "compare_cases:not_a_model": "returned (int), but a torch.nn.Module, (model, batch) or",
        "compare_cases:TwoOutputs": "returned a tuple for a batch of shape (2, 1, 8, 8), but logits of",
        "compare_cases:returning": "failed when called without arguments: TypeError",
        "compare_cases:net_with_losses": "brings its own losses; cross entropy is compared; return (model, batch)",
    },
    "methods": {
        "full,best": "method 'best' is unknown; the methods are full, random",
        "ohem@fast": "engine 'fast' is unknown; the engines are sliced, recompute",
        "full@sliced": "full is an ordinary loop",
        "thinned@sliced": "thinned is an ordinary loop",
        "full,random@thinned": "as many rows as thinned of the same seed, but thinned is not among",
        "thinned,ohem@thinned": "engine 'thinned' is unknown",
        "full,plain@ohem": "costs as much as ohem of the same seed, but ohem is not among",
        "ohem,plain@ohem": "has its cost from the time of full; name full too",
        "plain": "method 'plain' is unknown",
        "full,full": "stands twice",
        " , ": "no method was given",
        "full,no_such_module:top": "method 'no_such_module:top' could not be loaded: ModuleNotFoundError",
        "full,compare_cases:nothing": "method 'compare_cases:nothing' could not be loaded: AttributeError",
        "full,compare_cases:HOSTILE": "is of type str, but a callable was needed",
        "full,compare_cases:own_top@fast": "engine 'fast' is unknown",
        "full,compare_cases:own_number": "returned a int, but a rowprop.SelectiveBackprop was needed: return Selective",
        "full,compare_cases:failing": "failed when called with (model, losses_fn, keep, engine, generator, timing): Ty",
        "full,compare_cases:own_broken": "failed in its first step: AttributeError: 'Tensor' object has no attribute '",
        "full,rowprop.recipes:infobatch": "failed when called with (model, losses_fn, keep, engine, generator, timing)",
        "full,thinned": "without blocks that repeat (children of one class in a ModuleList or a Sequential)",
    },
    "data": {
        "imagenet": "data 'imagenet' is unknown; it can be digits",
        "no_such_module:data": "data 'no_such_module:data' could not be loaded: ModuleNotFoundError",
        "compare_cases:nothing": "has no attribute 'nothing'",
        "compare_cases:HOSTILE": "is of type str, but a callable was needed",
        "compare_cases:": "is not of the form module:callable",
        "compare_cases:failing": "failed when called: OSError: the disk is on fire",
        "compare_cases:not_data": "returned a str, but a tuple was needed",
        "compare_cases:too_few_classes": "have shape (96, 1, 8, 8) and their classes (95,)",
        "compare_cases:unnamed_class": "run from 0 to 2, but 2 classes are named",
        "compare_cases:infinite": "hold values that are not finite",
        "compare_cases:three_parts": "returned 3 parts, but 4 or 5 were needed: (train_x, train_y, test_x, test_y) an",
        "compare_cases:halves": "training classes of compare_cases:halves hold 0.5, but whole numbers were needed",
        "compare_cases:half_test": "test classes of compare_cases:half_test hold 0.5",
        "compare_cases:nan_class": "hold nan, but whole numbers",
        "compare_cases:huge_class": "hold 1e+30, but whole numbers",
        "compare_cases:complex_classes": "training classes of compare_cases:complex_classes are torch.complex64",
        "compare_cases:complex_rows": "training rows of compare_cases:complex_rows are torch.complex64",
        "compare_cases:sparse_rows": "torch.sparse_coo, but a dense tensor of real numbers was needed",
        "compare_cases:one_number": "and their classes ()",
        "compare_cases:empty": "have shape (0, 1, 8, 8) and their classes (0,)",
        "compare_cases:texts": "returned parts that are no tensors or no class names: ",
        "compare_cases:no_names": "returned parts that are no tensors or no class names: TypeError",
        "compare_cases:other_sides": "has shape (1, 8, 8) and a test row (1, 8, 7); one model must take both",
    },
}
REFUSED = OPTIONS + [({what: name}, said) for what, names in NAMES.items() for name, said in names.items()]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_cannot_be_compared_is_one_sentence_before_anything_is_written(changes, sentence: str, tmp_path: Path):
    with pytest.raises(InvalidInput) as caught:
        compare(settings(**changes), tmp_path)
    assert sentence in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_settings_follow_data_and_model():
    assert (Settings().model, Settings(data="wordnet").model) == ("convnet", "textnet")
    assert Settings(data="wordnet", model="resnet").model == "resnet"
    assert Settings(data="wordnet").unit == "row"
    chosen = Settings(data="wordnet", model="gpt")
    labels = [method.label for method in chosen.parsed_methods]
    assert labels == ["full", "random", "random@cut", "ohem", "ohem@cut", "rho1", "rho1@cut", "plain@random@cut"]
    assert (chosen.unit, chosen.epochs, chosen.batch_rows, chosen.lr) == ("token", 4, 16, 0.003)


@pytest.mark.parametrize("module", ["matplotlib.figure", "jinja2", "PIL.Image"])
def test_a_missing_extra_is_said_before_training(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match="which is not installed; run: pip install matplotlib jinja2 pillow"):
        compare(settings(), tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match="The digits data needs scikit-learn"):
        load_data("digits")


@pytest.mark.parametrize("name", ["convnet", "resnet", "vit"])
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 28)])
def test_the_models_fit_small_images(name: str, channels: int, side: int):
    check_model(build_model(name, 7, channels), name, torch.zeros(2, channels, side, side), 7)


def test_textnet_sees_words_and_no_padding_and_stays_sliced():
    # Red with a mean over all T places instead of over the words.
    model = build_model("textnet", 7, 50)
    tokens = torch.zeros(12, 10, dtype=torch.int64)
    for row in range(12):
        tokens[row, : row % 9] = torch.randint(1, 50, (row % 9,))
    longer = torch.cat([tokens, torch.zeros(12, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(tokens), model(longer))
    assert model(tokens)[0].isfinite().all()  # no word at all
    losses = F.cross_entropy(model(tokens), torch.arange(12) % 7, reduction="none")
    with rowprop.watch() as report:
        rowprop.pick(losses, torch.tensor([1, 5, 6])).mean().backward()
    assert report.sliced
    assert not report.densified


def test_classes_may_be_whole_floats_or_bools():
    # Red where they are refused, or where a tensor with a gradient cannot be read.
    raw = compare_cases.tiny()
    floats, bools = load_data("compare_cases:float_classes"), load_data("compare_cases:bool_classes")
    for found, wanted in ((floats, raw[1]), (bools, (raw[1] > 0).long())):
        assert found.train_y.dtype == torch.int64
        assert torch.equal(found.train_y, wanted)
        assert found.fingerprint()
    assert (floats.class_names, bools.class_names) == (("0", "1", "2"), ("0", "1"))
    assert torch.equal(floats.train_x, load_data("compare_cases:tiny").train_x)


def test_digits_are_split_without_overlap():
    data = load_data("digits")
    assert (len(data.train_y), len(data.test_y), data.train_x.shape[1:]) == (1347, 450, (1, 8, 8))
    assert len(set(data.train_ids.tolist())) == 1347
    assert float(data.train_x.mean()) == pytest.approx(0, abs=1e-5)


def idx(shape: tuple[int, ...], content: bytes, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, len(shape))) + b"".join(side.to_bytes(4, "big") for side in shape) + content


def write_fashion(folder: Path) -> dict[str, bytes]:
    """Write four small files of Fashion-MNIST's form; return their decompressed content by name."""
    generator = torch.Generator().manual_seed(2)
    contents: dict[str, bytes] = {}
    for part, rows in (("train", 30), ("t10k", 20)):
        pixels = torch.randint(256, (rows * 28 * 28,), generator=generator, dtype=torch.uint8)
        contents[f"{part}-images-idx3-ubyte"] = idx((rows, 28, 28), pixels.numpy().tobytes())
        contents[f"{part}-labels-idx1-ubyte"] = idx((rows,), bytes(row % 10 for row in range(rows)))
    folder.mkdir(exist_ok=True)
    for stem, content in contents.items():
        (folder / f"{stem}.gz").write_bytes(gzip.compress(content))
    return contents


def test_fashion_mnist_is_read_from_a_folder(tmp_path: Path):
    contents = write_fashion(tmp_path)
    data = load_data("fashion-mnist", tmp_path)
    raw = torch.tensor(list(contents["train-images-idx3-ubyte"][16:]), dtype=torch.float32).reshape(30, 1, 28, 28)
    torch.testing.assert_close(data.train_x, (raw - raw.mean()) / raw.std())
    assert data.train_y.tolist() == [row % 10 for row in range(30)]
    assert data.test_x.shape == (20, 1, 28, 28)
    assert data.class_names[9] == "Ankle boot"


GOOD = idx((2, 1, 2), b"\x01\x02\x03\x04")


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


IMAGES, GLOSSES = "train-images-idx3-ubyte.gz", "data.adj"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (IMAGES, b"not gzip", "is corrupt (Not a gzipped file"),
        (IMAGES, packed(GOOD)[:-10], "is corrupt (Compressed file ended"),
        (IMAGES, packed(GOOD)[:12] + b"\xff\xff\xff" + packed(GOOD)[15:], "is corrupt ("),
        (IMAGES, packed(GOOD[:-1]), "is corrupt (its header promises 4 bytes for shape (2, 1, 2), 3 are there"),
        (IMAGES, packed(GOOD + b"!"), "is corrupt (its header promises 4 bytes for shape (2, 1, 2), 5 are there"),
        (IMAGES, packed(GOOD[:9]), "is corrupt (its header promises"),
        (IMAGES, packed(idx((2, 1, 2), b"1234", kind=13)), "is corrupt (not an IDX file of bytes"),
        (IMAGES, packed(b""), "is corrupt (not an IDX file of bytes"),
        (IMAGES, b"", "is corrupt ("),
        (IMAGES, packed(idx((0, 28, 28), b"")), "is corrupt (its header promises 0 bytes"),
        (IMAGES, None, f"does not exist; fashion-mnist is four files named {IMAGES}"),
        (GLOSSES, b"00000000 04 n 01 thing 0 000\n", "is corrupt (line 1 is no synset with a gloss)"),
        (GLOSSES, b"  1 licence\n00000000 45 n 01 thing 0 000 | it\n", "is corrupt (line 2 is no synset"),
        (GLOSSES, b"00000000 04 n 01 thing 0 000 | \xff\n", "is corrupt ('utf-8' codec"),
        (GLOSSES, None, "does not exist; wordnet is four files named data.noun, data.verb, data.adj, data.adv in one "
         "folder: install Debian's package (apt-get install wordnet-base)"),
    ],
)  # fmt: skip
def test_a_corrupt_file_is_one_sentence_that_names_it(
    name: str, content: bytes | None, sentence: str, tmp_path: Path
):  # fmt: skip
    write_fashion(tmp_path)
    compare_cases.write_glosses(tmp_path)
    path = tmp_path / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        load_data("wordnet" if name == GLOSSES else "fashion-mnist", tmp_path)
    assert f"the data file {path} {sentence}" in str(caught.value)


def test_download_checks_the_digest_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served = tmp_path / "served"
    contents = write_fashion(served)
    monkeypatch.setattr(data_module, "DEBIAN_FASHION_MNIST", tmp_path / "absent")
    monkeypatch.setattr(data_module, "FASHION_MNIST_URL", f"{served.as_uri()}/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(InvalidInput, match=r"is not fashion-mnist: its sha256 is [0-9a-f]{64}, not c59f468a"):
        load_data("fashion-mnist")
    assert not (tmp_path / "cache").exists()  # nothing that failed the check is kept

    digests = {stem: hashlib.sha256(content).hexdigest() for stem, content in contents.items()}
    monkeypatch.setattr(data_module, "FASHION_MNIST_SHA256", digests)
    first = load_data("fashion-mnist").fingerprint()
    for path in served.iterdir():
        path.unlink()
    assert load_data("fashion-mnist").fingerprint() == first  # from the cache, for the source is gone
    (tmp_path / "cache" / "rowprop" / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InvalidInput, match=r"could not be downloaded .* package dataset-fashion-mnist, .* --data-dir"):
        load_data("fashion-mnist")


@pytest.mark.skipif(not data_module.DEBIAN_FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_the_digests_are_those_of_the_published_files():
    for stem, expected in data_module.FASHION_MNIST_SHA256.items():
        content = gzip.decompress((data_module.DEBIAN_FASHION_MNIST / f"{stem}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == expected


def test_wordnet_is_read_from_a_folder(tmp_path: Path):
    # Red where the vocabulary also counts the test rows, or rows lose their texts in the shuffle or under train_rows.
    written = compare_cases.write_glosses(tmp_path)
    data = load_data("wordnet", tmp_path)
    assert (len(data.train_y), len(data.test_y), len(written)) == (135, 15, 150)
    ids = data.train_ids.tolist()
    assert len(set(ids)) == 135
    names = {5: "noun.animal", 18: "noun.person", 29: "verb.body"}
    told = zip(data.train_texts, (data.class_names[number] for number in data.train_y), strict=True)
    assert [*told] == [(written[row][0], names[written[row][1]]) for row in ids]
    words = [re.sub(r"\W", " ", gloss.lower()).split() for gloss, _ in written]
    counts = Counter(word for row in ids for word in words[row])
    frequent = sorted(sorted(counts), key=counts.__getitem__, reverse=True)
    assert data.num_words == data.num_inputs == len(frequent) + 2
    number = {word: place for place, word in enumerate(frequent, 2)}
    tokens = [([number.get(word, 1) for word in row] + [0] * 24)[:24] for row in words]
    assert data.train_x.tolist() == [tokens[row] for row in ids]
    assert sorted(data.test_x.tolist()) == sorted(tokens[row] for row in {*range(150)} - {*ids})
    part = load_data("wordnet", tmp_path, train_rows=20)
    assert [part.train_texts[row] for row in range(20)] == [written[row][0] for row in part.train_ids.tolist()]
    assert torch.equal(part.test_x, data.test_x)


@pytest.mark.skipif(not data_module.DEBIAN_WORDNET.is_dir(), reason="needs Debian's wordnet-base")
def test_wordnet_is_what_it_is_said_to_be():
    glosses, classes = data_module.read_glosses(data_module.DEBIAN_WORDNET)
    assert len(glosses) == len(classes) == 117_659
    assert len(set(classes)) == len(data_module.WORDNET_CLASSES) == 45
    # Counted by lexnames(5WN)'s description: a hamster's gloss is noun.animal, breathe's verb.body.
    found = dict(zip(glosses, classes, strict=True))
    hamster = next(gloss for gloss in glosses if gloss.startswith("short-tailed Old World burrowing rodent"))
    assert data_module.WORDNET_CLASSES[found[hamster]] == "noun.animal"
    breathe = next(gloss for gloss in glosses if gloss.startswith("draw air into, and expel out of, the lungs"))
    assert data_module.WORDNET_CLASSES[found[breathe]] == "verb.body"
