"""What tests in several files need: the same random numbers, one thread, a browser."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerator import Accelerator
from rowprop import host
from rowprop.backprop.autograd.rowgrad import by_python, go_native
from rowprop.native import building
from rowprop.thinning.worth import Worth
from step_cases import ENGINES

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
if not torch.cuda.is_available():
    # torch's own function formats the stack three times, for kinds of devices that are not there.
    torch.manual_seed = torch.default_generator.manual_seed
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
QUIET = ("--disable-quic", "--disable-component-update", "--disable-sync")
HAS_LAYOUT = "return [...document.body.children].some(e => e.offsetHeight)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--as-accelerator", action="store_true", help="act as where reading a tensor makes the host wait for a device"
    )
    parser.addoption("--native", action="store_true", help="compile native dispatch, and run every test by it")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("ROWPROP_NATIVE", "0")  # no test depends on what is compiled, or has it compiled
    if config.getoption("--native"):
        os.environ["ROWPROP_NATIVE"] = "1"
        building.build()
        go_native()
    if config.getoption("--as-accelerator"):
        host.READ_AT_ONCE.clear()
        Accelerator.set_up()
    if config.pluginmanager.hasplugin("hypothesispytest"):  # some environments have no Hypothesis
        from hypothesis import HealthCheck, settings

        # No test fails because the machine is slow.
        settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("unhurried")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """This test is for each engine."""
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers each time, whichever ran before it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def in_python() -> Iterator[None]:
    """In this test Python runs the ops, under ``--native`` too."""
    with by_python():
        yield


@pytest.fixture
def as_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test a read of a tensor's values waits for a device."""
    monkeypatch.setattr(host, "READ_AT_ONCE", set[str]())


@pytest.fixture
def as_host(request: pytest.FixtureRequest) -> None:
    """In this test the CPU's values are read at once. Under ``--as-accelerator`` it would be the same test again."""
    if request.config.getoption("--as-accelerator"):
        pytest.skip("reads the CPU's values at once")


@pytest.fixture
def any_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test a thinning keeps any number of rows, also where devices round up to a multiple."""
    monkeypatch.setattr("rowprop.thinning.backward.MULTIPLE", 1)


@pytest.fixture
def always_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test thinning draws at every block, although a small model is not worth it."""
    monkeypatch.setattr(Worth, "decide", lambda *_: None)


@pytest.fixture
def pinned_matplotlib() -> None:
    """This test compares figures to the pixel, and each matplotlib lays them out a little otherwise."""
    found = pytest.importorskip("matplotlib").__version__
    if f"matplotlib=={found}\n" not in (Path(__file__).parents[1] / "constraints.txt").read_text():
        pytest.skip(f"the figures were drawn by the matplotlib of constraints.txt, not by {found}")


@pytest.fixture
def quick_kernels() -> Iterator[None]:
    """Inductor's kernels without vector instructions, which take it half as long to compile."""
    from torch._inductor import config

    with config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """A Trainer collects garbage after each training: among the test's own objects, not all that imports made."""
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and wait for them where the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    with on_one_thread():
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium or Chrome, without a window, driven by selenium; its log is kept."""
    webdriver, driver = pytest.importorskip("selenium.webdriver"), shutil.which("chromedriver")
    waiting = pytest.importorskip("selenium.webdriver.support.ui")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, *QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})

    class LaidOut(webdriver.Chrome):
        """Goes on when a page has its layout: a loaded one may have none yet, and all its heights are 0."""

        def get(self, url: str) -> None:
            super().get(url)
            waiting.WebDriverWait(self, 20).until(lambda _: self.execute_script(HAS_LAYOUT))

    started = LaidOut(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(autouse=True)
def _told_of_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning of ``batchnorm=None``, which comes once in a process, has come; test_batchnorm.py looks at it."""
    monkeypatch.setattr("rowprop.backprop.rules.norms._warned", [True])


@pytest.fixture(autouse=True)
def _silent_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands say nothing of work that takes long on a busy machine; test_terminal.py looks at what they would say."""
    from rowprop.app import terminal

    monkeypatch.setattr(terminal, "QUIET_S", 3600.0)
