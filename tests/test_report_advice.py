"""A run that went wrong says so: every fault in a run that has it, and not in one that is well."""

import shutil
from dataclasses import replace

import pytest
from summaries import clients, single

from hetperm import Config, run
from hetperm.cli import console
from hetperm.report import advice
from hetperm.report.advice import Evidence, findings
from hetperm.report.summary import Summary
from hetperm.runs import output

pytestmark = pytest.mark.usefixtures("undrawn")

ALIKE = {"num_clients": 4, "capacity_profile": "homogeneous", "model_options": {"hidden": [16, 16]}}
MIXED = {"num_clients": 6, "capacity_profile": "mobile", "model_options": {"hidden": [32, 32]}}


@pytest.fixture
def advised(tmp_path, monkeypatch):
    """A function that runs a configuration and returns kind of fault -> what is said, and the result."""
    monkeypatch.setattr(output, "draw", lambda result: None)
    monkeypatch.setattr(output.page, "render", lambda folder: "")

    def go(**settings):
        result = run(Config(**settings, out=tmp_path / "run", quiet=True))
        assert result.advice == [sentence for _, sentence in findings(result.evidence)]
        return {name.rpartition(" ")[0]: sentence for name, sentence in findings(result.evidence)}, result

    return go


# Runs that have the fault


@pytest.mark.slow
def test_a_shortened_run_is_told_to_train_longer(advised, capsys):
    # As a newcomer would shorten the main job: perm ends far below local, and nothing else would say why.
    said, result = advised(**MIXED, baselines=("local",), steps=0, epochs=1, warmup_rounds=1)
    local = result.summary["baselines"]["local"]["accuracy"]["mean"]
    assert result.accuracy < local - 0.1
    assert said["short warm-up"].startswith("the warm-up had 5 steps per client, too few to tell clients apart (0.")
    assert said["short warm-up"].endswith("use --steps 800 (half of them for the warm-up) or --warmup-rounds 40")
    assert "steps per client are too few for models that travel; the default is --steps 800" in said["behind local"]
    console.show(result.summary, [result])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("advice: ")]
    assert lines == [f"advice: {sentence}" for sentence in said.values()]


@pytest.mark.slow
def test_a_shortened_run_in_which_local_is_twice_as_good_is_cured_by_its_advice(advised):
    short = {"num_clients": 10, "capacity_profile": "uniform5", "model_options": {"hidden": [64, 64]}}
    short |= {"baselines": ("local",)}
    said, result = advised(**short, steps=0, epochs=1, warmup_rounds=1)
    alone = result.summary["baselines"]["local"]["accuracy"]["mean"]
    assert result.accuracy < 0.45 and alone > 0.65
    assert said["behind local"].endswith("too few for models that travel; the default is --steps 800")
    shutil.rmtree(result.folder)
    said, result = advised(**short, steps=800, epochs=12)
    assert said == {}
    assert result.accuracy > result.summary["baselines"]["local"]["accuracy"]["mean"] + 0.05


@pytest.mark.slow
def test_tiers_that_lose_by_sharing_are_named_though_the_mean_gains(advised):
    main = {"num_clients": 20, "capacity_profile": "mobile", "model_options": {"hidden": [64, 64]}}
    said, result = advised(**main, baselines=("local",), steps=80, epochs=2)
    assert result.accuracy > result.summary["baselines"]["local"]["accuracy"]["mean"]
    assert said["tiers behind local"].startswith("tiers high, mid would be better off alone (test accuracy 0.")
    assert said["tiers behind local"].endswith("too few for models that travel; the default is --steps 800")


@pytest.mark.slow
def test_clients_that_are_alone_though_others_are_alike_are_told_to_share(advised):
    said, _ = advised(**ALIKE, baselines=(), regularization=1e-6, steps=60, epochs=1)
    assert said["alone"] == (
        "every client learns alone (1.0 effective partners), though groups of 2 have the same kind of data; try "
        "--share 0.7, or more --steps so that the warm-up can tell them apart"
    )


@pytest.mark.slow
def test_clients_that_share_with_everybody_are_told_to_share_less(advised):
    said, _ = advised(**ALIKE, baselines=("local",), share=1e6, steps=240, epochs=2)
    assert said["everybody"] == (
        "everybody learns from everybody, though the data are of 2 kinds: 0.50 of the weight is within clients' own "
        "groups, and equal weights would give 0.50; try --share 0.7, or a longer warm-up (--warmup-rounds)"
    )
    assert said["behind local"].endswith(
        "let clients share less (--share 0.7, or 0 for alone), or try a smaller --personal-lr"
    )


@pytest.mark.slow
def test_a_loss_that_rises_is_named_with_the_rate(advised):
    rates = {
        "personal_lr": 1.0,
        "global_lr": 0.01,
        "decay": "none",
        "rate_rule": "plain",
        "tail_average": 0.0,
        "early_report": 0.0,
    }
    few = ALIKE | {"samples_per_client": 6, "model_options": {"hidden": [64, 64]}}
    said, _ = advised(**few, **rates, baselines=(), steps=400, epochs=5)
    assert said["rising loss"].startswith("the test loss of perm rises from ")
    assert said["rising loss"].endswith("try a smaller --personal-lr (now 1), --decay linear, or fewer --steps")


@pytest.mark.slow
def test_tiers_that_learn_nothing_are_named(advised):
    said, _ = advised(**ALIKE, baselines=(), global_lr=1e-9, personal_lr=1e-9, steps=20, epochs=1)
    assert said["idle tier"].startswith("tier full learns nothing: 0.")
    assert "while always answering the most common class gives 0." in said["idle tier"]


# Boundaries, by hand


def evidence(**changes) -> Evidence:
    """A run that is well: perm at 0.8 and local at 0.7 on validation data, groups found, the loss falls."""
    rows = [{"epoch": r, "loss_mean": 1 / r} for r in (1, 2, 3, 4)]
    histories = {
        "perm": [*rows[:-1], {**rows[-1], "val_accuracy_mean": 0.79, "tail_val_accuracy_mean": 0.8}],
        "local": [{"epoch": 4, "val_accuracy_mean": 0.7}],
    }
    settings = {"steps": 800, "local_steps": 5, "personal_lr": 0.3, "share": "look-ahead"}
    well = Evidence(
        Summary.from_json(single()), histories, [{**row, "most_common": 0.2} for row in clients()], settings
    )
    return replace(well, **changes)


def kinds(run: Evidence) -> list[str]:
    return [name.rpartition(" ")[0] for name, _ in findings(run)]


def with_alpha(**figures) -> Summary:
    summary = Summary.from_json(single())
    return replace(summary, main=replace(summary.main, alpha=replace(summary.main.alpha, **figures)))


def test_nothing_is_said_of_a_run_that_is_well():
    assert kinds(evidence()) == []
    assert advice.lines([evidence()]) == []


def on_validation(ours: float, local: float) -> dict:
    histories = {"perm": [{"epoch": 1, "val_accuracy_mean": ours}], "local": [{"epoch": 1, "val_accuracy_mean": local}]}
    return {"histories": histories}


def test_level_with_local_is_not_behind():
    assert kinds(evidence(**on_validation(0.69, 0.7))) == []
    assert kinds(evidence(**on_validation(0.67, 0.7))) == ["behind local"]
    assert kinds(evidence(**on_validation(0.67, float("nan")))) == []  # no validation data


def test_of_a_metric_that_is_better_when_it_is_lower_the_higher_is_behind():
    lower = replace(Summary.from_json(single()), better="lower")
    assert kinds(evidence(summary=lower, **on_validation(0.67, 0.7))) == []
    assert kinds(evidence(summary=lower, **on_validation(0.7, 0.67))) == ["behind local"]


def test_a_tier_that_is_far_behind_local_is_named():
    def with_local(flagship: float) -> Summary:
        summary = Summary.from_json(single())  # perm has 0.902 in the tier flagship
        local = summary.baselines["local"]
        tiers = {**local.tiers, "flagship": replace(local.tiers["flagship"], score=flagship)}
        return replace(summary, baselines={"local": replace(local, tiers=tiers)})

    assert kinds(evidence(summary=with_local(0.99))) == []
    behind = evidence(summary=with_local(1.01))
    assert kinds(behind) == ["tiers behind local"]
    assert advice.lines([behind])[0].startswith(
        "tier flagship would be better off alone (test accuracy 0.902 against 1.010): "
    )
    assert kinds(replace(behind, **on_validation(0.6, 0.7))) == ["behind local"]  # which says it of all


def test_a_short_warm_up_matters_only_if_groups_are_mixed_or_clients_were_better_off_alone():
    short = {"settings": {"steps": 80, "local_steps": 5}}
    assert kinds(evidence(**short)) == []  # the groups were found all the same
    assert kinds(evidence(**short, summary=with_alpha(same_group_mass=0.9))) == ["short warm-up"]
    unknown = [{**row, "group": None} for row in clients()]
    assert kinds(evidence(**short, clients=unknown)) == []
    assert kinds(evidence(**short, clients=unknown, **on_validation(0.6, 0.7))) == ["short warm-up", "behind local"]


def test_groups_are_mixed_if_weights_are_as_by_chance():
    # groups of 4 and 2 of 6: by chance (16 + 4) / 36 = 0.556; a tenth of the way to 1 is 0.6
    assert kinds(evidence(summary=with_alpha(same_group_mass=0.59))) == ["everybody"]
    assert kinds(evidence(summary=with_alpha(same_group_mass=0.61))) == []
    one_group = [{**row, "group": 0} for row in clients()]
    assert kinds(evidence(summary=with_alpha(same_group_mass=0.59), clients=one_group)) == []


def test_alone_is_no_fault_if_it_was_asked_for():
    alone = with_alpha(effective_partners=1.2, same_group_mass=1.0)
    assert kinds(evidence(summary=alone)) == ["alone"]
    assert kinds(evidence(summary=alone, settings={"steps": 800, "share": 0.0})) == []


def test_a_loss_rises_if_it_ends_a_quarter_above_its_lowest():
    def ending(last: float) -> Evidence:
        rows = [{"epoch": r, "loss_mean": loss} for r, loss in enumerate((2.0, 1.0, last), start=1)]
        return evidence(histories={"perm": rows})

    assert kinds(ending(1.2)) == []
    assert kinds(ending(1.3)) == ["rising loss"]


def test_a_tier_is_compared_with_its_most_common_class():
    def of(share: float, n: int = 50) -> Evidence:
        return evidence(clients=[{**row, "most_common": share, "n_train": n} for row in clients()])

    assert kinds(of(0.75)) == []
    assert kinds(of(0.79)) == ["idle tier"]  # entry has 0.803, mid 0.85, flagship 0.90
    assert "tier entry learns nothing: 0.803" in advice.lines([of(0.79)])[0]
    assert kinds(of(0.79, n=10)) == []
    assert kinds(of(1.0)) == []  # one class only: there is nothing to learn


def test_seeds_that_agree_are_told_once():
    bad = evidence(**on_validation(0.6, 0.7))
    seeds = [replace(bad, summary=replace(bad.summary, seed=seed)) for seed in (3, 4)]
    assert [line[:40] for line in advice.lines(seeds)] == ["all 2 seeds: perm is behind local on val"]
    assert advice.lines([seeds[0], evidence()])[0].startswith("seed 3: perm is behind local")


def test_what_diverged_and_what_was_skipped_is_noted():
    summary = Summary.from_json(single())
    broken = replace(summary.baselines["local"], diverged="diverged at epoch 3")
    main = replace(summary.main, cost=replace(summary.main.cost, skipped=7))
    run = evidence(summary=replace(summary, main=main, baselines={"local": broken}))
    assert advice.notes(run) == [
        "local: diverged at epoch 3",
        "7 visits were skipped, because the host was away or too small",
    ]
