"""Settings: clients with widths, the model of the seed, what methods of one size see, and what cannot be set up."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetperm import Client, Config, fit, profile
from hetperm.runs import setting
from hetperm.runs.setting import from_config, from_model

TINY = Config(num_clients=6, capacity_profile="uniform5", samples_per_client=30, model_options={"hidden": [16, 16]})


def shards(widths=(1.0,), n: int = 6, **changes) -> list[Client]:
    x = torch.linspace(-1, 1, 3 * n).reshape(n, 3)
    return [Client((x, torch.arange(n) % 2), width=width, **changes) for width in widths]


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def own(model: nn.Module, clients: list[Client], **changes) -> setting.Setting:
    return from_model(model, clients, Config(**changes), loss=None, metric=None)


# From a configuration


@pytest.fixture(scope="module")
def five_sizes() -> setting.Setting:
    return from_config(TINY)


def test_every_client_has_the_width_of_its_tier_and_training_data_of_its_own(five_sizes):
    widths = {tier.name: tier.width for tier in profile.load("uniform5").tiers}
    assert [client.width for client in five_sizes.clients] == [widths[tier] for tier in five_sizes.tiers]
    assert five_sizes.tier_names == list("abcde")  # the largest first
    assert [client.n_train for client in five_sizes.clients] == [30] * 6
    assert [client.key for client in five_sizes.clients] == list(range(6))
    assert [row["clients"] for row in five_sizes.profile] == [five_sizes.tiers.count(tier) for tier in "abcde"]


def test_the_seed_decides_the_model_and_leaves_the_global_generator_alone(five_sizes):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again, other = (from_config(TINY.override(seed=seed)) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again.start["fc1.weight"], five_sizes.start["fc1.weight"])
    assert not torch.equal(other.start["fc1.weight"], five_sizes.start["fc1.weight"])


def test_a_tier_that_holds_more_than_its_budget_is_named(five_sizes, caplog):
    row = five_sizes.profile[0]
    assert five_sizes.warnings == ()
    for share, said in [(1.01, 0), (0.99, 1)]:
        caplog.clear()
        limits = {"train_mb": share * row["train_mb"], "mmacs": share * row["mmacs"]}
        limits["wire_mb"] = share * row["wire_mb_per_visit"] / 2  # one way
        tiers = profile.Profile("mine", "", (profile.Tier("a", 1, 1.0, **limits),))
        found = from_config(TINY, tiers)
        assert len(found.warnings) == 3 * said and list(found.warnings) == caplog.messages
    needs, budget = f"{row['train_mb']:.4g}", f"{limits['train_mb']:g}"
    said, remedy = f"train_mb than its budget: {needs} of {budget} at width 1", "; --widths-from budget finds what fits"
    assert found.warnings[0] == f"tier a needs more {said}{remedy}"
    both = [{**found.profile[0], "tier": name} for name in "ab"]
    assert profile.over_budget(both)[0] == f"tier a needs more {said} (and 1 others){remedy}"


def test_clients_whom_a_trace_never_lets_in_are_named(tmp_path, caplog):
    file = tmp_path / "trace.toml"
    for texts, said in [(["10", "00", "01", "00"], True), (["10", "01"], False)]:
        caplog.clear()
        file.write_text(f"clients = {texts}")
        from_config(TINY.override(trace=str(file)))
        named = "client 1 is away in every round of the trace (3 such clients): nothing is trained on its data"
        assert any([message.startswith(named) for message in caplog.messages]) == said
        assert said or caplog.messages == []


def test_a_profile_can_be_given_instead_of_the_one_that_is_named():
    tiers = profile.Profile("mine", "", (profile.Tier("half", 1, 0.5),))
    given = from_config(TINY, tiers)
    assert {client.width for client in given.clients} == {0.5}
    assert set(given.tiers) == {"half"}


def test_widths_from_budgets_are_the_largest_that_fit():
    limits = {"rich": (0.125, 1000), "fair": (0.5, 0.2), "poor": (0.25, 0.1), "whole": (1.0, 1000)}
    tiers = tuple(profile.Tier(name, 1, width, train_mb=limit) for name, (width, limit) in limits.items())
    solved = from_config(TINY.override(widths_from="budget", model_options={}), profile.Profile("four", "", tiers))
    grid = (0.125, 0.25, 0.5, 1.0)
    need = {width: solved.shop.scalable.cost(width, batch_size=32).train_bytes / 2**20 for width in grid}
    best = {name: max(width for width in grid if need[width] <= limit) for name, (_, limit) in limits.items()}
    assert best["rich"] == 1.0 > best["fair"]  # whatever the profile lists for them
    assert {row["tier"]: row["width"] for row in solved.profile} == best
    assert [client.width for client in solved.clients] == [best[tier] for tier in solved.tiers]


# Methods of one size


def test_methods_of_one_size_and_the_smallest_personal_models_have_the_width_of_the_smallest_client(five_sizes):
    widths = [client.width for client in five_sizes.clients]
    assert five_sizes.model_widths("perm") == five_sizes.model_widths("heterofl") == widths
    assert five_sizes.model_widths("fedavg") == [0.0625] * 6
    smallest = replace(five_sizes, config=TINY.override(personal_width="smallest"))
    assert smallest.model_widths("perm") == [0.0625] * 6
    assert smallest.model_widths("local") == widths


def test_a_setting_of_one_size_has_one_model_that_everybody_holds_whole(five_sizes):
    one = five_sizes.one_size()
    assert {client.width for client in one.clients} == {1.0}
    assert {name: tuple(x.shape) for name, x in one.start.items()}["fc1.weight"] == (1, 64)
    assert sum(x.numel() for x in one.start.values()) == five_sizes.num_params(0.0625)
    assert one.shop.scalable is None
    assert {name: x.shape for name, x in one.shop.full.take().items()} == {n: x.shape for n, x in one.start.items()}


# Label masks


def test_a_label_mask_keeps_clients_to_the_classes_they_train_on():
    clients = [replace(client, train=(client.train[0], client.train[1] + i)) for i, client in enumerate(shards((1, 1)))]
    plain, masked = (own(nn.Linear(3, 4), clients, label_mask=mask) for mask in (False, True))
    assert [client.classes for client in plain.clients] == [None, None]
    assert [client.classes.nonzero().flatten().tolist() for client in masked.clients] == [[0, 1], [1, 2]]
    assert (plain.heads, masked.heads) == ((), ("weight", "bias"))
    assert masked.one_size().heads == masked.masked().heads == plain.masked().heads == ("weight", "bias")
    assert all(torch.equal(a.classes, b.classes) for a, b in zip(plain.masked().clients, masked.clients, strict=True))
    with pytest.raises(ValueError, match="client 1: its labels hold 2 and the model has 2 outputs"):
        own(nn.Linear(3, 2), clients, label_mask=True)


# One's own model


def test_a_tier_of_ones_own_clients_is_a_width_and_the_model_is_copied():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    mine = own(model, shards((1.0, 0.25, 0.25)), dtype="float64")
    assert mine.tiers == ("1", "0.25", "0.25")
    assert mine.clients[1].train[0].dtype == mine.start["0.weight"].dtype == torch.float64
    assert model[0].weight.dtype == torch.float32
    assert mine.architecture == {"class": "torch.nn.modules.container.Sequential"}


def test_widths_of_ones_own_clients_that_leave_parts_untrained_or_cannot_be_met_are_named(caplog):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    assert own(model, shards((1.0, 0.25))).warnings == () and caplog.text == ""
    odd = own(model, shards((0.5, 1e-6))).warnings
    assert [sentence in caplog.text for sentence in odd] == [True, True]
    assert odd[0].startswith("the largest width of a client is 0.5 and static extraction always keeps the first")
    assert odd[1].startswith("width 1e-06 keeps 1 of 8 channels (c0): share ")


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"sketch": 25}, None),
        ({"sketch": 26}, 26),  # of width 0.25, that of the smaller client: 4 channels
        ({"sketch": 97, "discrepancy": "masked"}, None),
        ({"sketch": 98, "discrepancy": "masked"}, 98),
        ({"sketch": 98, "algorithm": "fedavg"}, None),
    ],
)  # fmt: skip
def test_a_sketch_that_is_no_smaller_than_gradients_is_named(changes, numbers, caplog):
    own(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)), shards((1.0, 0.25)), **changes)
    said = f"sketch {changes['sketch']} is no smaller than the gradients that clients compare, of {numbers} numbers"
    assert (said in caplog.text) if numbers else not caplog.text


# What cannot be set up

IGNORED = Client((torch.zeros(4, 3), torch.full((4,), -100)))

REFUSED = {
    "a model that cannot be cut needs clients of width 1": (nn.Linear(3, 2), shards((1.0, 0.5)), {}),
    "clients 0 and 1 have the same key 7; keys tell clients apart": (nn.Linear(3, 2), shards((1, 1), key=7), {}),
    "client 1: a client with 1 sample cannot train BatchNorm": (with_norm(), shards() + shards(n=1), {}),
    "batches of 1 sample cannot train BatchNorm; set batch_size": (with_norm(), shards(), {"batch_size": 1}),
    "no client has 2 samples, so the noise of their gradients": (nn.Linear(3, 2), shards(n=1), {}),
    "no client has 4 samples, so the noise of their gradients": (with_norm(), shards(n=3), {}),
    "client 1: all its labels are -100, which cross-entropy leaves out": (nn.Linear(3, 2), [*shards(), IGNORED], {}),
    "the model has no parameters to train; set requires_grad on some": (nn.Flatten(), shards(), {}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_clients_and_models_that_cannot_be_trained_are_refused(sentence):
    model, clients, changes = REFUSED[sentence]
    with pytest.raises(ValueError, match=sentence):
        own(model, clients, **changes)


@pytest.mark.parametrize(
    ("model", "option", "advice"),
    [
        ("mlp", "hiden", "did you mean 'hidden'?"),
        ("mlp", "depth", "it takes hidden"),
        ("cnn", "depth", "it takes none"),
    ],
)
def test_options_that_the_model_does_not_take_are_refused_with_those_it_takes(model, option, advice):
    with pytest.raises(
        ValueError, match=rf"model '{model}' does not take these model_options \(.* has no argument '{option}'\); "
    ) as caught:
        from_config(TINY.override(model=model, model_options={option: 3}))
    assert str(caught.value).endswith(f"; {advice}")


def test_options_that_the_data_decide_are_refused():
    with pytest.raises(ValueError, match=r"^model_options holds num_classes, which the data decide; leave it out$"):
        from_config(TINY.override(model_options={"num_classes": 3}))


@pytest.mark.parametrize("options", [{"hidden": [5]}, {"hidden": ["a", "b"]}, {"hidden": 3}, {"hidden": {}}], ids=str)
def test_options_that_the_model_cannot_be_built_with_are_refused(options):
    with pytest.raises(ValueError, match="model_options"):
        from_config(TINY.override(model_options=options))


def test_a_mask_that_leaves_every_client_one_answer_is_said_to_teach_nothing(caplog):
    x = torch.rand(4, 3)
    pairs = [(x, torch.full((4,), label)) for label in (0, 1)]
    own(nn.Linear(3, 2), [Client(pair) for pair in pairs], label_mask=True)
    assert "each client can only answer its one class: every model is right untrained" in caplog.text
    caplog.clear()
    pairs[1] = (x, torch.tensor([0, 1, 0, 1]))
    own(nn.Linear(3, 2), [Client(pair) for pair in pairs], label_mask=True)
    assert caplog.text == ""


def test_a_single_class_is_said_to_teach_nothing(caplog):
    own(nn.Linear(3, 2), [Client((torch.zeros(4, 3), torch.ones(4, dtype=torch.long)))])
    assert "all training samples are of class 1: models learn nothing but to give this answer" in caplog.text


def test_a_single_class_to_learn_from_is_not_said_to_be_right_where_others_are_tested(caplog):
    x = torch.rand(4, 3)
    own(nn.Linear(3, 2), [Client((x, torch.zeros(4).long()), test=(x, torch.tensor([0, 1, 0, 1])))])
    assert "all training samples are of class 0: no model learns the others that are tested" in caplog.text


def test_samples_that_are_all_the_same_are_said_to_teach_nothing(caplog):
    y = torch.tensor([0, 1, 0, 1])
    own(nn.Linear(3, 2), [Client((torch.ones(4, 3), y)), Client((torch.ones(4, 3), y))])
    assert "all training samples are the same: nothing can be learned from them" in caplog.text
    caplog.clear()
    own(nn.Linear(3, 2), [Client((torch.ones(4, 3), y)), Client((torch.tensor([[1.0, 1.0, 2.0]]).expand(4, 3), y))])
    assert caplog.text == ""


def test_labels_that_a_loss_leaves_out_and_accuracy_does_not_are_refused():
    y = torch.arange(6) % 2
    clients = [Client((torch.rand(6, 3), y), test=(torch.rand(6, 3), y.masked_fill(y == 1, 255)))]
    loss = partial(F.cross_entropy, ignore_index=255)
    with pytest.raises(ValueError, match="client 0: its test labels hold 255 and the model has 2 outputs; leave such"):
        fit(nn.Linear(3, 2), clients, Config(steps=20), loss=loss)
