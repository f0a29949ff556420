"""The page in real headless Chromium: drawn, alive, readable, and alone."""

import base64
import itertools
import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from benchmarks.page import (
    PAPER,
    STROKES,
    WORDS,
    contrast,
    cut,
    missed_links,
    pages,
    pale_curves,
    pale_words,
    printed,
    show,
)
from benchmarks.report import PAINTED, browser, check, enliven, errors, opened, until

from joma import Run
from joma._runs.curve import EXACT, describe
from joma.theory import solve_bounce

from .pages import HOSTILE, VERDICTS, paper_page, results, runs_page

ALLOWED = ("file:", "data:", "blob:")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="session")
def driver(browser_paths):
    with browser(*browser_paths) as driver:
        yield driver


@pytest.fixture(scope="session")
def paper(browser_paths, tmp_path_factory):
    return paper_page(tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="session")
def runs(browser_paths, tmp_path_factory):
    return runs_page(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_without_errors(driver, paper, scheme):
    show(driver, paper, scheme=scheme)
    painted = driver.execute_script(PAINTED)
    assert [id for id, *_ in painted] == ["fig3-chart", "fig4-chart"]
    assert all(colours > 10 and marks > 0 for _, colours, marks in painted), painted
    assert driver.execute_script("return document.documentElement.dataset.theme") == scheme
    assert errors(driver) == []
    print(
        f"\nall figures drawn after {driver.execute_script('return joma.drawn') / 1000:.2f} s ({scheme})"
    )


def test_nothing_leaves_the_page(driver, paper):
    show(driver, paper)
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert asked, "the log of the browser is empty"
    assert not [url for url in asked if not url.startswith(ALLOWED)]
    blocked = driver.execute_async_script(
        "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    )
    assert blocked == "refused"
    driver.get_log("browser")


def test_the_button_changes_the_theme_and_the_figures(driver, paper):
    show(driver, paper)
    before = (
        driver.execute_script("return joma.views.get('fig4-chart')._renderer._bgcolor") or "none"
    )
    driver.execute_script("document.getElementById('theme').click()")
    until(driver, "document.documentElement.dataset.drawn === 'dark'")
    assert (
        driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(15, 20, 25)"
    )
    ink = driver.execute_script("""const found = [];
      const visit = (item) => { for (const m of item.items || []) {
        if (m.role === 'axis-label') found.push(m.items[0].fill);
        for (const below of m.items || []) visit(below); } };
      joma.views.get('fig4-chart').scenegraph().root.items.forEach(visit); return found;""")
    assert set(ink) == {"#e6edf3"}, before
    assert errors(driver) == []


def test_a_whole_report_is_drawn_and_answers_the_pointer(driver, paper):
    """Of two exhibits; with JOMA_REPORT=PAGE, of a given page."""
    show(driver, paper)
    seconds = opened(driver, page := Path(os.environ.get("JOMA_REPORT", paper)))
    enliven(driver)
    figures = check(driver)
    assert figures == page.read_text().count('class="chart"') > 0
    print(f"\n{page}: {figures} figures drawn after {seconds:.2f} s")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(driver, paper, scheme):
    show(driver, paper, scheme=scheme)
    assert list(pale_words(driver)) == []


def test_a_narrow_screen_does_not_scroll_sideways(driver, paper, runs):
    for page in (paper, runs):
        show(driver, page, width=360)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
        assert errors(driver) == []


def test_headings_landmarks_and_names(driver, paper):
    show(driver, paper)
    levels = driver.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))
    landmarks = "return ['main', 'nav[aria-label]', 'a.skip', 'footer'].map(s => document.querySelectorAll(s).length)"
    assert driver.execute_script(landmarks) == [1, 1, 1, 1]
    charts = "return [...document.querySelectorAll('.chart, .explorer svg')].map(e => e.getAttribute('aria-label'))"
    assert all(len(text) > 10 for text in driver.execute_script(charts))
    inner = "return document.querySelector('#fig4-chart [role=graphics-document]').getAttribute('aria-label')"
    assert "Figure 4" in driver.execute_script(inner)
    nameless = """return [...document.querySelectorAll('button, a, input, select')].filter(e =>
      !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map(e => e.outerHTML)"""
    assert driver.execute_script(nameless) == []
    twice = "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size"
    assert driver.execute_script(twice) == 0
    targets = "return [...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.hash)).length"
    assert driver.execute_script(targets) == 0


def test_the_claims_can_be_filtered(driver, paper):
    show(driver, paper)
    claims = results()
    shown = "return [...document.querySelectorAll('#claims tbody tr:not([hidden]) th')].map(e => e.firstChild.textContent)"
    assert driver.execute_script(shown) == [r.id for r in claims]
    for n, verdict in enumerate(VERDICTS):
        driver.execute_script(
            "document.querySelector(`#claims button[data-verdict='${arguments[0]}']`).click()",
            verdict,
        )
        assert driver.execute_script(shown) == [r.id for r in claims[n::5]]
    driver.execute_script("document.querySelector(`#claims button[data-verdict='']`).click()")
    field = driver.find_element("css selector", "#claims input")
    field.send_keys("t4.order")
    assert driver.execute_script(shown) == ["T4.order"]
    assert f"1 of {len(claims)}" in driver.execute_script(
        "return document.querySelector('#claims [role=status]').textContent"
    )
    field.send_keys(" nothing-like-this")
    assert driver.execute_script(shown) == []
    driver.execute_script("""const s = document.querySelector('#claims'); s.querySelector('input').value = '';
      s.querySelector('select').value = 'Theorem 2'; s.querySelector('select').dispatchEvent(new Event('change'));""")
    assert driver.execute_script(shown) == [r.id for r in claims if r.id.startswith("T2.")]


def test_formulas_are_laid_out(driver, paper):
    show(driver, paper)
    sizes = driver.execute_script(
        "return [...document.querySelectorAll('#claims .formulas math')].map(m => { const r = m.getBoundingClientRect(); return [r.width, r.height]; })"
    )
    assert len(sizes) > 30
    assert min(map(min, sizes)) > 3
    fraction = """const f = document.querySelector('#claims mfrac'), [a, b] = f.children;
      return b.getBoundingClientRect().top - a.getBoundingClientRect().bottom"""
    assert driver.execute_script(fraction) >= -1  # above each other: MathML is known to the browser


def test_the_explorer_solves_equation_6(driver, paper):
    show(driver, paper)
    mu, t = [-2.0, 0.05, 0.7, 1.0, 2.5, 4.0, 5.4], [0.0, 1e-3, 0.1, 0.3, 0.41, 0.8, 1.3, 2.5]
    v = np.array(
        driver.execute_script("return jomaExplorer.bounce(arguments[0], arguments[1])", mu, t)
    )
    exact = solve_bounce(mu, t)
    np.testing.assert_allclose(v, exact.v, atol=1e-6)
    entropy = driver.execute_script("return arguments[0].map(jomaExplorer.entropy)", v.tolist())
    np.testing.assert_allclose(entropy, exact.entropy(), atol=1e-6)


def test_the_explorer_moves(driver, paper):
    show(driver, paper)
    slide = """const e = document.getElementById(arguments[0]); e.value = arguments[1];
      e.dispatchEvent(new Event('input')); return document.getElementById('x-entropy').textContent"""
    mu = np.linspace(1.0, 4.0, 10)  # centre 2.5, spread 1.5
    for k in (0, 82, 500):
        shown = float(driver.execute_script(slide, "x-time", k))
        assert shown == pytest.approx(solve_bounce(mu, [2.5 * k / 500]).entropy()[0], abs=1e-3)
    assert float(driver.execute_script(slide, "x-spread", 0)) == pytest.approx(np.log(10), abs=1e-3)
    driver.execute_script(
        "document.getElementById('x-time').value = 0; document.getElementById('x-play').click()"
    )
    until(
        driver,
        "jomaExplorer.state.k > 5 && document.getElementById('x-play').textContent === 'Pause'",
    )
    driver.execute_script("document.getElementById('x-play').click()")
    assert driver.execute_script("return document.getElementById('x-play').textContent") == "Play"
    assert errors(driver) == []


def test_the_explorer_tells_dip_and_bounce_by_the_one_rule(driver, paper):
    show(driver, paper)
    story, times = (
        "return jomaExplorer.story(arguments[0])",
        driver.execute_script("return jomaExplorer.times"),
    )
    curves = [
        solve_bounce(np.linspace(2.5 - s, 2.5 + s, 10), times).entropy()
        for s in (0.0, 0.05, 0.1, 0.3, 1.5, 2.4)
    ]
    curves += [
        np.linspace(2.0, 0.5, len(times)),
        np.linspace(2.0, 1.81, len(times)),
    ]  # fall to the end
    patterns = set()
    for entropy in curves:
        said, curve = (
            driver.execute_script(story, entropy.tolist()),
            describe(times, entropy, EXACT),
        )
        pattern = (
            "flat"
            if "less than a dip" in said
            else "dip"
            if "does not bounce" in said
            else "dip and bounce"
        )
        assert pattern == curve.pattern
        assert not curve.dipped or float(re.search(r"at t = ([\d.]+)", said)[1]) == pytest.approx(
            curve.trough_step, abs=0.006
        )
        patterns.add(pattern)
    assert patterns == {"flat", "dip", "dip and bounce"}


ITEM = """const found = [];
  const visit = (item, x, y) => { for (const m of item.items || []) for (const one of m.items || []) {
    const [a, b] = [x + (one.x || 0), y + (one.y || 0)];
    if (m.role === 'legend-symbol') found.push([x + (one.bounds.x1 + one.bounds.x2) / 2, y + (one.bounds.y1 + one.bounds.y2) / 2]);
    visit(one, m.marktype === 'group' ? a : x, m.marktype === 'group' ? b : y); } };
  const view = joma.views.get(arguments[0]), [left, top] = view.origin(), pad = view.padding();
  view.scenegraph().root.items.forEach(root => visit(root, root.x || 0, root.y || 0));
  const r = document.querySelector('#' + arguments[0] + ' canvas').getBoundingClientRect();
  return found.map(([x, y]) => [r.x + pad.left + left + x, r.y + pad.top + top + y]);"""


def point(driver, chart, across=0.8, down=0.4):
    """Move the pointer to a place of a figure; the place."""
    driver.execute_script(
        "document.getElementById(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})",
        chart,
    )
    x, y = driver.execute_script(
        "const r = document.querySelector('#' + arguments[0] + ' canvas').getBoundingClientRect();"
        "return [r.x + arguments[1] * r.width, r.y + arguments[2] * r.height]",
        chart, across, down,
    )  # fmt: skip
    mouse(driver, "mouseMoved", x, y)
    return x, y


def mouse(driver, kind, x, y, **more):
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})


PRESSED = "[...document.querySelectorAll('[data-switch=fig3-chart]')].map(b => b.getAttribute('aria-pressed')).join()"
LINES = """const found = [];
  const visit = (item) => { for (const m of item.items || []) {
    if (m.marktype === 'line') found.push(m.items[0].opacity ?? 1);
    for (const below of m.items || []) visit(below); } };
  joma.views.get('fig3-chart').scenegraph().root.items.forEach(visit); return found;"""


def test_a_series_can_be_turned_off_by_legend_and_by_button(driver, paper):
    show(driver, paper)
    point(driver, "fig3-chart")
    assert driver.execute_script(LINES) == [1, 1, 1, 1]
    x, y = driver.execute_script(ITEM, "fig3-chart")[0]
    mouse(driver, "mouseMoved", x, y)
    mouse(driver, "mousePressed", x, y, button="left", clickCount=1)
    mouse(driver, "mouseReleased", x, y, button="left", clickCount=1)
    until(driver, f"{PRESSED} === 'false,true,true,true'")
    assert driver.execute_script(LINES) == [0, 1, 1, 1]
    driver.execute_script("document.querySelectorAll('[data-switch=fig3-chart]')[0].click()")
    until(driver, f"{PRESSED} === 'true,true,true,true'")
    driver.execute_script("document.querySelectorAll('[data-switch=fig3-chart]')[2].click()")
    until(driver, f"{PRESSED} === 'true,true,false,true'")
    assert driver.execute_script(LINES) == [1, 1, 0, 1]
    assert errors(driver) == []


def test_what_is_switched_off_stays_off_when_the_figure_is_drawn_again(driver, paper):
    show(driver, paper)
    driver.execute_script("document.querySelectorAll('[data-switch=fig3-chart]')[2].click()")
    until(driver, f"{PRESSED} === 'true,true,false,true'")

    def still_off():
        assert driver.execute_script(f"return {PRESSED}") == "true,true,false,true"
        assert driver.execute_script(LINES) == [1, 1, 0, 1]

    point(driver, "fig3-chart")
    still_off()
    driver.execute_script("document.getElementById('theme').click()")
    until(driver, "document.documentElement.dataset.drawn === 'dark'")
    still_off()
    driver.execute_script("joma.drawn = 0")
    size = {"width": 1000, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    until(driver, "joma.drawn > 0")
    still_off()
    driver.execute_script(
        "document.querySelectorAll('[data-switch=fig3-chart]')[2].click()"
    )  # and can be turned on
    until(driver, f"{PRESSED} === 'true,true,true,true'")
    assert driver.execute_script(LINES) == [1, 1, 1, 1]
    driver.execute_script("document.querySelectorAll('[data-switch=fig3-chart]')[0].click()")
    driver.execute_script("document.querySelector('[data-reset=fig3-chart]').click()")
    until(driver, f"{PRESSED} === 'true,true,true,true'")
    assert errors(driver) == []


def test_a_chosen_layer_stays_chosen_when_the_figure_is_drawn_again(driver, runs):
    show(driver, runs)
    driver.execute_script("""const s = document.querySelector('#comparison select'); s.value = 'layer 1';
      s.dispatchEvent(new Event('change', {bubbles: true})); s.dispatchEvent(new Event('input', {bubbles: true}));""")
    until(driver, "joma.views.get('comparison-chart').signal('layer_shown') === 'layer 1'")
    driver.execute_script("document.getElementById('theme').click()")
    until(driver, "document.documentElement.dataset.drawn === 'dark'")
    assert (
        driver.execute_script("return joma.views.get('comparison-chart').signal('layer_shown')")
        == "layer 1"
    )
    assert (
        driver.execute_script("return document.querySelector('#comparison select').value")
        == "layer 1"
    )
    assert errors(driver) == []


def test_hovering_shows_all_curves_at_that_step_and_ctrl_scroll_zooms(driver, paper):
    show(driver, paper)
    place = point(driver, "fig3-chart")
    shown = until(driver, "document.querySelector('#fig3-chart .tip:not([hidden])')?.innerText")
    at = int(re.match(r"batches [^\n]* ([\d,]+)\n", shown)[1].replace(",", ""))
    rows = {int(n): float(value) for n, value in re.findall(r"component (\d+)\s+([-\d.]+)", shown)}
    frame = Run(paper.parent / "fig3").frame("v0")
    table = frame.pivot_table(index="step", columns="token", values="value")
    expected = table.loc[table.index[np.abs(table.index - at).argmin()], list(rows)]
    assert sorted(rows) == [0, 1, 2, 3]
    np.testing.assert_allclose(list(rows.values()), expected, rtol=1e-3)  # four digits
    mouse(driver, "mouseMoved", 2, 2)
    assert driver.execute_script("return document.querySelector('#fig3-chart .tip').hidden")
    point(driver, "fig3-chart")  # a wheel is where the pointer is
    zoom = "Object.keys(joma.views.get('fig3-chart').getState({signals: n => n.startsWith('zoom')}).signals).find(n => n.endsWith('_step'))"
    before = driver.execute_script(f"return joma.views.get('fig3-chart').signal({zoom})")
    driver.execute_script("""const c = document.querySelector('#fig3-chart canvas');
      c.dispatchEvent(new WheelEvent('wheel', {ctrlKey: true, deltaY: -300, clientX: arguments[0], clientY: arguments[1],
        bubbles: true, cancelable: true}))""", *place)  # fmt: skip
    low, high = until(driver, f"joma.views.get('fig3-chart').signal({zoom})")
    assert before is None
    assert 0 < high - low < 2000  # of 2,000 batches
    driver.execute_script(
        "document.getElementById('theme').click()"
    )  # drawn again, and still there
    until(driver, "document.documentElement.dataset.drawn === 'dark'")
    assert driver.execute_script(
        f"return joma.views.get('fig3-chart').signal({zoom})"
    ) == pytest.approx([low, high])
    assert errors(driver) == []


def test_files_come_out_of_the_page(driver, paper):
    show(driver, paper)
    get = """const done = arguments[1]; unpack(arguments[0]).then(r => r.arrayBuffer()).then(b => {
      let s = ''; for (const x of new Uint8Array(b)) s += String.fromCharCode(x); done(btoa(s)); })"""
    table = base64.b64decode(driver.execute_async_script(get, "fig4-csv")).decode()
    assert table == Run(paper.parent / "fig4").frame().to_csv(index=False, float_format="%.7g")
    get_picture = "joma.picture('fig4').then(arguments[0])"
    picture = ET.fromstring(driver.execute_async_script(get_picture))
    stored = ET.parse(paper.parent / "fig4/figure.svg").getroot()
    assert picture.tag == stored.tag

    def words(root):  # numbers at axes are those that the browser's version of Vega chooses
        texts = [element.text or "" for element in root.iter(f"{SVG}text")]
        return [text for text in texts if re.search("[A-Za-zμ]", text)]

    assert words(picture) == words(stored)


def test_runs_are_drawn_over_each_other_and_hostile_names_are_text(driver, runs):
    show(driver, runs)
    painted = driver.execute_script(PAINTED)
    # the comparison, and curves and heads of both runs
    assert len(painted) == 5
    assert all(colours > 5 and marks > 0 for _, colours, marks in painted), painted
    assert driver.execute_script("return document.images.length") == 0
    headings = driver.execute_script(
        "return [...document.querySelectorAll('h2')].map(h => h.textContent)"
    )
    assert HOSTILE in headings
    values = "return joma.views.get('comparison-chart').data(Object.keys(joma.views.get('comparison-chart').getState({data: () => true}).data)[0]).length"
    assert driver.execute_script(values) > 0
    driver.execute_script("""const s = document.querySelector('#comparison select'); s.value = 'layer 1';
      s.dispatchEvent(new Event('change', {bubbles: true})); s.dispatchEvent(new Event('input', {bubbles: true}));""")
    until(driver, "joma.views.get('comparison-chart').signal('layer_shown') === 'layer 1'")
    assert errors(driver) == []


def test_a_figure_is_switched_between_steps_and_the_clock(driver, runs):
    show(driver, runs)
    title = """const found = new Set();
      const visit = (item) => { for (const m of item.items || []) {
        if (m.role === 'axis-title' && m.items[0].angle === 0) found.add(m.items[0].text);
        for (const below of m.items || []) visit(below); } };
      joma.views.get('comparison-chart').scenegraph().root.items.forEach(visit); return [...found];"""
    pressed = (
        "return document.querySelector('[data-over=comparison-chart][aria-pressed=true]').dataset.clock + "
        "document.querySelectorAll('[data-over=comparison-chart][aria-pressed=true]').length"
    )
    assert driver.execute_script(title) == ["step"]
    for clock, shown in (("tau", "τ, sum of learning rates"), ("step", "step")):
        driver.execute_script("joma.old = joma.views.get('comparison-chart')")
        driver.execute_script(
            f"document.querySelector('[data-over=comparison-chart][data-clock={clock}]').click()"
        )
        until(driver, "joma.views.get('comparison-chart') !== joma.old")
        assert driver.execute_script(title) == [shown]
        assert driver.execute_script(pressed) == f"{clock}1"
    assert errors(driver) == []


@pytest.mark.parametrize("width", [1400, 390])
def test_findings_are_the_first_that_is_seen(driver, paper, width):
    show(driver, paper, width)
    bottom = "return document.querySelector('.findings li').getBoundingClientRect().bottom"
    assert driver.execute_script(bottom) <= 900
    order = driver.execute_script(
        "return [...document.querySelectorAll('main > section')].map(s => s.id)"
    )
    assert order[:3] == ["findings", "explorer", "fig3"]


def test_links_land_where_they_should_while_figures_are_drawn(driver, paper):
    assert list(missed_links(driver, paper, 390, ["claims", "fig4", "claim-T4.order"])) == []
    assert errors(driver) == []


@pytest.mark.parametrize("width", [1400, 390])
def test_nothing_is_cut_and_nothing_stands_over_another(driver, paper, width):
    show(driver, paper, width)
    assert all(driver.execute_script(WORDS, chart) for chart in ("fig3-chart", "fig4-chart"))
    assert list(cut(driver)) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_can_be_seen_and_verdicts_told_apart(driver, paper, scheme):
    show(driver, paper, scheme=scheme)
    assert len(driver.execute_script(STROKES)) > 8
    assert list(pale_curves(driver, scheme)) == []
    names = ["good", "corrected", "condition", "indistinct", "bad", "neutral"]
    marks = driver.execute_script(
        """return arguments[0].map(name => { const e = document.createElement('span');
      e.className = 'dot ' + name; document.querySelector('nav').append(e);
      const colour = getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number); e.remove(); return colour; })""",
        names,
    )
    for seen in (np.eye(3), PROTAN, DEUTAN):
        for (one, a), (other, b) in itertools.combinations(zip(names, marks, strict=True), 2):
            assert np.linalg.norm(lab(seen, a) - lab(seen, b)) > 15, (one, other)


# what readers without one kind of cone see of linear light (Machado, Oliveira and Fernandes, 2009)
PROTAN = np.array(
    [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]
)
DEUTAN = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)


def lab(seen, colour):
    """CIE L*a*b* (D65) of an sRGB colour as it is seen."""
    channel = np.array(colour[:3]) / 255
    linear = seen @ np.where(
        channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4
    )
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(np.clip(to_xyz @ linear, 0, None) / [0.95047, 1.0, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_on_paper_figures_are_their_pictures_and_nothing_is_wider_than_the_page(driver, paper):
    show(driver, paper, scheme="dark")
    assert (
        2 <= pages(printed(driver)) <= 11
    )  # two exhibits and all claims: thirty exhibits stay below thirty pages
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": 703, "height": 1000, "deviceScaleFactor": 1, "mobile": False})  # fmt: skip
    sizes = """return [...document.querySelectorAll('.chart')].map(box => [
      box.querySelector('.still').getBoundingClientRect().width, box.querySelector('canvas').getBoundingClientRect().height])"""
    assert len(driver.execute_script(sizes)) == 2
    assert all(100 < width <= 703 and canvas == 0 for width, canvas in driver.execute_script(sizes))
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 703
    assert (
        driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


STILLS = """return [...document.querySelectorAll('.chart')].map(box => {
  const still = box.querySelector('.still'), place = still.getBoundingClientRect();
  return [box.id, place.width, place.height, still.querySelectorAll('path, circle, text').length, joma.views.has(box.id)];
})"""


def test_every_figure_is_seen_before_any_is_interactive(driver, paper):
    show(driver, paper, drawn=False)
    until(driver, "window.joma && joma.drawn")
    stills = driver.execute_script(STILLS)
    assert [id for id, *_ in stills] == ["fig3-chart", "fig4-chart"]
    assert all(w > 200 and h > 100 and marks > 20 for _, w, h, marks, _ in stills), stills
    assert not stills[-1][-1]  # far below the screen
    driver.execute_script("document.getElementById('fig4-chart').scrollIntoView()")
    until(driver, "joma.views.has('fig4-chart')")
    assert errors(driver) == []


def test_an_interactive_figure_is_as_large_as_its_still_picture(driver, paper):
    show(driver, paper, drawn=False)
    until(driver, "window.joma && joma.drawn")
    before = driver.execute_script(STILLS)
    enliven(driver)
    sizes = """return [...document.querySelectorAll('.chart canvas')].map(c => [c.offsetWidth, c.offsetHeight])"""
    for (_, width, height, *_), (after_width, after_height) in zip(
        before, driver.execute_script(sizes), strict=True
    ):
        assert after_width == pytest.approx(width, abs=6)
        assert after_height == pytest.approx(height, abs=6)


def test_a_page_that_is_saved_shows_its_still_pictures_without_a_script(driver, paper, tmp_path):
    show(driver, paper)
    text = driver.execute_script("return document.documentElement.outerHTML")
    saved = tmp_path / "saved.html"
    saved.write_text(
        "<!doctype html>" + re.sub(r"<script(?! type).*?</script>", "", text, flags=re.S)
    )
    driver.get(saved.as_uri())
    shown = """return [...document.querySelectorAll('.chart')].map(box => [
      box.querySelector('.still').getBoundingClientRect().height, box.querySelector('.live')?.getBoundingClientRect().height ?? 0])"""
    heights = driver.execute_script(shown)
    assert len(heights) == 2
    assert all(still > 100 and live == 0 for still, live in heights), heights


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_still_pictures_can_be_read_in_light_and_dark(driver, paper, scheme):
    show(driver, paper, scheme=scheme, drawn=False)
    until(driver, "window.joma && joma.drawn")
    inks = driver.execute_script("""const found = new Set();
      for (const text of document.querySelectorAll('.still text')) found.add(getComputedStyle(text).fill);
      return [...found].map(c => c.match(/[\\d.]+/g).map(Number).slice(0, 3))""")
    assert inks
    assert all(contrast(ink, PAPER[scheme]) > 4.5 for ink in inks), inks


def test_formulas_keep_their_case(driver, paper):
    show(driver, paper, drawn=False)
    until(driver, "window.joma && joma.drawn")
    changed = """return [...document.querySelectorAll('body *')].filter(e =>
      ['uppercase', 'lowercase', 'capitalize'].includes(getComputedStyle(e).textTransform)).length"""
    assert driver.execute_script(changed) == 0
