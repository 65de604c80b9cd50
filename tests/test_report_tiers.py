"""Tables and pictures of runs whose clients have models of several sizes."""

import copy
import itertools
import math

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from rich.console import Console
from summaries import GROUPS, TIERS, clients, several, single

from hetperm.report import grid, pictures, tables

LARGEST_FIRST = ["flagship", "mid", "entry"]


def lines_of(table, width: int = 120) -> list[list[str]]:
    """The words of every line of a table, as a terminal shows it."""
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return [line.split() for line in console.export_text().splitlines() if line.split()]


# Tables


def test_the_tier_table_has_the_largest_width_first_and_all_clients_last():
    title, head, _, *lines = lines_of(tables.tier_table(single(), clients()))
    assert title == "accuracy by tier".split()
    assert head == "tier clients width params perm local fedavg-ft partners".split()
    assert lines[:4] == [
        "flagship 1 1 1,600 0.902 0.802 0.852 4.0".split(),
        "mid 2 1/4 400 0.852 0.752 0.802 4.0".split(),
        "entry 3 1/16 100 0.803 0.703 0.753 5.0".split(),
        "all 6 0.836 0.736 0.786 4.5".split(),
    ]
    assert lines[4] == "Trained with 100 parameters whatever the tier: fedavg-ft.".split()


def test_the_tier_table_of_several_seeds_has_the_spread_over_them():
    rows = [row for seed in range(3) for row in clients(seed)]
    table = lines_of(tables.tier_table(several(), rows))
    assert "flagship 1 1 1,600 0.912 ± 0.010 0.802 ± 0.000 0.852 ± 0.000 4.0".split() in table
    assert "all 6 0.846 ± 0.010 0.736 ± 0.000 0.786 ± 0.000 4.5".split() in table


def test_a_tier_that_was_not_scored_has_a_dash_and_so_have_partners_without_clients():
    summary = single()
    summary["tiers"]["mid"]["accuracy"] = None
    summary["baselines"]["local"]["tiers"]["mid"]["accuracy"] = math.nan
    assert "mid 2 1/4 400 - - 0.802 -".split() in lines_of(tables.tier_table(summary))


def test_the_tier_table_works_for_one_tier_and_without_alpha():
    summary = single() | {"alpha": None, "tiers": {"full": {"clients": 6, "width": 1.0, "accuracy": 0.5}}}
    summary["baselines"] = {}
    _, head, _, *lines = lines_of(tables.tier_table(summary))
    assert head == "tier clients width params perm".split()
    assert lines == ["full 6 1 - 0.500".split(), "all 6 0.836".split()]


def test_a_tier_has_its_own_size_also_if_the_algorithm_needs_one_size():
    summary = single()
    rival = summary["baselines"].pop("fedavg-ft")
    turned = {**summary, **rival, "algorithm": "fedavg-ft", "baselines": {"perm": summary}}
    assert tables.tier_names(turned) == LARGEST_FIRST
    assert "flagship 1 1 1,600 0.852 0.902".split() in lines_of(tables.tier_table(turned))


def test_a_table_with_many_methods_stands_on_its_side_and_fits_the_page():
    summary = several()
    for k in range(12):
        summary["baselines"][f"rival-{k}"] = summary["baselines"]["local"]
    shown = tables.tier_grid(summary)
    assert list(shown.columns) == ["tier", *LARGEST_FIRST, "all"]
    assert [row[0] for row in shown.rows][:4] == ["clients", "width", "params", "perm"]
    assert shown.width <= tables.WIDE
    assert shown.rows[3] == ("perm", "0.912 ± 0.010", "0.862 ± 0.010", "0.813 ± 0.010", "0.846 ± 0.010")


def test_names_are_shown_as_they_are_in_the_terminal_and_in_markdown():
    summary = copy.deepcopy(single())
    for method in (summary, *summary["baselines"].values()):
        method["tiers"]["[red]a|b[/]"] = method["tiers"].pop("mid")
    assert "[red]a|b[/] 2 1/4 400 0.852 0.752 0.802 -".split() in lines_of(tables.tier_table(summary))
    text = tables.tier_markdown(summary, clients())
    assert r"| [red]a\|b[/] | 2 | 1/4 | 400 | 0.852 | 0.752 | 0.802 | - |" in text.splitlines()
    assert text.splitlines()[1] == "|---|" + "--:|" * 7
    assert text.endswith("\n\nTrained with 100 parameters whatever the tier: fedavg-ft.\n")


def test_gains_are_told_seed_by_seed_also_if_there_are_none():
    assert tables.paired_lines(several()) == [
        "perm over local: +0.110 ± 0.010 (every seed positive)",
        "perm over fedavg-ft: +0.060 ± 0.010 (every seed positive)",
    ]
    assert tables.paired_lines(single()) == []


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        ({"mean": 0.02, "std": 0.03, "differences": [0.05, 0.02, -0.01]}, "+0.020 ± 0.030 (2 of 3 seeds positive)"),
        ({"mean": -0.02, "std": 0.01, "differences": [-0.03, -0.01]}, "-0.020 ± 0.010 (every seed negative)"),
        ({"mean": 0.0, "std": 0.0, "differences": [0.0, 0.0]}, "+0.000 ± 0.000 (0 of 2 seeds positive)"),
        ({"mean": 0.04, "std": None, "differences": [0.04]}, "+0.040 (one seed)"),
        ({"mean": None, "std": None, "differences": [0.1, None]}, "- (1 of 2 seeds positive)"),
    ],
)
def test_a_gain_says_how_many_seeds_agree(gain, said):
    summary = {"algorithm": "perm", "paired": {"local": gain}}
    assert tables.paired_lines(summary) == [f"perm over local: {said}"]


def test_the_profile_table_has_a_column_for_every_key_and_a_dash_where_there_is_nothing():
    rows = [
        {"tier": "large", "clients": 1, "width": 1.0, "params": 11_173_962, "mmacs": 556.3, "train_mb": None},
        {"tier": "small", "clients": 11, "width": 0.0625, "params": 44_000, "mmacs": 2.345, "wire_mb": 0.17},
    ]
    title, head, _, *lines = lines_of(tables.profile_table(rows, title="mobile"))
    assert (title, head) == (["mobile"], "tier clients width params MMACs train MB wire MB".split())
    assert lines == [
        "large 1 1 11,173,962 556 - -".split(),
        "small 11 1/16 44,000 2.35 - 0.17".split(),
    ]


def test_html_of_a_table_escapes_every_text():
    shown = grid.html(grid.Grid(["<a>", "b"], [["&", "<i>"]], title="<t>", note="<n>", strong=frozenset([0])))
    assert not {"<a>", "<i>", "<t>", "<n>"} & set(shown.replace("><", "> <").split())
    assert all(text in shown for text in ("&lt;a&gt;", "&amp;", "&lt;i&gt;", "&lt;t&gt;", "&lt;n&gt;"))


# Pictures


def test_clients_are_ordered_by_group_and_then_from_the_largest_tier_down():
    at = pictures.order(np.eye(6), GROUPS, TIERS, largest_first=LARGEST_FIRST)
    assert [(GROUPS[i], TIERS[i]) for i in at] == [
        (0, "flagship"),
        (0, "entry"),
        (0, "entry"),
        (0, "entry"),
        (1, "mid"),
        (1, "mid"),
    ]
    assert at.tolist() == [2, 1, 3, 5, 0, 4]


def alpha() -> np.ndarray:
    return np.arange(36.0).reshape(6, 6) / np.arange(36.0).reshape(6, 6).sum(1, keepdims=True)


def test_the_map_has_strong_lines_between_groups_and_faint_ones_between_tiers():
    figure = pictures.alpha_map(alpha(), GROUPS, title="who", tiers=TIERS, largest_first=LARGEST_FIRST)
    axes = figure.axes[0]
    at = [2, 1, 3, 5, 0, 4]
    assert np.array_equal(axes.images[0].get_array(), alpha()[np.ix_(at, at)])
    across = [line for line in axes.lines if line.get_ydata()[0] == line.get_ydata()[1]]
    strong = [line.get_ydata()[0] for line in across if line.get_linewidth() > 1]
    faint = [line.get_ydata()[0] for line in across if line.get_linewidth() < 1 and line.get_alpha() < 1]
    assert (strong, faint) == ([3.5], [0.5, 3.5])
    assert [text.get_text() for text in axes.get_yticklabels()] == [str(i) for i in at]
    assert [text.get_text() for text in axes.get_yticklabels(minor=True)] == ["group 0", "group 1"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == LARGEST_FIRST


def test_the_strips_beside_the_map_are_the_darker_the_larger_the_tier():
    figure = pictures.alpha_map(alpha(), GROUPS, title="who", tiers=TIERS, largest_first=LARGEST_FIRST)
    beside, above = figure.axes[0].child_axes
    assert beside.images[0].get_array().ravel().tolist() == [0, 2, 2, 2, 1, 1]
    assert np.array_equal(beside.images[0].get_array().T, above.images[0].get_array())
    shades = beside.images[0].cmap(np.arange(3))[:, :3].mean(1)
    assert list(shades) == sorted(shades)


def test_the_map_of_one_tier_is_the_map_without_tiers():
    figures = [pictures.alpha_map(alpha(), GROUPS, title="who", tiers=tiers) for tiers in (None, ["full"] * 6)]
    for figure in figures:
        assert not figure.legends
        assert not figure.axes[0].child_axes
        assert figure.axes[0].get_xlabel() == "host j (ordered by group)"


def test_without_known_groups_the_map_shows_tiers_in_strips_alone():
    figure = pictures.alpha_map(alpha(), None, title="who", tiers=TIERS, largest_first=LARGEST_FIRST)
    assert figure.axes[0].get_xlabel() == "host j (ordered by similarity)"
    assert len(figure.axes[0].child_axes) == 2
    assert not figure.axes[0].lines


def fits(figure) -> bool:
    """Whether nothing of a figure reaches beyond its edge."""
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


@pytest.mark.parametrize("N", [6, 60])
def test_nothing_of_the_map_is_cut_off_and_the_legend_stands_clear_of_the_label(N):
    tiers, groups = list(TIERS) * (N // 6), list(GROUPS) * (N // 6)
    figure = pictures.alpha_map(np.eye(N), groups, title="who learns from whom: perm on digits", tiers=tiers)
    assert fits(figure)
    assert figure.legends[0].get_window_extent().y1 < figure.axes[0].xaxis.label.get_window_extent().y0


def test_a_tier_has_a_bar_for_every_method_in_its_colour():
    figure = pictures.tiers(single(), clients(), title="digits")
    axes = figure.axes[0]
    methods = ["perm", "local", "fedavg-ft"]
    bars = {bars.get_label(): bars.patches for bars in axes.containers if hasattr(bars, "patches")}
    assert list(bars) == methods
    assert all(to_hex(bars[name][0].get_facecolor()) == pictures.COLOURS[name].lower() for name in methods)
    tops = [[bar.get_y() + bar.get_height() for bar in bars[name]] for name in methods]
    assert np.allclose(tops, [[0.902, 0.852, 0.803], [0.802, 0.752, 0.703], [0.852, 0.802, 0.753]])
    assert [text.get_text().split("\n") for text in axes.get_xticklabels()] == [
        ["flagship", "width 1", "1 client"],
        ["mid", "width 1/4", "2 clients"],
        ["entry", "width 1/16", "3 clients"],
    ]
    assert fits(figure)


def error_bars(figure) -> list[list[float]]:
    """Half the length of every error bar, method by method; nan where there is none."""
    drawn = [each for each in figure.axes[0].containers if hasattr(each, "has_yerr")]
    segments = [each.lines[2][0].get_segments() for each in drawn]
    return [[np.ptp(each[:, 1]) / 2 if each.size else math.nan for each in of_method] for of_method in segments]


def test_error_bars_are_over_the_clients_of_a_run_and_over_seeds_of_several():
    of_clients = error_bars(pictures.tiers(single(), clients()))
    assert np.allclose(of_clients[0], [np.nan, np.std([0, 0.004], ddof=1), 0.002], equal_nan=True)
    figure = pictures.tiers(several())
    assert np.allclose(error_bars(figure), [[0.01] * 3, [0] * 3, [0] * 3])
    assert figure.axes[0].get_xlabel() == "error bars: standard deviation over seeds"
    assert pictures.tiers(single()).axes[0].get_xlabel() == ""


def test_the_axis_of_accuracies_says_where_it_starts():
    axes = pictures.tiers(single()).axes[0]
    assert axes.get_ylim()[0] == pytest.approx(0.6)
    assert axes.get_ylabel() == "test accuracy (axis starts at 0.6)"
    low = single()
    low["baselines"]["local"]["tiers"]["mid"]["accuracy"] = 0.05
    axes = pictures.tiers(low).axes[0]
    assert (axes.get_ylim()[0], axes.get_ylabel()) == (0, "test accuracy")


def test_tiers_that_were_not_scored_have_no_bar_and_no_number():
    summary = single()
    for method in (summary, *summary["baselines"].values()):
        method["tiers"]["mid"]["accuracy"] = None
    assert len(pictures.tiers(summary).axes[0].texts) == 6
    for method in (summary, *summary["baselines"].values()):
        for tier in method["tiers"].values():
            tier["accuracy"] = None
    figure = pictures.tiers(summary, clients=[])
    figure.draw_without_rendering()
    assert len(figure.axes[0].texts) == 0


def test_methods_that_slice_a_global_model_look_different_from_the_rest():
    summary = single()
    summary["baselines"]["heterofl-ft"] = summary["baselines"]["local"]
    bars = [each for each in pictures.tiers(summary).axes[0].containers if hasattr(each, "patches")]
    hatches = {each.get_label(): each.patches[0].get_hatch() for each in bars}
    assert hatches == {"perm": None, "local": None, "fedavg-ft": None, "heterofl-ft": "///"}


def lab(colour: str) -> np.ndarray:
    """A colour in CIELAB, where a distance of 2 can just be seen."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]] @ linear
    f = xyz / [0.9505, 1.0, 1.089]
    x, y, z = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_can_be_told_apart():
    pairs = itertools.combinations(pictures.COLOURS.items(), 2)
    close = [(a, b) for (a, one), (b, other) in pairs if np.linalg.norm(lab(one) - lab(other)) < 20]
    assert close == []


def test_one_figure_against_steps_and_bytes_stands_side_by_side():
    row = {"client_steps": 40, "bytes_down": 2**20, "bytes_up": 3 * 2**20, "accuracy_mean": 0.5}
    local = {**row, "bytes_down": 0, "bytes_up": 0}
    figure = pictures.curves(
        {"perm": [[row]], "local": [[local]]},
        figures=[("accuracy_mean", "accuracy")],
        against=[("client_steps", "steps a client", 4), ("bytes", "MB", 2**20)],
    )
    left, right = figure.axes
    assert left.get_position().x1 < right.get_position().x0
    assert left.lines[0].get_xydata().tolist() == [[10, 0.5]]
    assert right.lines[0].get_xydata().tolist() == [[4, 0.5]]
    assert [line.get_linestyle() for line in right.lines] == ["-", "--"]
    assert (left.get_ylabel(), right.get_ylabel()) == ("accuracy", "")
    assert left.get_ylim() == right.get_ylim()


@pytest.mark.slow
def test_pictures_of_tiers_have_the_same_bytes_each_time():
    one, other = (pictures.png(pictures.tiers(several(), title="a $b$ c")) for _ in range(2))
    assert one == other
