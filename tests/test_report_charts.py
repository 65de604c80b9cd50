"""What the script of a page draws, and the large files it comes from."""

import json

import numpy as np
import pytest
from scipy import sparse
from test_report_page import Page, data_of, rows, write_run, write_sweep

from hetperm.report import charts
from hetperm.report.contents import read
from hetperm.report.details import runs_of
from hetperm.report.page import render
from hetperm.runs import files

OUTLOOK = [
    {"share": 0.0, "loss": 1.0, "minus_alone": 0.0, "standard_error": 0.0, "chosen": 0},
    {"share": 0.7, "loss": 0.9, "minus_alone": -0.1, "standard_error": 0.01, "chosen": 1},
    {"share": 1e6, "loss": 1.2, "minus_alone": 0.2, "standard_error": 0.02, "chosen": 0},
]


@pytest.fixture
def full(tmp_path):
    return write_full(tmp_path / "run")


def write_full(path):
    """The folder of a run with everything that charts are drawn from."""
    write_run(path)
    alpha = np.zeros((6, 6))
    alpha[0, 0], alpha[0, 4], alpha[1:, 1] = 0.25, 0.75, 1
    files.write_alpha(path, alpha)
    curves = [{"epoch": r, "client": i, "accuracy": 0.1 * r + 0.01 * i} for r in (1, 2) for i in range(6)]
    files.write_csv(path / "client_metrics.csv", curves)
    costs = {"client_steps": 60, "bytes_down": 2**20, "bytes_up": 0, "finished": 1, "simulated_seconds": 4.5}
    rivals = [
        {"method": "local", "epoch": 1, **costs, "accuracy_mean": 0.3, "accuracy_tier_mid": 0.4},
        {"method": "fedavg-ft", "epoch": 3, "diverged": "diverged at epoch 3"},
    ]
    files.write_csv(path / "baselines.csv", rivals)
    files.write_csv(path / "look-ahead.csv", OUTLOOK)
    timing = {"seconds": 12.5, "command": ["secret"], "engine": "batched", "device": "cpu", "workers": 3}
    timing |= {"machine": {"processor": "a CPU", "cores": 2}, "versions": {"hetperm": "0", "torch": "2"}}
    files.write_json(path / "timing.json", timing)
    (path / "models").mkdir()
    for name in ("client_004.safetensors", "client_004.json"):
        (path / "models" / name).write_text("{}")
    return path


def data(path) -> dict:
    return data_of(Page(render(path)))


def test_curves_have_costs_by_client_in_mb_and_in_simulated_seconds(full):
    (local,) = data(full)["curves"]["local"]
    assert (local["steps"], local["mb"], local["seconds"]) == ([10], [1], [4.5])  # 60 steps of 6 clients
    assert (local["all"], local["by_tier"]) == ([0.3], {"mid": [0.4]})
    (perm,) = data(full)["curves"]["perm"]
    assert perm["all"] == [0.41, 0.61]  # the tail average once it has begun
    assert data(full)["curves"]["fedavg-ft"] == []


def test_the_map_holds_every_weight_in_ten_thousandths(full):
    (one,) = data(full)["maps"]
    assert one["rows"][0] == [[0, 4], [2500, 7500]]
    assert one["rows"][3] == [[1], [10000]]
    assert (one["tiers"][0], one["groups"], sorted(one["alike"])) == ("mid", [1, 0, 0, 0, 1, 0], list(range(6)))


def test_of_many_clients_neighbours_share_a_cell_and_rows_sum_to_one(full):
    summary = json.loads((full / "summary.json").read_text()) | {"num_clients": 1000}
    files.write_json(full / "summary.json", summary)
    (full / "alpha.npy").unlink()
    alpha = np.random.default_rng(0).dirichlet(np.ones(20), 1000)
    matrix = sparse.csr_array((alpha.ravel(), (np.repeat(np.arange(1000), 20), np.tile(np.arange(20) * 37, 1000))))
    files.write_alpha(full, sparse.csr_array(matrix, shape=(1000, 1000)))
    rows = [{"client": i, "tier": "mid", "group": i % 2, "accuracy": i / 1000} for i in range(1000)]
    files.write_csv(full / "clients.csv", rows)
    text = render(full)
    (one,) = data(full)["maps"]
    assert (len(one["rows"]), one["bin"]) == (200, 5)
    assert [sum(values) for _, values in one["rows"]] == pytest.approx([10_000] * 200, abs=30)
    assert one["order"][:3] == [0, 2, 4]  # a group after the other
    assert len(text.encode()) < 3e6
    assert len(data(full)["clients"]) == charts.CLIENTS
    assert "the 400 worst clients of 1000; clients.csv has all" in Page(text).said("p")


def test_a_client_has_partners_a_curve_and_the_files_of_its_model(full):
    clients = {client["id"]: client for client in data(full)["clients"]}
    assert clients[0]["partners"] == [[4, 0.75], [0, 0.25]]
    assert clients[2]["curve"] == [0.12, 0.22]
    assert clients[4]["files"] == ["models/client_004.json", "models/client_004.safetensors"]
    assert clients[0]["scores"] == {"perm": 0.85, "local": 0.75, "fedavg-ft": 0.8}
    assert data(full)["epochs"] == [1, 2]


def test_a_single_run_is_paired_over_clients_by_hand(full):
    paired = data(full)["paired"]
    # perm is 0.1 ahead of local for every client: no spread, so the interval is the mean
    local = paired["rivals"]["local"]
    assert (paired["over"], local["mean"], local["low"], local["high"]) == ("clients", 0.1, 0.1, 0.1)
    assert local["each"] == [0.1] * 6


def test_seeds_are_paired_with_a_t_interval_by_hand(tmp_path):
    paired = data(write_sweep(tmp_path / "sweep"))["paired"]
    # gains of 0.10, 0.11, 0.12: mean 0.11, t(2) = 4.3027, half = 4.3027 * 0.01 / sqrt(3) = 0.0248
    local = paired["rivals"]["local"]
    assert (paired["over"], local["mean"], local["low"], local["high"]) == ("seeds", 0.11, 0.0852, 0.1348)
    assert local["verdict"] == "ahead"


def test_what_was_chosen_stands_beside_the_losses_that_decided_it(full):
    said = Page(render(full)).said("li")
    assert (
        "one step ahead, the mean validation loss of clients would be 0.9000 with this choice, 1.0000 if everybody "
        "learned alone and 1.2000 if everybody learned from everybody. Among choices that are as good as the best, "
        "the one nearest to a share of 0.7 is taken. Instead of leaving clients nearly alone, it is the best with four "
        "partners or more, unless that is worse by more than chance or by 4 %."
    ) in said
    (outlook,) = data(full)["outlook"]
    assert (outlook["share"], outlook["gain"], outlook["chosen"]) == ([0.0, 0.7, 1e6], [0.0, -0.1, 0.2], 1)


def test_of_several_seeds_a_table_says_what_was_chosen(full, tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    for seed in range(3):
        summary = json.loads((sweep / f"seed-{seed}" / "summary.json").read_text())
        summary["alpha"]["share"] = (0.0, 0.7, 1e6)[seed]
        files.write_json(sweep / f"seed-{seed}" / "summary.json", summary)
    files.write_csv(sweep / "seed-1" / "look-ahead.csv", OUTLOOK)
    lines = rows(Page(render(sweep)))
    assert ["0", "0 (alone)", "-", "-", "-"] in lines
    assert ["1", "0.7", "0.9000", "1.0000", "1.2000"] in lines
    assert ["2", "everybody", "-", "-", "-"] in lines


def test_the_page_names_machine_and_versions_and_nothing_that_changes_with_the_clock(full):
    text = render(full)
    page = Page(text)
    assert dict(zip(page.said("dt"), page.said("dd"))) == {
        "engine": "batched",
        "device": "cpu",
        "processor": "a CPU",
        "cores": "2",
        "hetperm": "0",
        "torch": "2",
    }
    assert "12.5" not in text
    assert "secret" not in text


@pytest.mark.parametrize("content", [b"", b"no numpy", b"\x93NUMPY\x01\x00", bytes(500)])
def test_damaged_weights_are_refused_in_a_sentence(full, content):
    (full / "alpha.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"alpha\.npy cannot be read .*; remove it or run again") as caught:
        render(full)
    assert "pickle" not in str(caught.value)  # numpy's advice is to trust the file


def test_weights_of_other_clients_are_refused(full):
    files.write_alpha(full, np.eye(5))
    with pytest.raises(ValueError, match="holds no mixing weights of 6 clients"):
        render(full)


def test_the_runs_of_a_sweep_are_those_of_its_seeds(tmp_path):
    folder = write_sweep(tmp_path / "sweep")
    assert [run.summary.seed for run in runs_of(folder, read(folder))] == [0, 1, 2]
