"""Reports in Chromium: three widths, light and dark, with scripts and without, and nothing from the network."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_run import hostile_run
from made_runs import made_run

from xtrain.api.reports import report_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 800, 1400)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("runs")
    runs = [made_run(root / "curriculum" / name, "datasets", logged=60).directory for name in ("aaaa", "bbbb")]
    (root / "report.html").write_text(report_page([*runs, hostile_run(root / "<i>" / "c").directory]))
    return (root / "report.html").as_uri()


def opened(browser: Any, address: str, **options: Any) -> tuple[Any, list[str]]:
    """A page, and what must not happen on it: requests of other files, errors, dialogs."""
    found = browser.new_context(**options).new_page()
    wrong: list[str] = []
    found.on("request", lambda request: wrong.append(request.url) if request.url != address else None)
    for event in ("pageerror", "dialog", "console"):
        found.on(event, lambda said: wrong.append(str(said)))
    found.goto(address)
    return found, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_width_in_both_schemes(browser: Any, address: str, scheme: str) -> None:
    for width in WIDTHS:
        found, wrong = opened(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme)
        assert found.evaluate("document.documentElement.scrollWidth") == width
        columns = found.evaluate(
            "getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length"
        )
        assert columns == {390: 1, 800: 2, 1400: 3}[width]
        ink = found.evaluate("getComputedStyle(document.querySelector('h1')).color")
        assert ink == {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}[scheme]
        line = found.evaluate("getComputedStyle(document.querySelector('path.curve.c0')).stroke")
        assert line == {"light": "rgb(11, 87, 208)", "dark": "rgb(122, 162, 247)"}[scheme]
        assert wrong == []


def test_the_pointer_reads_values_in_all_plots(browser: Any, address: str) -> None:
    found, wrong = opened(browser, address, viewport={"width": 1000, "height": 900})
    before = found.locator("output").all_text_contents()
    box = found.locator("figure svg").first.bounding_box()
    found.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 50)
    assert found.locator("figure").count() >= found.locator(".pointer").count() > 10
    assert found.locator("output").all_text_contents() != before
    assert found.locator(".at").first.text_content().startswith("at tokens ")
    found.mouse.move(1, 1)
    assert found.locator("output").all_text_contents() == before and found.locator(".pointer").count() == 0
    assert wrong == []


def test_it_is_read_without_scripts(browser: Any, address: str) -> None:
    found, wrong = opened(browser, address, java_script_enabled=False, viewport={"width": 1000, "height": 900})
    assert found.locator("figure svg").first.bounding_box()["width"] > 200
    assert found.locator("output").first.text_content() and wrong == []
