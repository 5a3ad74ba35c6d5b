"""The page of ``whatif report`` in a real browser: it opens without errors, reacts, and obeys nothing of a trace."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import V100, training
from tests.cli.test_report import HOSTILE
from tests.helpers import need, write_trace
from tests.report_page import Page
from whatif.cli.main import main

pytestmark = pytest.mark.slow

# What a browser needs for a handler is reported and bounded generously: the machine may be busy.
SLOWEST_MS = 2_000
# Rows of a table that are shown at first.
FIRST_ROWS = 12


def written(folder: Path, path: Path, *words: str) -> Path:
    out = folder / "page.html"
    assert main(["report", str(path), *words, "-o", str(out), "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, own_traces: Path) -> Path:
    """The page of a recording of ours, with layers, memory and a prediction."""
    return written(tmp_path_factory.mktemp("real"), own_traces / "transformer_cpu_fused.json.gz", "amp:target=bf16")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a trace whose kernels, layers and file would be markup."""
    folder = tmp_path_factory.mktemp("hostile")
    events = training(layer=HOSTILE, kernel=HOSTILE)
    return written(folder, write_trace(folder / "<img src=x onerror=alert(3)>.json", events, deviceProperties=V100))


def texts(driver: Any, selector: str) -> list[str]:
    """What elements show, as far as they are visible."""
    script = (
        "return [...document.querySelectorAll(arguments[0])].filter(e => e.getClientRects().length)"
        ".map(e => e.textContent)"
    )
    found = driver.execute_script(script, selector)
    assert isinstance(found, list)
    return found


def requests(driver: Any) -> list[str]:
    """The addresses that the page asked for, but for those that its policy kept it from asking for."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    stopped = {m["params"]["requestId"] for m in messages if m["params"].get("blockedReason") == "csp"}
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    found = [one["request"]["url"] for one in sent if one["requestId"] not in stopped]
    # The browser's own start page belongs to its first window.
    return [url for url in found if not url.startswith(("chrome:", "chrome-untrusted:", "about:"))]


def test_it_opens_without_errors_and_asks_for_nothing(opened: Any, real: Path) -> None:
    driver = opened(real)
    assert driver.get_log("browser") == []
    assert requests(driver) == [real.as_uri()]
    drawn = driver.execute_script(
        "return [...document.querySelectorAll('figure canvas')].map(c => Boolean(Chart.getChart(c)) && c.width > 100)"
    )
    assert len(drawn) == 7
    assert all(drawn)


def test_hostile_names_stay_text(opened: Any, hostile: Path) -> None:
    driver = opened(hostile)
    assert driver.get_log("browser") == []
    assert requests(driver) == [hostile.as_uri()]
    assert driver.execute_script("return document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert any("<img src=x onerror=alert(1)>" in text for text in texts(driver, "#t-kernels tbody th"))
    assert "<img src=x onerror=alert(3)>" in driver.title
    hover(driver)
    assert driver.execute_script("return document.querySelectorAll('#timeline-tip *:not(div)').length") == 0


def test_nothing_of_the_page_is_obeyed_but_its_own_scripts(opened: Any, hostile: Path) -> None:
    """Should markup of a trace get in after all, the policy still keeps it from running and from asking the network."""
    driver = opened(hostile)
    ran = driver.execute_async_script(
        "const [done] = arguments, made = document.createElement('div'), script = document.createElement('script');"
        'made.innerHTML = \'<img src=x onerror="window.ran = 1"><b onclick="window.ran = 1">x</b>\';'
        "script.textContent = 'window.ran = 1'; document.body.append(made, script);"
        "made.querySelector('b').click(); setTimeout(() => done(window.ran ?? 0), 300)"
    )
    assert ran == 0
    assert requests(driver) == [hostile.as_uri()]


@pytest.mark.parametrize("table", ["t-kernels", "t-alone"])
def test_headers_sort_by_numbers_and_by_text(opened: Any, real: Path, table: str) -> None:
    driver, held = opened(real), Page(real).tables[table]
    show_all(driver, table)
    numbers = f"#{table} th:nth-child(2)"
    values = [row[1].value for row in held.rows]
    assert None not in values
    for state, wanted in (("descending", sorted(values, reverse=True)), ("ascending", sorted(values))):  # type: ignore[type-var]
        driver.execute_script(f"document.querySelector('{numbers} button').click()")
        assert driver.execute_script(f"return document.querySelector('{numbers}').ariaSort") == state
        shown = driver.execute_script(
            f"return [...document.querySelectorAll('#{table} tbody td:nth-child(2)')].map(c => Number(c.dataset.value))"
        )
        assert shown == wanted
    driver.execute_script(f"document.querySelector('#{table} th:nth-child(1) button').click()")
    assert driver.execute_script(f"return document.querySelector('{numbers}').ariaSort") == "none"
    names = [name.lower() for name in texts(driver, f"#{table} tbody th")]
    assert sorted(names) == sorted(row[0].text.lower() for row in held.rows)
    assert driver.execute_script(
        "return arguments[0].every((n, i, all) => !i || all[i - 1].localeCompare(n) <= 0)", names
    )


def show_all(driver: Any, table: str) -> None:
    """Press the button under a table that shows its first rows alone, if there is one."""
    script = "document.getElementById(arguments[0]).closest('.table').querySelector('.more button')?.click()"
    driver.execute_script(script, table)


def test_a_long_table_begins_with_its_first_rows(opened: Any, real: Path) -> None:
    """What is hidden is counted, sorted and searched with the rest."""
    driver, held = opened(real), Page(real).tables["t-kernels"]
    rows = len(held.rows)
    assert rows > FIRST_ROWS
    more = "return document.getElementById('t-kernels').closest('.table').querySelector('.more').innerText"
    assert texts(driver, "#t-kernels tbody th") == [row[0].text for row in held.rows[:FIRST_ROWS]]
    assert driver.execute_script(more).startswith(f"The first {FIRST_ROWS} of {rows} rows are shown.")
    driver.execute_script("document.querySelector('#t-kernels thead th:nth-child(2) button').click()")
    most = sorted((row[1].value or 0 for row in held.rows), reverse=True)[:FIRST_ROWS]
    shown = driver.execute_script(
        "return [...document.querySelectorAll('#t-kernels tbody tr:not([hidden]) td:nth-child(2)')]"
        ".map(c => Number(c.dataset.value))"
    )
    assert shown == most
    show_all(driver, "t-kernels")
    assert len(texts(driver, "#t-kernels tbody th")) == rows
    show_all(driver, "t-kernels")
    last = held.rows[-1][0].text
    field = driver.execute_script(
        "return document.getElementById('t-kernels').closest('.table').querySelector('input')"
    )
    field.send_keys(last)
    assert last in texts(driver, "#t-kernels tbody th")
    assert driver.execute_script(more.replace("innerText", "hidden"))


def test_the_search_keeps_rows_with_all_words(opened: Any, real: Path) -> None:
    driver, held = opened(real), Page(real).tables["t-kernels"]
    field = driver.execute_script(
        "return document.getElementById('t-kernels').closest('.table').querySelector('input')"
    )
    assert field.accessible_name.startswith("Search ")
    word = held.rows[0][0].text.split("::")[-1][:6]
    field.send_keys(word.upper())
    wanted = [row[0].text for row in held.rows if word.lower() in "".join(cell.text for cell in row).lower()]
    assert texts(driver, "#t-kernels tbody th") == wanted
    assert 0 < len(wanted) < len(held.rows)
    found = driver.execute_script(
        "return arguments[0].closest('.tools').querySelector('[role=status]').textContent", field
    )
    assert found == f"{len(wanted)} of {len(held.rows)} rows"
    field.clear()
    field.send_keys("no such kernel")
    assert texts(driver, "#t-kernels tbody th") == []


def view(driver: Any) -> dict[str, float]:
    """What the timeline shows now, once it is drawn."""
    script = (
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => {"
        "const d = document.getElementById('timeline-canvas').dataset;"
        "done({begin: +d.begin, span: +d.span, drawn: +d.drawn, ms: +d.ms})}))"
    )
    found = driver.execute_async_script(script)
    assert isinstance(found, dict)
    return found


def press(driver: Any, label: str) -> None:
    script = (
        "[...document.querySelectorAll('#timeline-tools button')].find(b => b.textContent === arguments[0]).click()"
    )
    driver.execute_script(script, label)


def hover(driver: Any) -> str:
    """Move the pointer over the first task of the timeline; returns what is then shown of it."""
    chains = need("selenium.webdriver.common.action_chains").ActionChains
    canvas = driver.find_element("id", "timeline-canvas")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    at = driver.execute_script(
        "const v = report.timeline, row = v.rows.find(r => r.thread.end > r.thread.first);"
        "const s = row.side, n = row.thread.first;"
        "const box = v.canvas.getBoundingClientRect();"
        "return [v.x(s.start[n] + s.length[n] / 2) - box.width / 2, row.y + 6 - box.height / 2]"
    )
    chains(driver).move_to_element_with_offset(canvas, round(at[0]), round(at[1])).perform()
    return str(
        driver.execute_script("const t = document.getElementById('timeline-tip'); return t.hidden ? '' : t.innerText")
    )


def test_the_timeline_zooms_and_moves(opened: Any, real: Path) -> None:
    driver = opened(real)
    whole = view(driver)
    press(driver, "Zoom in")
    closer = view(driver)
    assert closer["span"] == pytest.approx(whole["span"] / 2)
    assert closer["begin"] == pytest.approx(whole["span"] / 4)
    press(driver, "Right")
    assert view(driver)["begin"] == pytest.approx(whole["span"] / 2)
    press(driver, "Left")
    press(driver, "Zoom out")
    press(driver, "Show all")
    assert view(driver)["span"] == whole["span"]
    canvas = driver.find_element("id", "timeline-canvas")
    driver.execute_script(
        "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -200, ctrlKey: true, clientX: 600}))", canvas
    )
    assert view(driver)["span"] < whole["span"]
    driver.execute_script("arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: 99, clientX: 600}))", canvas)
    unchanged = view(driver)["span"]
    driver.execute_script("arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: 99, clientX: 600}))", canvas)
    assert view(driver)["span"] == unchanged  # without Ctrl the wheel is the page's


def test_a_zoom_draws_no_more_boxes_than_pixels_and_takes_milliseconds(opened: Any, real: Path) -> None:
    driver = opened(real)
    rows, width = driver.execute_script("return [report.timeline.rows.length, report.timeline.width]")
    for _ in range(8):
        shown = view(driver)
        # A box is a pixel wide, or shows a task of more than a pixel: a pixel is never part of more than three.
        assert 0 < shown["drawn"] <= 2 * rows * (width + 1)
        assert shown["ms"] < SLOWEST_MS
        press(driver, "Zoom in")


def test_a_timeline_of_a_cpu_is_coloured_by_phase_and_explains_no_colour_that_it_lacks(
    opened: Any, real: Path, hostile: Path
) -> None:
    shown = texts(opened(real), "#timeline-legend li")
    assert {f"{phase}: operators on the CPU" for phase in ("forward", "backward", "update")} <= set(shown)
    assert not {"communication", "CUDA / HIP calls", "copies and memsets"} & set(shown)
    shown = texts(opened(hostile), "#timeline-legend li")
    assert "CUDA / HIP calls" in shown
    assert not [name for name in shown if name.startswith("forward") or name == "data loading"]


def test_the_timeline_is_used_with_the_keyboard(opened: Any, real: Path) -> None:
    driver = opened(real)
    keys = need("selenium.webdriver.common.keys").Keys
    canvas = driver.find_element("id", "timeline-canvas")
    driver.execute_script("arguments[0].focus()", canvas)
    canvas.send_keys(keys.ARROW_RIGHT)
    first = driver.find_element("id", "timeline-task").text
    canvas.send_keys(keys.ARROW_RIGHT)
    second = driver.find_element("id", "timeline-task").text
    assert "µs from" in first
    assert "µs from" in second
    assert first != second
    canvas.send_keys(keys.ARROW_LEFT)
    assert driver.find_element("id", "timeline-task").text == first
    whole = view(driver)["span"]
    canvas.send_keys("+")
    assert view(driver)["span"] == pytest.approx(whole / 2)
    canvas.send_keys("0")
    assert view(driver)["span"] == whole
    canvas.send_keys(keys.ESCAPE)
    assert driver.find_element("id", "timeline-task").text == ""


def test_the_pointer_names_a_task(opened: Any, real: Path) -> None:
    lines = hover(opened(real)).splitlines()
    assert len(lines) >= 3
    assert any("µs from" in line for line in lines)


def test_tasks_are_found_by_name(opened: Any, real: Path) -> None:
    driver = opened(real)
    field = driver.find_element("css selector", "#timeline-tools input")
    field.send_keys("mm")
    counted = driver.execute_script(
        "const mm = report.data('timeline-data').texts.map(t => t.toLowerCase().includes('mm')), v = report.timeline;"
        "return v.sides.map(s => Array.from(s.name).filter((n, i) => mm[n] || mm[s.layer[i]]).length)"
    )
    assert sum(counted) > 0
    found = driver.find_element("css selector", "#timeline-tools [role=status]").text
    assert found.startswith(f"{counted[0]} baseline")


def test_light_and_dark(opened: Any, real: Path) -> None:
    driver = opened(real)
    background = "return getComputedStyle(document.body).backgroundColor"
    label = "return Chart.getChart('c-breakdown').options.scales.x.ticks.color"
    light, of_light = driver.execute_script(background), driver.execute_script(label)
    assert light == "rgb(255, 255, 255)"
    driver.find_element("id", "theme").click()
    assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert driver.execute_script(background) != light
    assert driver.execute_script(label) != of_light
    driver.find_element("id", "theme").click()
    assert driver.execute_script(background) == light
    driver.execute_script("localStorage.clear()")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    try:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        opened(real)
        assert driver.execute_script(background) != light
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def luminance(color: str) -> float:
    """Relative luminance of a colour written rgb(r, g, b), as WCAG 2.1 defines it."""
    parts = [int(part) / 255 for part in color[4:-1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(opened: Any, real: Path, theme: str) -> None:
    driver = opened(real)
    pairs = driver.execute_script(
        "document.documentElement.dataset.theme = arguments[0]; const own = e => getComputedStyle(e).backgroundColor;"
        "const behind = e => own(e) !== 'rgba(0, 0, 0, 0)' || !e.parentElement ? own(e) : behind(e.parentElement);"
        "const all = 'p, th, td, li, a, h1, h2, h3, caption, abbr, button, code, label, summary';"
        "return [...document.querySelectorAll(all)].map(e => [getComputedStyle(e).color, behind(e), e.tagName])",
        theme,
    )
    for color, behind, name in {tuple(pair) for pair in pairs}:
        lighter, darker = sorted((luminance(color), luminance(behind)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (name, color, behind)


def test_every_control_can_be_reached_and_has_a_name(opened: Any, real: Path) -> None:
    driver = opened(real)
    driver.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    kinds = "button:not(.sort), #t-kernels .sort, input, a, summary, .scroll, canvas"
    controls = driver.find_elements("css selector", kinds)
    for control in controls:
        assert control.accessible_name.strip(), control.get_attribute("outerHTML")[:200]
        assert driver.execute_script("return arguments[0].tabIndex", control) >= (
            -1 if control.tag_name == "canvas" else 0
        )


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a trace whose kernels, layers and file have names of one long word."""
    folder = tmp_path_factory.mktemp("long")
    events = training(layer="l" * 10_000, kernel="k" * 10_000)
    return written(folder, write_trace(folder / f"{'f' * 200}.json", events, deviceProperties=V100))


@pytest.mark.parametrize("width", [360, 420, 768, 1280])
@pytest.mark.parametrize("page", ["real", "long_names"])
def test_a_window_never_scrolls_sideways(opened: Any, request: pytest.FixtureRequest, page: str, width: int) -> None:
    driver = opened(request.getfixturevalue(page))
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        view(driver)
        view(driver)  # charts take their new size a frame later
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints_with_everything_unfolded(opened: Any, real: Path) -> None:
    driver = opened(real)
    driver.execute_script(
        "document.documentElement.dataset.theme = 'dark'; window.atPrint = [];"
        "addEventListener('beforeprint', () => atPrint.push(document.querySelectorAll('details:not([open])').length,"
        "document.documentElement.dataset.theme))"
    )
    printed = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.startswith(b"%PDF")
    assert driver.execute_script("return atPrint") == [0, "light"]
    assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("width", [420, 700, 1000, 1100, 1280])
def test_a_link_leads_to_a_heading_that_can_be_seen(opened: Any, real: Path, width: int) -> None:
    """The contents stay at the top of a wide window, and never on what was asked for."""
    driver = opened(real)
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    script = (
        "return [...document.querySelectorAll('nav a')].map(a => { a.click();"
        "const top = document.querySelector(a.hash + ' h2').getBoundingClientRect().top;"
        "return [a.hash, top, document.querySelector('nav').getBoundingClientRect().bottom]; })"
    )
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        view(driver)
        links = driver.execute_script(script)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert len(links) > 8
    assert [link for link in links if not max(link[2], 0) <= link[1] <= 800] == []


def test_colours_that_the_user_forces_are_those_of_charts_too(opened: Any, real: Path) -> None:
    driver = opened(real)
    features = [{"name": "forced-colors", "value": "active"}, {"name": "prefers-color-scheme", "value": "dark"}]
    try:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        opened(real)
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(0, 0, 0)"
        ticks = "return Chart.getChart('c-breakdown').options.scales.x.ticks.color"
        assert driver.execute_script(ticks) == "CanvasText"
        swatch = "return getComputedStyle(document.querySelector('.swatch.s0')).backgroundColor"
        assert driver.execute_script(swatch) not in ("rgb(0, 0, 0)", "rgba(0, 0, 0, 0)")
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_what_is_read_out_has_names(opened: Any, real: Path) -> None:
    """What the browser passes to a screen reader: nothing without a name, and no arrow of a sorted column."""
    nodes = opened(real).execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    names: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            names.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("table", "region", "figure", "image", "button", "searchbox", "application", "columnheader"):
        assert names[role], role
        assert all(name.strip() for name in names[role]), (role, names[role])
    assert not any(arrow in name for name in names["button"] + names["columnheader"] for arrow in "↕↑↓")
    assert len(names["table"]) == len(Page(real).tables) - len(hidden_tables(real))


def hidden_tables(path: Path) -> list[str]:
    """The tables that are folded away at first."""
    folded = Page(path).source.partition("<details>")[2].partition("</details>")[0]
    return re.findall('<table id="([^"]+)"', folded)


def test_hundreds_of_kernels_with_long_names_are_printed_on_a_few_pages(
    opened: Any, tmp_path: Path, shared_traces: Path
) -> None:
    """Once 17 pages, most of them names of templates."""
    driver = opened(written(tmp_path, shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"))
    printed = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert 3 < len(re.findall(rb"/Type\s*/Page\b", printed)) <= 15


def test_without_the_zoom_of_a_screen_the_canvas_is_as_sharp_as_the_screen(opened: Any, real: Path) -> None:
    driver = opened(real)
    size = {"width": 1000, "height": 800, "deviceScaleFactor": 2, "mobile": False}
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_script("report.timeline.draw()")
        canvas = "const c = document.getElementById('timeline-canvas'); return c.width / c.clientWidth"
        assert driver.execute_script(canvas) == pytest.approx(2, rel=0.01)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_five_questions_are_answered_without_scrolling(opened: Any, real: Path) -> None:
    driver = opened(real)
    driver.set_window_size(1280, 800 + 1000 - driver.execute_script("return innerHeight"))  # 800 for the page
    questions = ["Why is it slow?", "What helps?", "Does it fit?", "Faster hardware?", "More workers?"]
    assert texts(driver, ".tile .label") == questions
    values = texts(driver, ".tile .value")
    assert all(re.search(r"\d", value) for value in values), values
    for selector in (".tile:last-child", "#verdict figure"):
        bottom = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
        assert driver.execute_script(bottom, selector) < 800
    for link in driver.find_elements("css selector", ".tile"):
        assert driver.find_elements("css selector", link.get_attribute("href")[len(real.as_uri()) :])
    driver.set_window_size(1280, 1000)
