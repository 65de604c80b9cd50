"""report.html: what is on the page, and that it is a page."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image
from summaries import clients, several, single

from hetperm.report.page import NAME, render
from hetperm.runs import files

CONFIG = """\
algorithm = "perm"
dataset = "digits"
partition = "label-shift:2"
model = "mlp"
capacity_profile = "mobile"
"""
PROFILE = [{"tier": "flagship", "clients": 1, "width": 1.0, "train_mb": 191.5}, {"tier": "entry", "train_mb": None}]
VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """A page taken apart; an element that is closed out of turn, or not at all, is an error."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if tag in tags]

    @property
    def images(self) -> dict[str, bytes]:
        """alternative text -> content."""
        start = "data:image/png;base64,"
        assert all(image["src"].startswith(start) for image in self.all("img"))
        return {image["alt"]: base64.b64decode(image["src"].removeprefix(start)) for image in self.all("img")}


def data_of(page: Page) -> dict:
    """What the script of a page draws."""
    return json.loads(page.said("script")[0])


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), colour).save(file, "png")
    return file.getvalue()


def write_run(path: Path, *, seed: int = 0) -> Path:
    """A run's folder with all that one can hold."""
    path.mkdir(parents=True)
    files.write_json(path / "summary.json", single(seed))
    files.write_csv(path / "clients.csv", clients(seed))
    costs = {"client_steps": 30, "bytes_down": 2**20, "bytes_up": 2**20}
    metrics = [
        {"epoch": 1, **costs, "accuracy_mean": 0.41, "accuracy_tier_mid": 0.42, "accuracy_tier_entry": 0.43},
        {"epoch": 2, **costs, "accuracy_mean": 0.51, "tail_accuracy_mean": 0.61, "tail_accuracy_tier_mid": 0.62},
    ]
    files.write_csv(path / "metrics.csv", metrics)
    files.write(path / "config.toml", CONFIG)
    files.write_csv(path / "profile.csv", PROFILE)
    for name, colour in (("zebra", "black"), ("accuracy", "red"), ("alpha", "green"), ("tiers", "blue")):
        files.write(path / f"{name}.png", png(colour))
    return path


def write_sweep(path: Path) -> Path:
    """The folder of three seeds, of which two have a page."""
    for seed in range(3):
        write_run(path / f"seed-{seed}", seed=seed)
    for seed in range(2):
        files.write(path / f"seed-{seed}" / NAME, render(path / f"seed-{seed}"))
    files.write_json(path / "summary.json", several())
    rows = [{"seed": seed, **row} for seed in range(3) for row in clients(seed)]
    files.write_csv(path / "clients.csv", rows)
    files.write_csv(path / "seeds.csv", [{"seed": seed, "perm": 0.8 + seed / 100, "local": None} for seed in range(3)])
    return path


def test_the_page_of_a_run_has_everything_in_order(tmp_path):
    page = Page(render(write_run(tmp_path / "run")))
    assert page.said("h1", "title") == ["perm on digits"] * 2
    assert page.said("p")[0] == (
        "perm against local and fedavg-ft: data digits (label-shift:2), 6 clients, model zoo:mlp, capacity profile "
        "mobile, 2 epochs, seed 0."
    )
    assert page.said("h2", "summary") == [
        "All methods",
        "Test accuracy by tier",
        "Who learns from whom",
        "Clients",
        "Cost per device",
        "Pictures",
        "Epoch by epoch",
        "Run it again",
        "Configuration",
    ]


def rows(page: Page) -> list[list[str]]:
    """The lines of all tables on a page."""
    lines, current = [], None
    for tag, text in page.texts:
        if tag == "th" or (tag == "td" and current is not None):
            if tag == "th":
                current = []
                lines.append(current)
            current.append(text)
    return lines


def test_tables_hold_the_figures_of_the_run(tmp_path):
    lines = rows(Page(render(write_run(tmp_path / "run"))))
    assert ["perm", "0.836 ± 0.040", "0.801", "4.5", "12", "3", "10", "2.0"] in lines
    assert ["flagship", "1", "1", "1,600", "0.902", "0.802", "0.852", "4.0"] in lines
    assert ["all", "6", "0.836", "0.736", "0.786", "4.5"] in lines
    assert ["flagship", "1", "1", "192"] in lines
    assert ["entry", "-", "-", "-"] in lines
    assert ["3", "entry", "1/16", "100", "0", "50", "5", "0.803", "0.300", "5.0", "0.703", "0.753"] in lines
    assert ["1", "30", "2", "0.410", "-", "-", "0.420", "0.430"] in lines
    assert ["2", "30", "2", "0.610", "-", "-", "0.620", "-"] in lines


def test_mixing_weights_stand_beside_what_equal_weights_would_be(tmp_path):
    said = Page(render(write_run(tmp_path / "run"))).said("li")
    # groups of 4 and 2 of 6: (16 + 4) / 36; tiers of 3, 2 and 1: (9 + 4 + 1) / 36
    assert said[:-1] == [
        "perm: weight 0.950 on clients with the same kind of data (same-group mass; 0.556 if all weights were equal), "
        "0.400 on clients of the same tier (same-tier mass; 0.389 if all weights were equal) and 0.250 on the client "
        "itself; a client learns from 5.0 clients, itself included (4.5 effective partners)."
    ]


def test_without_known_groups_and_with_one_tier_there_is_less_to_say(tmp_path):
    path = write_run(tmp_path / "run")
    summary = single()
    summary["alpha"]["same_group_mass"] = None
    for method in (summary, *summary["baselines"].values()):
        method["tiers"] = {"full": {"clients": 6, "width": 1.0, "params": 5, "accuracy": 0.8}}
    files.write_json(path / "summary.json", summary)
    assert Page(render(path)).said("li")[:-1] == [
        "perm: weight 0.250 on the client itself; a client learns from 5.0 clients, itself included "
        "(4.5 effective partners)."
    ]


def test_pictures_are_inside_the_page_with_a_caption_and_a_text_each(tmp_path):
    page = Page(render(write_run(tmp_path / "run")))
    assert list(page.images.values()) == [png(colour) for colour in ("blue", "green", "red", "black")]
    for content in page.images.values():
        Image.open(io.BytesIO(content)).verify()
    assert len(page.images) == 4
    assert all(page.images)
    captions = page.said("figcaption")
    assert len(captions) == 4
    assert captions[1].startswith("Who learns from whom: row i is a client, column j whom it learns from")
    assert captions[3] == "zebra.png"


def test_a_page_needs_nothing_from_elsewhere(tmp_path):
    text = render(write_run(tmp_path / "run"))
    page = Page(text)
    assert not page.all("link") + page.all("iframe")
    assert [script.get("src") for script in page.all("script")] == [None, None]
    assert set(re.findall(r"https?:[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|innerHTML|outerHTML|insertAdjacent|document\.write", text)
    assert "prefers-color-scheme: dark" in text


def test_only_the_script_of_the_page_may_run(tmp_path):
    page = Page(render(write_run(tmp_path / "run")))
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    text = render(tmp_path / "run")
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_same_folder_gives_the_same_bytes_wherever_it_is(tmp_path):
    text = render(write_run(tmp_path / "a"))
    files.write(tmp_path / "a" / NAME, text)
    assert render(tmp_path / "a") == text
    assert render(write_run(tmp_path / "b")) == text
    assert str(tmp_path) not in text


def test_every_text_is_escaped(tmp_path):
    evil = '<script>alert("1 & 2")</script>'
    path = write_run(tmp_path / "run")
    summary = json.loads((path / "summary.json").read_text().replace("flagship", "<b>flagship"))
    summary |= {"dataset": evil, "algorithm": "<i>perm"}
    summary["baselines"]["<u>rival"] = summary["baselines"]["fedavg-ft"]  # named in a note too
    files.write_json(path / "summary.json", summary)
    files.write_csv(path / "clients.csv", [{**row, "tier": f"<em>{row['tier']}"} for row in clients()])
    files.write(path / "config.toml", f"{CONFIG}data_dir = '{evil}'\npartition_of = '</code></pre>'\n")
    files.write_csv(path / "profile.csv", [{"tier": evil, "<s>": "<s>"}])
    (path / '<q>&".png').write_bytes(png("white"))
    files.write_json(path / "resources.json", {"tiers": [{"tier": "<tt>", "verdict": "<var>"}], "lines": [evil]})
    page = Page(render(path))
    assert not {"b", "i", "u", "em", "s", "q", "tt", "var"} & {tag for tag, _ in page.elements}
    assert len(page.all("script")) == 2
    assert data_of(page)["methods"][0]["name"] == "<i>perm"
    assert page.said("h1") == [f"<i>perm on {evil}"]
    assert evil in page.said("th")
    assert "<s>" in page.said("td")
    assert "<u>rival" in page.said("th")
    assert "Trained with 100 parameters whatever the tier: fedavg-ft, <u>rival." in page.said("p")
    assert any(evil in caption for caption in page.said("p"))
    assert "<em>mid" in page.said("td")
    assert '<q>&".png' in page.said("figcaption")
    assert 'Picture <q>&".png' in page.images
    assert evil in page.said("li")
    assert {"<tt>", "<var>"} <= set(page.said("th", "td"))
    assert f"data_dir = '{evil}'" in page.said("code")[-1]


def test_the_configuration_and_how_to_run_it_again_are_there_unless_data_were_ones_own(tmp_path):
    path = write_run(tmp_path / "run")
    assert Page(render(path)).said("code") == ["hetperm train --config config.toml", CONFIG.strip()]
    files.write(path / "config.toml", 'dataset = "own"\n')
    assert Page(render(path)).said("code") == ['dataset = "own"']


def test_what_a_folder_does_not_hold_is_left_out(tmp_path):
    files.write_json(tmp_path / "summary.json", single())
    page = Page(render(tmp_path))
    assert page.said("h2", "summary") == ["All methods", "Test accuracy by tier", "Who learns from whom", "Cost"]
    assert page.said("p")[0] == (
        "perm against local and fedavg-ft: data digits (label-shift:2), 6 clients, model zoo:mlp, capacity profile "
        "mobile, 2 epochs, seed 0."
    )
    assert "if all weights were equal" not in page.said("li")[0]
    bare = {key: value for key, value in single().items() if key not in ("tiers", "alpha", "baselines", "seed")}
    files.write_json(tmp_path / "summary.json", bare)
    assert Page(render(tmp_path)).said("h2") == ["All methods", "Cost"]


def test_a_column_that_no_client_has_a_value_in_is_left_out(tmp_path):
    path = write_run(tmp_path / "run")
    files.write_csv(path / "clients.csv", [{**row, "group": None} for row in clients()])
    (line,) = [line for line in rows(Page(render(path))) if line[:2] == ["3", "entry"]]
    assert line == ["3", "entry", "1/16", "100", "50", "5", "0.803", "0.300", "5.0", "0.703", "0.753"]


def test_the_page_of_several_seeds_has_gains_seeds_and_links(tmp_path):
    page = Page(render(write_sweep(tmp_path / "sweep")))
    assert page.said("p")[0].endswith("seeds 0, 1, 2.")
    assert "0.556 if all weights were equal" in page.said("li")[0]
    lines = rows(page)
    assert ["local", "+0.110", "+0.085 to +0.135", "3 of 3", "ahead"] in lines
    assert ["flagship", "1", "1", "1,600", "0.912 ± 0.010", "0.802 ± 0.000", "0.852 ± 0.000", "4.0"] in lines
    assert ["1", "0.810", "-"] in lines
    assert ["flagship", "1", "1", "192"] in lines  # the profile of the first seed
    assert "Clients" not in page.said("h2")
    assert [(link["href"], text) for link, text in zip(page.all("a"), page.said("a"))][-2:] == [
        ("seed-0/report.html", "seed 0"),
        ("seed-1/report.html", "seed 1"),
    ]


def test_a_resource_benchmark_has_a_page_without_a_run(tmp_path):
    tiers = [{"tier": "big", "width": 1.0, "verdict": "fits", "reason": "said below"}]
    files.write_json(tmp_path / "resources.json", {"title": "cnn on mobile", "tiers": tiers, "lines": ["a limit"]})
    files.write(tmp_path / "resources.png", png("red"))
    page = Page(render(tmp_path))
    assert page.said("h1", "title") == ["cnn on mobile"] * 2
    assert page.said("h2") == ["Does it fit the devices? Measured under enforced limits", "Pictures"]
    assert "The model fits every tier at its width." in page.said("p")
    assert rows(page)[-3:] == [["big"], ["width", "1"], ["verdict", "fits"]]  # below the tier, before all measurements
    assert page.said("li") == ["a limit"]
