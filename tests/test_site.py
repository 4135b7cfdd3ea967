"""The documentation site builds without a warning, loads nothing from the network, and works in a
browser: at desktop and phone width, in the light and the dark theme."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html import unescape
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlencode

import pytest
import torch
from filelock import FileLock
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import attnzoo
from helpers.explorer import RUN, check, points
from scripts.site.pages import in_explorer

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage window-size=1280,900"
).split()
WIDTHS = {"desktop": 1280, "phone": 390}
# Pages whose contrast is tested, besides one variant page.
CONTRAST_PAGES = (
    "index.html", "variants/index.html", "api/attention.html", "api/names/attnzoo.attention.html",
    "results.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all workers of a test run and return its folder."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "site"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "html" / "index.html").exists():
            command = f"{sys.executable} -m sphinx -W --keep-going -q -b html -d {folder}/trees"
            # Reuse the notebook outputs that `make docs` cached.
            command += f" -D nb_execution_cache_path={ROOT}/docs/_build/.jupyter_cache"
            done = subprocess.run(
                [*command.split(), str(ROOT / "docs"), str(folder / "html")],
                cwd=ROOT, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    return folder / "html"


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads for a page: sources, style sheets, icons."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        names = ["src", "srcset", "data", "poster"] + (["href"] if tag == "link" else [])
        self.addresses += [
            attributes[name] or "" for name in names if name in attributes and tag != "a"
        ]


def pages(site: Path) -> list[str]:
    """Return the paths of all pages relative to the site, except pages of the theme in _static."""
    paths = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(name for name in paths if not name.startswith("_static/"))


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    remote = re.compile(r"(https?:)?//")
    for name in pages(site):
        addresses = Loaded((site / name).read_text()).addresses
        assert addresses
        assert [x for x in addresses if remote.match(x)] == [], name
    for path in site.rglob("*.css"):
        sources = re.findall(r"(?:url\(|@import )['\"]?([^'\")]+)", path.read_text())
        assert [x for x in sources if remote.match(x)] == [], path


def test_every_variant_has_a_page_with_its_plots(site: Path) -> None:
    for name in attnzoo.list_variants():
        text = (site / "variants" / f"{name}.html").read_text()
        assert 'class="formula"' in text
        assert {"parameters", "cost-and-backends"} <= set(re.findall(r'<section id="(.*?)"', text))
        assert len(re.findall(rf'src="\.\./_images/{name}-\w+(?:-dark)?\.svg"', text)) == 4


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Serve the site and yield its address. On file:// addresses, browsers block the search."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def resize(browser: webdriver.Chrome, width: int) -> None:
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def errors(browser: webdriver.Chrome) -> list[str]:
    return [x["message"] for x in browser.get_log("browser") if x["level"] in ("SEVERE", "WARNING")]


def test_no_page_scrolls_sideways_or_reports_an_error(
    site: Path, address: str, browser: webdriver.Chrome
) -> None:
    for name in pages(site):
        browser.get(address + name)
        for width in WIDTHS.values():
            resize(browser, width)
            content_width = browser.execute_script("return document.documentElement.scrollWidth")
            assert content_width <= width, (name, width)
        assert errors(browser) == [], name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(
    address: str, browser: webdriver.Chrome, theme: str
) -> None:
    """Text has a contrast of at least 4.5.

    A page has two copies of each plot, one per theme. Only the copy of the current theme is shown.
    """
    browser.get(f"{address}index.html")
    browser.execute_script("localStorage.setItem('mode', arguments[0])", theme)
    variant = f"variants/{attnzoo.list_variants()[0]}.html"
    for name in (*CONTRAST_PAGES, variant):
        browser.get(address + name)
        chosen = browser.find_element(By.TAG_NAME, "html").get_attribute("data-theme")
        assert chosen == theme
        for query in ("article p", "article a", "article code", "article h1", "nav a", "td", "dt"):
            for element in browser.find_elements(By.CSS_SELECTOR, query)[:3]:
                if element.is_displayed() and element.text:
                    colors = browser.execute_script(COLORS, element)
                    assert contrast(*colors) >= 4.5, (name, query, element.text, colors)
    shown = browser.find_elements(By.CSS_SELECTOR, ".plots img")
    assert sum(element.is_displayed() for element in shown) == 2


# The color of an element, and its nearest background that is not transparent.
COLORS = """
const own = getComputedStyle(arguments[0]).color;
for (let at = arguments[0]; at; at = at.parentElement) {
  const below = getComputedStyle(at).backgroundColor;
  if (!/, 0\\)$/.test(below)) return [own, below];
}
return [own, getComputedStyle(document.body).backgroundColor];
"""


def contrast(first: str, second: str) -> float:
    """Return the WCAG contrast ratio of two CSS colors."""

    def luminance(color: str) -> float:
        parts = [float(x) / 255 for x in re.findall(r"[\d.]+", color)[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_wide_tables_scroll_in_their_box(address: str, browser: webdriver.Chrome) -> None:
    resize(browser, WIDTHS["phone"])
    browser.get(f"{address}variants/index.html")
    box = browser.find_element(By.CSS_SELECTOR, ".pst-scrollable-table-container")
    inner, outer = (browser.execute_script(f"return arguments[0].{x}", box)
                    for x in ("scrollWidth", "clientWidth"))  # fmt: skip
    assert inner > outer


# Texts of the short tables that are open and wider than the boxes around them.
TOO_WIDE = """
return [...document.querySelectorAll('.short table')].filter(
  table => table.scrollWidth > table.closest('.pst-scrollable-table-container').clientWidth
).map(table => table.innerText.slice(0, 80))
"""


@pytest.mark.parametrize(
    "name",
    "results pretrained output-layers-evals models choosing masks-and-positions rounding".split(),
)
def test_short_tables_fit_into_the_page(name: str, address: str, browser: webdriver.Chrome) -> None:
    browser.get(f"{address}{name}.html")
    for width in (1400, WIDTHS["phone"]):
        resize(browser, width)
        assert browser.find_elements(By.CSS_SELECTOR, ".short table")
        assert browser.execute_script(TOO_WIDE) == [], width


def test_the_first_column_stays_when_a_table_scrolls(
    address: str, browser: webdriver.Chrome
) -> None:
    resize(browser, WIDTHS["phone"])
    browser.get(f"{address}results.html")
    left, scrolled = browser.execute_script("""
        const box = document.querySelector('details .pst-scrollable-table-container');
        box.closest('details').open = true;
        box.scrollLeft = 100;
        const name = box.querySelector('td');
        return [name.getBoundingClientRect().left - box.getBoundingClientRect().left,
                box.scrollLeft];
    """)
    assert scrolled == 100
    assert 0 <= left <= 1


def test_each_task_has_an_anchor_and_a_figure(site: Path) -> None:
    text = (site / "results.html").read_text()
    for task in ("max-retrieval", "mqar"):
        section = text[text.index(f'<section id="{task}">') :].split("<section id=", 2)[1]
        assert section.count("<figure class='curves'>") == 1
        assert "<svg" in section.split("<tbody>")[1].split("</tr>")[0]


def test_search_finds_pages(address: str, browser: webdriver.Chrome) -> None:
    browser.get(f"{address}index.html")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.CONTROL, "k")
    field = browser.switch_to.active_element
    field.send_keys("entmax", Keys.ENTER)
    assert any("variants/entmax.html" in link for link in results(browser))
    assert errors(browser) == []


def results(browser: webdriver.Chrome) -> list[str]:
    """The addresses that the page of the search lists."""
    WebDriverWait(browser, 10).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, "#search-results li a")
    )
    links = browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
    return [link.get_attribute("href") or "" for link in links]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("LoRA", "peft"),
        ("scalable softmax", "variants/ssmax"),
        ("flash", "backends"),
        ("gpt-oss", "variants/sink"),
        ("length extrapolation", "evals"),
    ],
)
def test_search_knows_synonyms(
    words: str, page: str, address: str, browser: webdriver.Chrome
) -> None:
    browser.get(f"{address}search.html?{urlencode({'q': words})}")
    assert f"/{page}.html" in results(browser)[0]


def test_formulas_are_drawn(address: str, browser: webdriver.Chrome) -> None:
    """Each MathML element is more than 8 pixels high and 4 pixels wide."""
    browser.get(f"{address}variants/index.html")
    drawn = browser.find_elements(By.TAG_NAME, "math")
    assert drawn
    assert all(element.size["height"] > 8 and element.size["width"] > 4 for element in drawn)


def test_api_pages_are_not_too_high(site: Path, address: str, browser: webdriver.Chrome) -> None:
    resize(browser, 1400)
    for name in (x for x in pages(site) if x.startswith("api/")):
        browser.get(address + name)
        height = browser.execute_script("return document.documentElement.scrollHeight")
        assert height < 10_000, f"{name}: add the page to SPLIT in scripts/site/api.py"


def test_api_names_have_summaries_and_sources(site: Path) -> None:
    listed = (site / "api" / "nn.html").read_text()
    for name in ("Attention", "WRAPPERS", "Cache"):
        page = (site / "api" / "names" / f"attnzoo.nn.{name}.html").read_text()
        assert f'id="attnzoo.nn.{name}"' in page
        assert f'href="names/attnzoo.nn.{name}.html' in listed
    page = (site / "api" / "names" / "attnzoo.attention.html").read_text()
    source = re.search(r'href="\.\./\.\./(_modules/[^"#]+)#attention"', page)
    assert source is not None
    assert '<div class="viewcode-block" id="attention">' in (site / source[1]).read_text()


def test_no_page_links_to_a_repository_that_does_not_exist(site: Path) -> None:
    for name in ("index.html", "explore.html", "api/nn.html"):
        assert "fa-code-branch" not in (site / name).read_text()


def test_code_can_be_copied(address: str, browser: webdriver.Chrome) -> None:
    browser.get(f"{address}index.html")
    blocks = browser.find_elements(By.CSS_SELECTOR, "div.highlight pre")
    assert len(browser.find_elements(By.CSS_SELECTOR, "button.copybtn")) == len(blocks) > 0


# ---- the explorer ----------------------------------------------------------------------------

CELL = "tr[data-variant={}] td[data-quantity={}]"


def cell(browser: webdriver.Chrome, variant: str, quantity: str) -> float:
    """A number in the table of the explorer."""
    text = browser.find_element(By.CSS_SELECTOR, CELL.format(variant, quantity)).text
    return float(text.replace("−", "-"))


def explore(browser: webdriver.Chrome, address: str, settings: str) -> None:
    browser.get("about:blank")  # a change behind # alone would not load the page
    browser.get(f"{address}explore.html#{settings}")


def test_explorer_gives_the_weights_of_the_library(address: str, browser: webdriver.Chrome) -> None:
    """All points of `test_explorer.py`, computed by the browser."""
    explore(browser, address, "")
    script = "const F = AttnzooFormulas;" + RUN + "return answer(arguments[0]).results;"
    results = browser.execute_script(script, points())
    assert len(results) >= 200
    for point, result in zip(points(), results, strict=True):
        check(point, result)


def test_deep_link_sets_the_explorer(address: str, browser: webdriver.Chrome) -> None:
    explore(browser, address, "n=4096&gap=2&noise=0&v=softmax,entmax&entmax.alpha=2")
    rows = browser.find_elements(By.CSS_SELECTOR, "tr[data-variant]")
    assert [row.get_attribute("data-variant") for row in rows] == ["softmax", "entmax"]
    z = torch.zeros(4096, dtype=torch.float64)
    z[0] = 2
    w = attnzoo.probabilities(z)
    assert cell(browser, "softmax", "top") == pytest.approx(w[0].item(), rel=5e-3)
    assert cell(browser, "softmax", "support") == 4096
    assert cell(browser, "entmax", "support") == 1
    field = browser.find_element(By.CSS_SELECTOR, "#explorer-entmax-alpha ~ input")
    assert field.get_attribute("value") == "2"
    assert errors(browser) == []


def test_explorer_follows_the_keyboard(address: str, browser: webdriver.Chrome) -> None:
    explore(browser, address, "v=softmax&noise=0")
    before = cell(browser, "softmax", "top")
    slider = browser.find_element(By.ID, "explorer-gap")
    slider.send_keys(Keys.ARROW_RIGHT * 20)
    WebDriverWait(browser, 10).until(lambda b: cell(b, "softmax", "top") > before)
    assert "gap=4&" in browser.current_url
    browser.find_element(By.CSS_SELECTOR, "input[value=ssmax]").send_keys(Keys.SPACE)
    assert browser.current_url.endswith("v=softmax,ssmax")
    field = browser.find_element(By.CSS_SELECTOR, "#explorer-ssmax-s ~ input")
    field.clear()
    field.send_keys("0.5")
    assert browser.current_url.endswith("ssmax.s=0.5")


def test_explorer_says_what_an_address_has_wrong(address: str, browser: webdriver.Chrome) -> None:
    explore(browser, address, "n=1&v=softmax,cosformer,none&softmax.s=1")
    status = browser.find_element(By.CSS_SELECTOR, "[role=status]").text
    for text in ("n=1", "cosformer is not shown", "“none”", "softmax.s=1"):
        assert text in status


def test_variant_pages_link_into_the_explorer(
    site: Path, address: str, browser: webdriver.Chrome
) -> None:
    for name in in_explorer():
        text = (site / "variants" / f"{name}.html").read_text()
        (settings,) = re.findall(r'href="\.\./explore\.html#([^"]+)"', text)
        explore(browser, address, unescape(settings))
        assert browser.find_element(By.CSS_SELECTOR, "[role=status]").text == "", name
        assert browser.find_element(By.CSS_SELECTOR, f"tr[data-variant={name}]").is_displayed()
