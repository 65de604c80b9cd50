"""leaf:PATH with texts: samples, alphabet, division by position, both layouts, and what is refused."""

import json
import random
import re

import pytest
import torch

from hetperm.data import load
from hetperm.data.text import LENGTH, Stretches, part_sizes

# Random texts: no two stretches of 80 characters are alike.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;"


def words(n, start=0):
    return "".join(random.Random(start).choices(LETTERS, k=n))


def read(path, **options):
    wanted = {"num_clients": 2, "partition": "natural", "seed": 0, **options}
    return load(f"leaf:{path}", **wanted)


@pytest.fixture
def roles(tmp_path):
    path = tmp_path / "plays.json"
    path.write_text(json.dumps({"Hamlet": words(700), "Ophelia": words(500, 9000), "A page": words(90)}))
    return path


def decoded(x, alphabet):
    return ["".join(alphabet[k] for k in row) for row in x.tolist()]


def test_a_sample_is_eighty_characters_and_the_next_one(roles):
    problem = read(roles)
    text = words(700)
    alphabet = sorted(set("".join(json.loads(roles.read_text()).values())))
    assert (problem.in_channels, problem.num_classes, problem.image_size) == (len(alphabet), len(alphabet), (LENGTH,))
    hamlet = problem.clients[0]
    x, y = hamlet.train
    assert x.dtype == y.dtype == torch.int64 and x.shape[1] == LENGTH
    for inputs, label in zip(decoded(x, alphabet), y.tolist()):
        assert text[text.index(inputs) + LENGTH] == alphabet[label]


def test_no_character_is_in_two_parts_of_a_text(roles):
    hamlet = read(roles, validation_share=0.2).clients[0]
    alphabet = sorted(set("".join(json.loads(roles.read_text()).values())))
    spans = []
    for part in (hamlet.train, hamlet.val, hamlet.test):
        starts = [words(700).index(inputs) for inputs in decoded(part[0], alphabet)]
        spans.append((min(starts), max(starts) + LENGTH))  # the last character is the label
    assert spans[0][0] == 0 and spans[2][1] == 699
    assert spans[0][1] < spans[1][0] and spans[1][1] < spans[2][0]


def test_sizes_by_hand():
    # 620 samples: 155 for testing, a gap of 80, and of the other 385 a fifth for validation, and a gap of 80.
    assert part_sizes(620, 0.2, 0.25, gap=80) == (385 - 77 - 80, 77, 155)
    assert part_sizes(620, 0.0, 0.25, gap=80) == (385, 0, 155)
    assert part_sizes(100, 0.2, 0.0, gap=80) == (100, 0, 0)


def test_roles_too_short_to_be_tested_are_left_out(roles):
    assert len(read(roles, num_clients=2).clients) == 2
    with pytest.raises(ValueError, match="3 clients are too many for the 2 users there are"):
        read(roles, num_clients=3)
    roles.write_text(json.dumps({"A page": words(90)}))
    message = f"leaf:{roles}: no text can be trained and tested on; it takes 293 characters"
    with pytest.raises(ValueError, match=re.escape(message)):
        read(roles)
    roles.write_text(json.dumps({"A page": words(292), "B": words(293)}))
    assert [client.n_train for client in read(roles, num_clients=1).clients] == [80]


def leaf_layout(texts):
    samples = {
        role: {
            "x": [text[k : k + LENGTH] for k in range(len(text) - LENGTH)],
            "y": list(text[LENGTH:]),
            "raw": text,
        }
        for role, text in texts.items()
    }
    counts = [len(one["y"]) for one in samples.values()]
    return {"users": list(samples), "num_samples": counts, "hierarchies": ["play"], "user_data": samples}


def same(pair, other):
    return (pair is None and other is None) or all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


def test_both_layouts_give_the_same_clients(roles, tmp_path):
    texts = {role: text for role, text in json.loads(roles.read_text()).items() if role != "A page"}
    roles.write_text(json.dumps(texts))
    folder = tmp_path / "leaf"
    folder.mkdir()
    (folder / "all_data_0.json").write_text(json.dumps(leaf_layout(texts)))
    for one, other in zip(read(roles).clients, read(folder).clients, strict=True):
        assert same(one.train, other.train) and same(one.val, other.val) and same(one.test, other.test)


def test_leafs_own_test_folder_is_kept(tmp_path):
    for part, size, start in (("train", 300, 0), ("test", 120, 5000)):
        (tmp_path / part).mkdir()
        content = leaf_layout({"Hamlet": words(size, start), "Page": words(size, 2 * start + 1)})
        (tmp_path / part / "data.json").write_text(json.dumps(content))
    problem = read(tmp_path, validation_share=0.0)
    assert [(client.n_train, client.n_val, len(client.test[1])) for client in problem.clients] == [(220, 0, 40)] * 2
    # Validation is by position too: the last of 220 samples, and the gap before them.
    assert [client.n_val for client in read(tmp_path, validation_share=0.2).clients] == [44, 44]


def test_a_role_that_comes_twice_is_refused(tmp_path):
    (tmp_path / "plays.json").write_text('{"HAMLET": "To be", "GHOST": "I am", "HAMLET": "or not to be"}')
    with pytest.raises(ValueError, match=r"plays.json is not LEAF json \('HAMLET' comes twice\)"):
        load(f"leaf:{tmp_path / 'plays.json'}", num_clients=2, partition="natural", seed=0)


def test_images_and_texts_do_not_mix(tmp_path):
    images = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.0] * 4], "y": [0]}}}
    for part, content in (("train", leaf_layout({"H": words(300)})), ("test", images)):
        (tmp_path / part).mkdir()
        (tmp_path / part / "data.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="one of train and test holds texts and the other images"):
        read(tmp_path)


def test_texts_are_neither_resized_nor_turned_but_can_be_pooled(roles):
    with pytest.raises(ValueError, match="consists of texts; image_size 8 has no meaning"):
        read(roles, image_size=8)
    with pytest.raises(ValueError, match="consists of texts, which cannot be turned"):
        read(roles, partition="rotation:2")
    pooled = read(roles, partition="iid", num_clients=3)
    assert len(pooled.clients) == 3 and pooled.clients[0].train[0].dtype == torch.int64


def test_stretches_are_cut_out_when_asked_for():
    text = Stretches(torch.arange(9, dtype=torch.int16), torch.tensor([0, 4, 5]), 3)
    assert text.shape == (3, 3)
    assert text[torch.tensor([2, 0])].decode().tolist() == [[5, 6, 7], [0, 1, 2]]


# Fewer samples to be scored on


def test_scored_samples_can_be_limited_and_those_of_training_stay(roles):
    whole, few = read(roles), read(roles, max_test_samples=10)
    for one, other in zip(whole.clients, few.clients, strict=True):
        assert same(one.train, other.train)
        assert len(other.test[1]) == 10 and other.n_val == min(10, one.n_val)
        inputs = {tuple(row) for row in one.test[0].tolist()}
        assert all([tuple(row) in inputs for row in other.test[0].tolist()])
    again = read(roles, max_test_samples=10)
    assert all([same(one.test, other.test) for one, other in zip(few.clients, again.clients)])
    other_seed = load(f"leaf:{roles}", num_clients=2, partition="natural", seed=1, max_test_samples=10)
    assert not all([same(one.test, other.test) for one, other in zip(few.clients, other_seed.clients)])


def test_a_limit_above_what_there_is_changes_nothing():
    options = {"num_clients": 3, "partition": "classes:2", "seed": 0}
    whole, capped = load("digits", **options), load("digits", **options, max_test_samples=10**6)
    assert all([same(one.test, other.test) for one, other in zip(whole.clients, capped.clients)])
    few = load("digits", **options, max_test_samples=7)
    assert [len(client.test[1]) for client in few.clients] == [7, 7, 7]
    with pytest.raises(ValueError, match="max_test_samples is 0; it must be a whole number of at least 1"):
        load("digits", **options, max_test_samples=0)
