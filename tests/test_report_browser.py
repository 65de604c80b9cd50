"""The report in a real browser: hover, sort, keys, clients, dark and light, narrow and wide, and hostile names."""

import json
from itertools import pairwise

import pytest
from browser import chromium, seen
from test_report_charts import write_full
from test_report_page import write_sweep

from hetperm.report.page import NAME, render
from hetperm.runs import files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_full(tmp_path_factory.mktemp("report") / "run")
    files.write(path / NAME, render(path))
    return path


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(driver, folder):
    seen(driver)
    driver.get((folder / NAME).as_uri())
    assert driver.execute_script("return document.documentElement.dataset.ready") == "true"
    return driver


def find(driver, selector: str):
    return driver.find_element("css selector", selector)


def choose(driver, selector: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(find(driver, selector)).select_by_value(value)


def point_at(driver, row: int, column: int, *, of: int = 6) -> None:
    """Move the pointer onto a cell of the map."""
    from selenium.webdriver import ActionChains

    canvas = find(driver, "#alpha")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    size = canvas.size["width"]
    x, y = ((at + 0.5) / of * size - size / 2 for at in (column, row))
    ActionChains(driver).move_to_element_with_offset(canvas, x, y).perform()


def press(driver, selector: str, *keys: str) -> None:
    find(driver, selector).send_keys(*keys)


def test_pointing_at_a_cell_says_who_learns_how_much_from_whom(page):
    choose(page, "#sort", "client")
    point_at(page, 0, 4)
    assert find(page, "#cell").text == "client 0 (mid, group 1) learns 0.750 from client 4 (mid, group 1)"
    point_at(page, 1, 1)
    assert find(page, "#cell").text == "client 1 (entry, group 0) learns 1.000 from itself"
    point_at(page, 5, 0)
    assert find(page, "#cell").text.startswith("client 5 (entry, group 0) learns 0.000 from client 0")


@pytest.mark.parametrize(
    ("by", "order"),
    # groups are (1, 0, 0, 0, 1, 0); tiers mid, entry, flagship, entry, mid, entry: the largest first
    [("client", "0 1 2 3 4 5"), ("group", "2 1 3 5 0 4"), ("tier", "2 0 4 1 3 5")],
)
def test_the_map_is_sorted_by_group_tier_or_client(page, by, order):
    choose(page, "#sort", by)
    assert find(page, "#alpha").get_attribute("data-order") == order
    point_at(page, 0, 0)
    assert find(page, "#cell").text.startswith(f"client {order[0]} ")


CLIENT = "return document.querySelector('#client h3').textContent"


def in_time(page, script):
    """What a script returns once the page has changed: a section is drawn anew when the address does."""
    page.execute_async_script("const done = arguments[0]; setTimeout(() => requestAnimationFrame(done), 100);")
    return page.execute_script(script)


def test_the_map_can_be_walked_by_keys_and_enter_opens_the_client(page):
    choose(page, "#sort", "client")
    press(page, "#alpha", "\ue015")  # down: enters the map
    press(page, "#alpha", "\ue015", "\ue015", "\ue014")  # down, down, right
    assert find(page, "#alpha").get_attribute("data-cell") == "2 1 1"
    press(page, "#alpha", "\ue007")
    assert in_time(page, CLIENT) == "Client 2"
    assert page.execute_script("return document.activeElement.id") == "client-2"


def test_the_cell_that_is_read_is_marked_and_its_client_can_be_opened(page):
    choose(page, "#sort", "client")
    point_at(page, 3, 1)
    spot, canvas = (find(page, name).rect for name in (".spot", "#alpha"))
    assert spot["x"] - canvas["x"] == pytest.approx(canvas["width"] / 6, abs=2)
    assert spot["y"] - canvas["y"] == pytest.approx(canvas["height"] / 2, abs=2)
    assert find(page, "#open").text == "Open client 3"
    choose(page, "#sort", "group")
    assert not find(page, ".spot").is_displayed()
    assert [block.text for block in page.find_elements("css selector", ".blocks span")] == ["group 0", "group 1"]


def test_a_tap_reads_a_cell_and_stays_at_the_map(page):
    choose(page, "#sort", "client")
    point_at(page, 0, 0)
    canvas = page.execute_script("return document.getElementById('alpha').getBoundingClientRect().toJSON()")
    at = {"x": canvas["left"] + 4.5 / 6 * canvas["width"], "y": canvas["top"] + 0.5 / 6 * canvas["height"]}
    page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [at]})
    page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    assert in_time(page, "return document.getElementById('cell').textContent").startswith(
        "client 0 (mid, group 1) learns 0.750"
    )
    assert page.execute_script("return location.hash") == ""


def test_a_click_on_a_heading_sorts_a_table_both_ways(page):
    def accuracies() -> list[str]:
        return [cell.text for cell in page.find_elements("css selector", "#clients ~ .scroll tbody tr td:nth-child(8)")]

    button = page.find_elements("css selector", "#clients ~ .scroll thead button")[7]
    assert button.text == "accuracy"
    page.execute_script("arguments[0].click()", button)
    assert accuracies() == sorted(accuracies(), reverse=True)
    page.execute_script("arguments[0].click()", button)
    assert accuracies() == sorted(accuracies())
    assert page.execute_script("return arguments[0].parentElement.getAttribute('aria-sort')", button) == "ascending"


def test_a_client_has_its_own_section_with_partners_and_links(page):
    choose(page, "#pick", "4")
    assert in_time(page, CLIENT) == "Client 4"
    links = [link.get_attribute("href") for link in page.find_elements("css selector", "#client li a")]
    assert [link.rpartition("/")[2] for link in links] == ["client_004.json", "client_004.safetensors"]
    assert all([(link.startswith("file:") and "/models/" in link) for link in links])
    choose(page, "#pick", "0")
    partners = [cell.text for cell in page.find_elements("css selector", "#client .partners tbody th")]
    assert partners == ["4", "0 (itself)"]
    assert len(page.find_elements("css selector", "#client polyline")) >= 1


def test_the_section_that_is_read_is_marked_in_the_list_of_sections(page):
    current = "return [...document.querySelectorAll('nav a[aria-current]')].map((link) => link.hash)"
    assert page.execute_script(current) == []
    page.execute_script("document.getElementById('clients').scrollIntoView({behavior: 'instant'})")
    assert in_time(page, current) == ["#clients"]


def test_a_method_has_the_colour_of_its_charts_in_tables(page):
    dot = "return getComputedStyle(document.querySelector('#methods ~ .beside tbody th i')).backgroundColor"
    assert page.execute_script(dot) == "rgb(213, 94, 0)"  # perm
    assert find(page, "#methods ~ .beside tbody th").text == "perm"


def test_a_link_to_folded_pictures_unfolds_them(page):
    page.execute_script("document.querySelector('nav a[href=\"#pictures\"]').click()")
    assert in_time(page, "return document.getElementById('pictures').open") is True


def test_curves_change_with_tier_and_cost(page):
    before = find(page, "[data-chart=curves] svg").get_attribute("aria-label")
    choose(page, "#against", "mb")
    after = find(page, "[data-chart=curves] svg").get_attribute("aria-label")
    assert (before, after) == (
        "test accuracy against local steps per client",
        "test accuracy against MB sent, down and up",
    )
    choose(page, "#tier", "*")
    names = [item.text for item in page.find_elements("css selector", "[data-chart=curves] .legend li")]
    assert names == ["mid", "entry"]


@pytest.mark.parametrize("width", [400, 1100, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_sticks_out_of_the_window_in_either_theme(page, width, theme):
    seen(page, width=width, theme=theme)
    page.refresh()
    assert page.execute_script("return document.documentElement.scrollWidth") == width
    paper = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(242, 244, 247)", "dark": "rgb(16, 18, 20)"}[theme]
    page.execute_script("document.getElementById('theme').click()")
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != paper


def test_every_control_has_a_name_and_every_chart_a_description(page):
    nameless = page.execute_script(
        "return [...document.querySelectorAll('select, button, canvas, svg[role=img]')].filter((element) => "
        "!(element.labels && element.labels.length) && !element.getAttribute('aria-label') && "
        "!element.textContent.trim()).length"
    )
    assert nameless == 0
    ids = page.execute_script("return [...document.querySelectorAll('[id]')].map((element) => element.id)")
    assert len(ids) == len(set(ids))  # a link to a section would lead elsewhere
    assert page.execute_script("return [...document.querySelectorAll('th')].filter((x) => !x.textContent).length") == 0
    levels = page.execute_script("return [...document.querySelectorAll('h1, h2, h3')].map((head) => +head.tagName[1])")
    assert levels[0] == 1
    assert all([after - before <= 1 for before, after in pairwise(levels)])


CONTRAST = """
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const light = (c) => c.slice(0, 3).map((v) => v / 255)
  .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
const paper = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const c = parse(getComputedStyle(at).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join("");
  if (!text || ["SCRIPT", "NOSCRIPT"].includes(element.tagName) || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), ink = parse(element.closest("svg") ? style.fill : style.color);
  const [a, b] = [light(ink), light(paper(element))], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push(`${element.tagName} ${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
}
return found;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_the_page(page, theme):
    seen(page, theme=theme)
    page.refresh()
    page.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.execute_script(CONTRAST) == []


def test_the_page_fetches_nothing_and_no_script_complains(page):
    assert page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_hostile_names_stay_text(page, tmp_path):
    evil = "<img src=x onerror=window.evil=1></script><script>window.evil=1</script>"
    path = write_full(tmp_path / "evil")
    for name in ("summary.json", "clients.csv", "baselines.csv", "metrics.csv"):
        text = (path / name).read_text()
        quoted = json.dumps(evil)[1:-1] if name.endswith("json") else evil
        text = text.replace("flagship", quoted).replace("fedavg-ft", f"ft{quoted}")
        (path / name).write_text(text.replace("entry", "constructor").replace("mid", "__proto__"))
    files.write(path / NAME, render(path))
    page.get((path / NAME).as_uri())
    assert page.execute_script("return [window.evil, document.documentElement.dataset.ready]") == [None, "true"]
    assert page.find_elements("css selector", "img[src=x]") == []
    assert evil in find(page, "[data-chart=dots] svg").text
    assert {"constructor", "__proto__"} <= {head.text for head in page.find_elements("css selector", "th")}
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_page_of_several_seeds_shows_every_seed_and_their_maps(page, tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    for seed in range(3):
        write_full(tmp_path / f"full-{seed}")
        for name in ("alpha.npy", "look-ahead.csv"):
            (sweep / f"seed-{seed}" / name).write_bytes((tmp_path / f"full-{seed}" / name).read_bytes())
    files.write(sweep / NAME, render(sweep))
    page.get((sweep / NAME).as_uri())
    assert len(page.find_elements("css selector", "[data-chart=paired] circle")) == 2 * 3
    options = [option.text for option in page.find_elements("css selector", "[data-chart=map] option")]
    assert options[:3] == ["seed 0", "seed 1", "seed 2"]


def test_the_verdicts_of_a_resource_benchmark_are_seen_at_1100_pixels(page, tmp_path):
    tiers = [
        {"tier": name, "width": 0.5, **{f"figure_{k}": 1234.5 for k in range(15)}, "verdict": "fits"}
        for name in "abcde"
    ]
    files.write_json(tmp_path / "resources.json", {"title": "cnn", "tiers": tiers, "lines": ["a limit"]})
    files.write(tmp_path / NAME, render(tmp_path))
    seen(page, width=1100)
    page.get((tmp_path / NAME).as_uri())
    verdicts = [cell for cell in page.find_elements("css selector", "td") if cell.text == "fits"]
    assert len(verdicts) == 5
    assert all([cell.rect["x"] + cell.rect["width"] < 1100 and cell.rect["y"] < 900 for cell in verdicts])
