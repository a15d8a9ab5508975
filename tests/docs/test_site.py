"""The built pages: every link leads somewhere, every public name is there, a phone and a dark room can read them.

`scripts/docs` builds them and says where; without it nothing here runs.
"""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from browser import in_colours, shown
from names import homes_of, names_of, namespaces

SITE = Path(os.environ.get("ROWPROP_SITE", ""))
pytestmark = pytest.mark.skipif("ROWPROP_SITE" not in os.environ, reason="scripts/docs builds the pages")

LOOKED_AT = [
    "docs/index.html", "docs/start.html", "docs/subset-of-losses.html", "docs/how-it-works.html", "docs/recipes.html",
    "docs/support-matrix.html", "docs/api/selection.html", "README.html", "notebooks/first_ten_minutes.html",
]  # fmt: skip


class Page(HTMLParser):
    """The anchors of a page, its links, and all else that it loads."""

    def __init__(self, file: Path):
        super().__init__()
        self.anchors, self.links, self.loads = {""}, [], []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        self.anchors |= {held[name] or "" for name in ("id", "name") if name in held}
        if tag in ("img", "script", "link"):
            self.loads += [held[name] for name in ("src", "href") if held.get(name) and held.get("rel") != "canonical"]
        elif tag == "a" and held.get("href"):
            self.links.append(held["href"])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {file.resolve(): Page(file) for file in SITE.rglob("*.html")}


def test_every_link_leads_to_a_file_and_a_place_in_it(pages: dict[Path, Page]):
    # Red when: a page is renamed after the build, or an id is taken out of a built page.
    missing, followed = [], 0
    for file, page in pages.items():
        for link in (*page.links, *page.loads):
            if ":" in link.partition("/")[0]:  # another site's, a letter's
                continue
            name, anchor = urldefrag(link)
            target = (file.parent / unquote(name).partition("?")[0]).resolve() if name else file
            found = target.is_file() and (target.suffix != ".html" or unquote(anchor) in pages[target].anchors)
            missing += [] if found else [(file.name, link)]
            followed += 1
    assert followed > 1000
    assert missing == []


def test_the_pages_load_nothing_from_outside(pages: dict[Path, Page]):
    # Red with a style sheet of another host in html_css_files.
    assert [(file.name, load) for file, page in pages.items() for load in page.loads if "//" in load] == []


def test_every_public_name_has_its_docstring(pages: dict[Path, Page]):
    # Red when: docs/api/batch.md loses its automodule (the build complains too, through conf.py's own check).
    anchors = {anchor for file, page in pages.items() if file.parent.name == "api" for anchor in page.anchors}
    for module in namespaces():
        for name, held in names_of(module).items():
            homes = homes_of(module, name, held)
            assert homes & anchors, homes


def test_every_page_of_the_repository_is_built():
    # Red when: include_patterns loses the pages of docs/.
    root = Path(__file__).parents[2]
    written = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/results/*.md")]
    written += root.glob("notebooks/*.ipynb")
    assert [page for page in written if not (SITE / page.relative_to(root)).with_suffix(".html").is_file()] == []


STICKING_OUT = """
const scrolls = e => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
return [...document.querySelectorAll("article *")]
  .filter(e => e.getBoundingClientRect().right > arguments[0] + 1 && !scrolls(e)).map(e => e.outerHTML.slice(0, 120));
"""


@pytest.mark.parametrize("page", LOOKED_AT)
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_a_page_fits_the_screen_and_nothing_complains(page: str, width: int, browser):
    # Red with `article .table-wrapper { overflow: visible }` in site.css, or a picture that is not there.
    shown(browser, SITE / page, width, 900 if width == 1280 else 800)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(STICKING_OUT, width) == []
    assert browser.get_log("browser") == []
    drawn = "return [...document.images].every(image => image.complete && image.naturalWidth > 0)"
    assert browser.execute_script(drawn)


def test_every_table_shows_all_its_columns(browser):
    # Red with `td { min-width: 6.5em }` in site.css.
    wide = "return [...document.querySelectorAll('.table-wrapper')].some(e => e.scrollWidth > e.clientWidth + 1)"
    cut = set()
    for page in sorted(SITE.glob("docs/*.html")):
        shown(browser, page, 1280)
        cut |= {page.stem} if browser.execute_script(wide) else set()
    assert cut == set()


def test_the_contents_of_a_page_stand_beside_it(browser):
    # Red without the rule for 80em in site.css.
    shown(browser, SITE / "docs/faq.html", 1280)
    edges = "return ['article', '.toc-tree'].map(e => document.querySelector(e).getBoundingClientRect().toJSON())"
    text, contents = browser.execute_script(edges)
    assert text["right"] < contents["left"] < contents["right"] <= 1280


def test_a_first_saving_stands_on_one_screen(browser):
    # Red with eight more lines in a script.
    shown(browser, SITE / "docs/start.html", 1280)
    blocks = "[...document.querySelectorAll('article pre')]"
    saving = f"{blocks}.find(block => block.textContent.includes('of the plain step'))"
    assert browser.execute_script(f"return {blocks}.indexOf({saving})") == 1  # the script is the one block before it
    assert browser.execute_script(f"return {saving}.getBoundingClientRect().bottom") <= 800


LUMINANCE = """
const light = text => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = light(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll("article p, article li, article td, article h1, article h2, article a")]
  .filter(e => e.textContent.trim() && e.offsetHeight)
  .map(e => light(getComputedStyle(e).color))
  .map(ink => (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05));
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_in_dark(scheme: str, browser):
    # Red with `color: #777` for links in site.css.
    in_colours(browser, scheme)
    for page in LOOKED_AT:
        browser.get((SITE / page).resolve().as_uri())
        contrasts = browser.execute_script(LUMINANCE)
        assert contrasts
        assert min(contrasts) > 4.5, page
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
