"""The report: its content, the escaping of hostile texts, and its behaviour in a browser."""

from __future__ import annotations

import io
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from evals.measures.sparsity import TITLES
from evals.reporting import curves
from evals.reporting.figures import pictures
from evals.reporting.report import report_html
from evals.reporting.shown import ShownGroup
from evals.reporting.tables import short_lengths
from evals.results.store import Row
from evals.results.summary import groups
from evals.results.summary_csv import summary_of
from evals.tasks import TASKS
from helpers import evals_rows

EVIL = "</script><script>alert(1)</script>'\"&\u2028<img src=//evil.test/x onerror=alert(1)>"
LENGTHS = (16, 64, 256)
NOTE = "smoke: figures mean nothing"
ACCURACY = {  # variant -> accuracy at each of LENGTHS; None: not finite
    "softmax": (0.99, 0.5, 0.12),
    "ssmax": (0.98, 0.9, 0.8),
    "softmax->log_n(train_length=16)": (0.97, 0.7, 0.4),
    EVIL: (0.5, 0.4, 0.3),
    "cosformer(max_length=512)": (0.96, 0.2, None),
}
BITS = {"softmax": (2.0, 3.0, 5.0), "ssmax": (2.2, 2.5, 2.75), "sigmoid": (2.1, 2.6, 4.0)}
RANKED = ["ssmax", "softmax->log_n(train_length=16)", EVIL, "softmax", "cosformer(max_length=512)"]


def row(task: str, variant: str, length: int, seed: int, score: float | None, longest: int) -> Row:
    """A result row in the format of the evals. All metrics have the value ``score``."""
    positions = "none" if task == "needle" else "rope"
    metrics = {metric.name: score for metric in TASKS[task].metrics}
    peaks = {"softmax": [0.4, 0.3], "ssmax": [0.9, 0.8]}.get(variant)
    curves = {"best_keys": [0.5, 0.2, 0.1]} if task == "needle" else {"bits_by_position": [3.0] * 4}
    if peaks is not None and task == "needle":
        curves["head_peak"] = [peak * 16 / length for peak in peaks]
        others = ("range", "bound", "strength", "alignment", *TITLES)
        curves |= {f"head_{name}": [0.5, 0.4] for name in others}
    ok = score is not None
    return evals_rows.row(
        variant, score, task=task, positions=positions, seed=seed, length=length,
        status="ok" if ok else "nan", message="" if ok else f"not finite: {EVIL}",
        metrics=metrics if ok else {}, curves=curves if ok else {},
        chance=0.1 if task == "needle" else 8.0,
        settings={"steps": 20, "train_shortest": 5, "train_longest": longest},
    )  # fmt: skip


def rows() -> list[Row]:
    """Result rows: needle with two seeds, language-model with one seed.

    ssmax has only one seed in needle at n = 64.
    """
    result_rows = []
    for variant, scores in ACCURACY.items():
        for length, score in zip(LENGTHS, scores):
            for seed in (0, 1):
                value = None if score is None else score + 0.01 * (2 * seed - 1)
                result_rows.append(row("needle", variant, length, seed, value, 16))
    result_rows = [r for r in result_rows if (r["variant"], r["x"], r["seed"]) != ("ssmax", 64, 1)]
    for variant, scores in BITS.items():
        for length, score in zip(LENGTHS, scores):
            result_rows.append(row("language-model", variant, length, 0, score, 16))
    return result_rows


def shown(result_rows: list[Row]) -> list[ShownGroup]:
    """The groups that the report shows for these rows, without pictures."""
    return [ShownGroup(group) for group in groups(result_rows)]


class Page(HTMLParser):
    """Parser that collects tags, attributes, scripts, sortable tables and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.boards: list[list[list[str]]] = []
        self.texts: list[str] = []
        self._board = False
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else self._inside
        if tag == "table" and dict(attrs).get("class") == "sortable":
            self._board = True
            self.boards.append([])
        if self._board and tag == "tr":
            self.boards[-1].append([])
        if self._board and tag in ("td", "th"):
            self.boards[-1][-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._board = self._board and tag != "table"
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles.append(data)
        else:
            self.texts.append(data)
            if self._board and self.boards[-1]:
                self.boards[-1][-1][-1] += data.strip()

    @property
    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.tags if "id" in attrs]


@pytest.fixture(scope="module")
def html() -> str:
    return report_html(shown(rows()), f"{NOTE} {EVIL}")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_hostile_texts_are_escaped(html: str, page: Page) -> None:
    assert "<script>alert" not in html
    assert "<img" not in html
    assert len(page.scripts) == 1  # only the report's own script
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    visible = "".join(page.texts)
    for text in (f"{NOTE} {EVIL}", f"not finite: {EVIL}", f"{EVIL} † 2/2"):
        assert text in visible


def test_page_loads_no_external_files(page: Page) -> None:
    for _, attrs in page.tags:
        assert not {"srcset", "action", "data", "poster", "xlink:href"} & set(attrs)
        assert str(attrs.get("src", "data:")).startswith("data:")
        assert str(attrs.get("href", "#")).startswith("#")
        assert "url(" not in str(attrs.get("style", ""))
    style = "".join(page.styles)
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in page.scripts[-1]
    policy = next(attrs["content"] for tag, attrs in page.tags if tag == "meta" and len(attrs) == 2
                  and "http-equiv" in attrs)  # fmt: skip
    assert str(policy).startswith("default-src 'none'; img-src data:;")


def test_leaderboard_is_sorted_by_the_longest_length(page: Page) -> None:
    head, *lines, chance = page.boards[0]
    assert head == [
        "variant",
        "n = 16train",
        "n = 644 ×",
        "n = 25616 ×",
        "effective length",
        "curve",
    ]
    numbered = [f"{rank}. {label}" for rank, label in enumerate(RANKED, 1)]
    assert [line[0].split(" †")[0] for line in lines] == numbered
    assert [line[0] for line in lines if "†" in line[0]] == [f"3. {EVIL} † 2/2"]
    assert lines[0] == ["1. ssmax", "98.0 ±12.7", "89.0*", "80.0 ±12.7", "64", ""]
    assert lines[-1][-3:] == ["nan", "16", ""]
    assert [line[-2] for line in lines if "†" in line[0]] == ["—"]  # no effective length
    assert chance == ["chance", "10.0", "10.0", "10.0", "", ""]


def test_leaderboard_of_a_loss_is_sorted_ascending(page: Page) -> None:
    lines = page.boards[1][1:-1]
    assert [line[0] for line in lines] == [
        "1. ssmax · rope", "2. sigmoid · rope", "3. softmax · rope"
    ]  # fmt: skip
    assert lines[0][1:] == ["2.20", "2.50", "2.75", ""]  # one seed has no interval
    sorts = [attrs["aria-sort"] for tag, attrs in page.tags if "aria-sort" in attrs]
    assert sorts == ["descending", "ascending"]


def test_a_short_table_has_the_train_length_its_multiples_and_the_longest() -> None:
    lengths = (16, 32, 64, 128, 256, 512)
    (group,) = groups([row("needle", "softmax", n, 0, 0.5, 16) for n in lengths])
    chosen = [(16, "train"), (64, "4 ×"), (256, "16 ×"), (512, "32 ×")]
    assert short_lengths(summary_of(group)) == chosen


def test_curves_can_be_seen_on_light_and_dark_pages() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(x * y for x, y in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in curves.COLOURS:
        assert 1.05 / (luminance(colour) + 0.05) >= 3, colour
        assert (luminance(colour) + 0.05) / (luminance("#14181e") + 0.05) >= 3, colour


def test_the_numbers_at_the_ends_of_curves_do_not_touch() -> None:
    """Nine rows end at the same score."""
    every = [row("needle", f"softmax_{i}", n, 0, 0.9, 16) for i in range(9) for n in LENGTHS]
    text = curves.figure(summary_of(groups(every)[0]))
    ends = re.findall(r"<text x='462' y='([\d.]+)'[^>]*>(\d)</text>", text)
    assert sorted(end for _, end in ends) == [str(rank) for rank in range(1, 10)]
    heights = sorted(float(y) for y, _ in ends)
    assert min(b - a for a, b in pairwise(heights)) >= 13.9
    assert curves.figure(summary_of(groups(every[:3])[0])) == ""  # one row


def test_every_link_has_a_target(page: Page) -> None:
    links = {str(attrs["href"])[1:] for tag, attrs in page.tags if tag == "a"}
    assert len(set(page.ids)) == len(page.ids)
    assert links <= set(page.ids)
    assert {"needle", "language-model", "needle-rows", "language-model-rows"} <= links
    assert len([link for link in links if re.fullmatch(r"needle-\d+-\d+", link)]) == 15


def test_every_row_is_shown(html: str) -> None:
    body = html[html.index("id='needle-rows'") :].split("</table>")[0]
    assert body.count("<tr") - 1 == len([r for r in rows() if r["task"] == "needle"])
    assert "needle softmax none 1 64" in body


def test_failed_and_missing_results_are_listed(html: str) -> None:
    listed = html[html.index("id='failed'") :].split("</details>")[0]
    assert "2 results with failed or missing seeds" in listed
    assert "cosformer(max_length=512), n = 256</a> — nan in 2 of 2 seeds: not finite" in listed
    assert "ssmax, n = 64</a> — missing in 1 of 2 seeds" in listed
    page_without_failures = report_html(
        shown([r for r in rows() if r["task"] == "language-model"]), ""
    )
    assert "id='failed'" not in page_without_failures


def test_theory_section_is_shown_only_if_heads_were_measured(html: str) -> None:
    needle, language = html.split("<section id='language-model'>")
    assert "Theory and measurement" in needle
    assert "Theory and measurement" not in language


@pytest.fixture(scope="module")
def drawn() -> list[ShownGroup]:
    """The groups of needle and language-model, with their pictures."""
    return [replace(one, pictures=pictures(one.group)) for one in shown(rows())]


@pytest.mark.slow
def test_pictures_are_embedded_in_the_page(drawn: list[ShownGroup]) -> None:
    """Pictures: length curves of all metrics, heat maps that have data."""
    needle, language = drawn
    names = [metric.name for metric in TASKS["needle"].metrics]
    picture_names = [picture.name for picture in needle.pictures]
    assert picture_names == [*names, "best_keys", "head_peak", "head_entropy"]
    picture_names = [picture.name for picture in language.pictures]
    assert picture_names[-1] == "bits_by_position"
    for picture in needle.pictures:
        with Image.open(io.BytesIO(picture.data)) as image:
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10
    html = report_html([needle], "")
    page = Page(html)
    sources = [str(attrs["src"]) for tag, attrs in page.tags if tag == "img"]
    assert sources == [
        f"data:image/png;base64,{b64encode(p.data).decode()}" for p in needle.pictures
    ]
    opened = [tag for tag, attrs in page.tags if tag == "details" and "open" in attrs]
    assert len(opened) == 1  # failures
    for heading in ("Length curves", "Heat maps"):
        assert f"<h3>{heading}" in html
        assert f"<h3>{heading}" not in report_html([replace(needle, pictures=())], "")


def test_groups_of_one_task_have_their_own_headings() -> None:
    other = [r | {"group": r["group"] | {"steps": 40}} for r in rows()]
    page = Page(report_html(shown([*rows(), *other]), ""))
    assert {"needle-1", "needle-2"} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert {"needle · steps 20", "needle · steps 40"} <= set(page.texts)


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage window-size=1200,900"
).split()


@pytest.fixture
def browser(tmp_path: Path, drawn: list[ShownGroup]) -> Iterator[webdriver.Chrome]:
    """A Chromium driver that has opened the report from disk."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        file = tmp_path / "report.html"
        file.write_text(report_html(drawn, NOTE), encoding="utf-8")
        driver.get(file.as_uri())
        yield driver
    finally:
        driver.quit()


# Texts of the open tables that are wider than the boxes around them.
TOO_WIDE = """
return [...document.querySelectorAll('.wide > table')].filter(
  table => !table.closest('details') && table.scrollWidth > table.parentElement.clientWidth
).map(table => table.innerText.slice(0, 80))
"""


def click(browser: webdriver.Chrome, element: WebElement) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
def test_sorting_links_and_phone_width_in_a_browser(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    def one(query: str) -> WebElement:
        return browser.find_element(By.CSS_SELECTOR, f"#needle {query}")

    def names() -> list[str]:
        cells = browser.find_elements(By.CSS_SELECTOR, "#needle .sortable tbody th")
        return [cell.text.split(" †")[0].split(". ")[1] for cell in cells]

    assert names()[0] == "ssmax"
    heads = browser.find_elements(By.CSS_SELECTOR, "#needle .sortable thead button")
    click(browser, heads[1])
    assert names()[:2] == ["softmax", "ssmax"]
    click(browser, heads[1])
    assert names()[-1] == "softmax"
    click(browser, heads[0])
    assert names()[-1] == "ssmax"
    click(browser, heads[3])
    assert names()[-1].startswith("cosformer")  # no score: last in both orders
    click(browser, heads[3])
    assert names()[-1].startswith("cosformer")

    folded = browser.find_element(By.ID, "needle-rows")
    assert folded.get_attribute("open") is None
    click(browser, one(".sortable tbody td a"))
    assert folded.get_attribute("open") is not None
    assert "#needle-" in browser.current_url

    for width in (1400, 360):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        assert browser.execute_script(TOO_WIDE) == []
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.execute_script(
        "return [innerWidth, document.documentElement.scrollWidth]"
    ) == [360, 360]  # fmt: skip

    # Figures are not shrunk to the width of the screen, where labels would be illegible.
    shown, natural = browser.execute_script(
        "const i = document.querySelector('#needle img'); return [i.width, i.naturalWidth]"
    )
    assert shown == min(natural, 56 * 16)
    browser.execute_script("document.querySelector('#needle img').scrollIntoView()")
    picture = browser.get_screenshot_as_png()
    (tmp_path / "report.png").write_bytes(picture)
    with Image.open(io.BytesIO(picture)) as image:
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 50

    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
