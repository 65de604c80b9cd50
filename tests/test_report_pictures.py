"""Pictures: what is drawn where, in which colour, and that a picture has the same bytes each time."""

import io
import itertools
import math

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from PIL import Image
from summaries import GROUPS, TIERS, clients, several, single

from hetperm.config import ALGORITHMS
from hetperm.report import pictures
from hetperm.report.summary import Summary

LARGEST_FIRST = ["flagship", "mid", "entry"]


# Who learns from whom


def test_clients_are_ordered_by_group_and_otherwise_so_that_clusters_stand_together():
    cluster = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    alpha = (cluster[:, None] == cluster) / (cluster[:, None] == cluster).sum(1, keepdims=True)
    assert cluster[pictures.order(alpha, cluster)].tolist() == sorted(cluster)
    ordered = cluster[pictures.order(alpha)]
    assert (ordered[1:] != ordered[:-1]).sum() == 2
    assert sorted(pictures.order(alpha)) == list(range(8))


@pytest.mark.parametrize("N", [1, 2, 3])
def test_a_few_clients_have_an_order_too(N):
    assert sorted(pictures.order(np.eye(N))) == list(range(N))


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


# Accuracy by tier


def test_a_tier_has_a_bar_for_every_method_in_its_colour():
    figure = pictures.tiers(Summary.from_json(single()), clients(), title="digits")
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
    drawn = [bars for bars in figure.axes[0].containers if hasattr(bars, "has_yerr")]
    segments = [bars.lines[2][0].get_segments() for bars in drawn]
    return [[np.ptp(bar[:, 1]) / 2 if bar.size else math.nan for bar in of_method] for of_method in segments]


def test_error_bars_are_over_the_clients_of_a_run_and_over_seeds_of_several():
    of_clients = error_bars(pictures.tiers(Summary.from_json(single()), clients()))
    assert np.allclose(of_clients[0], [np.nan, np.std([0, 0.004], ddof=1), 0.002], equal_nan=True)
    figure = pictures.tiers(Summary.from_json(several()))
    assert np.allclose(error_bars(figure), [[0.01] * 3, [0] * 3, [0] * 3])
    assert figure.axes[0].get_xlabel() == "error bars: standard deviation over seeds"
    assert pictures.tiers(Summary.from_json(single())).axes[0].get_xlabel() == ""


def test_bars_start_at_zero_also_those_of_a_negative_metric():
    def drawn(change: float):
        summary = single()
        for method in (summary, *summary["baselines"].values()):
            for tier in method["tiers"].values():
                tier["accuracy"] += change
        axes = pictures.tiers(Summary.from_json(summary)).axes[0]
        return axes.get_ylim(), {patch.get_y() for patch in axes.patches}

    (low, _), starts = drawn(0)
    assert (low, starts) == (0, {0})
    (low, high), starts = drawn(-2)
    assert starts == {0}
    assert low == pytest.approx(-1.297)  # local of tier entry: 0.703 - 2
    assert high >= 0


def test_tiers_that_were_not_scored_have_no_bar_and_no_number():
    summary = single()
    for method in (summary, *summary["baselines"].values()):
        method["tiers"]["mid"]["accuracy"] = None
    assert len(pictures.tiers(Summary.from_json(summary)).axes[0].texts) == 6
    for method in (summary, *summary["baselines"].values()):
        for tier in method["tiers"].values():
            tier["accuracy"] = None
    figure = pictures.tiers(Summary.from_json(summary), clients=[])
    figure.draw_without_rendering()
    assert len(figure.axes[0].texts) == 0


def test_methods_that_slice_a_global_model_look_different_from_the_rest():
    summary = single()
    summary["baselines"]["heterofl-ft"] = summary["baselines"]["local"]
    drawn = pictures.tiers(Summary.from_json(summary)).axes[0].containers
    hatches = {bars.get_label(): bars.patches[0].get_hatch() for bars in drawn if hasattr(bars, "patches")}
    assert hatches == {"perm": None, "local": None, "fedavg-ft": None, "heterofl-ft": "///"}


# Accuracy against cost


def history(*accuracies: float, **extra) -> list[dict]:
    return [{"client_steps": 10 * (k + 1), "rounds": 0, "accuracy_mean": a, **extra} for k, a in enumerate(accuracies)]


def test_a_method_is_a_line_with_the_spread_over_seeds_as_band():
    figure = pictures.curves(
        {"perm": [history(0.5, 0.7), history(0.7, 0.9)], "local": [history(0.4, 0.4)]},
        figures=[("accuracy_mean", "accuracy")],
        against=[("client_steps", "steps", 2)],
    )
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert lines.keys() == {"perm", "local"}
    assert np.allclose(lines["perm"].get_xydata(), [[5, 0.6], [10, 0.8]])
    assert len(axes.collections) == 1


def test_the_lines_that_the_caller_names_are_thicker_and_above_the_others():
    runs = {"perm": [history(0.5, 0.7)], "local": [history(0.4, 0.4)]}
    cost = [("client_steps", "", 1)]
    figure = pictures.curves(runs, figures=[("accuracy_mean", "")], against=cost, strong=["local"])
    perm, local = figure.axes[0].lines
    assert local.get_linewidth() > perm.get_linewidth()
    assert local.get_zorder() > perm.get_zorder()


def test_a_line_follows_the_tail_average_once_it_has_begun_and_has_no_point_without_a_score():
    rows = history(0.5, 0.6, 0.9)
    rows[1]["tail_accuracy_mean"] = 0.7
    rows[2]["accuracy_mean"] = ""
    figure = pictures.curves({"x": [rows]}, figures=[("accuracy_mean", "")], against=[("client_steps", "", 1)])
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[10, 0.5], [20, 0.7]]


def test_a_method_that_ends_with_a_last_step_is_drawn_only_where_that_was_taken():
    rows = history(0.4, 0.9, finished=1)
    rows[0]["finished"] = 0
    figure = pictures.curves({"x": [rows]}, figures=[("accuracy_mean", "")], against=[("client_steps", "", 1)])
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[20, 0.9]]


def test_a_method_of_which_one_point_is_known_has_the_spread_as_error_bar():
    runs = {"x": [history(0.4), history(0.6)]}
    figure = pictures.curves(runs, figures=[("accuracy_mean", "")], against=[("client_steps", "", 1)])
    (drawn,) = figure.axes[0].containers
    assert np.allclose(drawn.lines[2][0].get_segments()[0][:, 1], [0.5 - np.sqrt(0.02), 0.5 + np.sqrt(0.02)])


def test_a_method_that_pays_nothing_is_a_dashed_line():
    figure = pictures.curves(
        {"local": [history(0.4, 0.5)]}, figures=[("accuracy_mean", "")], against=[("rounds", "", 1)]
    )
    (line,) = figure.axes[0].lines
    assert (line.get_linestyle(), list(line.get_ydata())) == ("--", [0.5, 0.5])


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


# Colours and bytes


def test_every_method_has_a_colour_of_its_own():
    assert set(ALGORITHMS) <= set(pictures.COLOURS)
    assert len(set(pictures.COLOURS.values())) == len(pictures.COLOURS)


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


def test_letters_that_the_font_lacks_are_no_warning():
    figure = Figure(figsize=(1, 1))
    figure.text(0, 0, "端末")
    assert pictures.png(figure)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        lambda: pictures.alpha_map(alpha(), GROUPS, title="who", tiers=TIERS, largest_first=LARGEST_FIRST),
        lambda: pictures.tiers(Summary.from_json(several()), title="a $b$ c"),
    ],
    ids=["alpha", "tiers"],
)
def test_a_picture_is_a_png_file_with_the_same_bytes_each_time(draw):
    content = pictures.png(draw())
    assert pictures.png(draw()) == content
    with Image.open(io.BytesIO(content)) as image:
        image.verify()
        assert image.format == "PNG"
        assert image.width > 700


def test_very_many_clients_are_a_map_of_neighbours_in_the_order_of_groups():
    groups = [k % 50 for k in range(1000)]
    i, j = np.nonzero(np.equal.outer(groups, groups))
    tiers = ["a"] * 1000
    figure = pictures.neighbour_map((i, j, np.full(len(i), 1 / 20)), groups, title="who", tiers=tiers)
    (image,) = figure.axes[0].get_images()
    means = image.get_array()
    assert means.shape == (200, 200) and np.allclose(means.sum(1), 1)
    assert np.allclose(means, np.kron(np.eye(50), np.full((4, 4), 0.25)))
    unknown = pictures.neighbour_map((i, i, np.ones(len(i)) / 20), None, title="who", tiers=tiers)
    assert np.allclose(unknown.axes[0].get_images()[0].get_array(), np.eye(200))
