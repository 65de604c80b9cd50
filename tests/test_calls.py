"""Examples as people have them: several, dicts, lists, compiled modules; and what is kept whole of an answer."""

import logging
from collections import UserDict

import pytest
import torch
from torch import nn

from submodels import AxisMap, ScalableModel
from submodels.calls import Call, examples_of

torch.set_num_threads(1)

X = torch.zeros(4, 12)


class Tasks(nn.Module):
    """A trunk and a head for each of two tasks."""

    def __init__(self):
        super().__init__()
        self.trunk, self.heads = nn.Linear(12, 32), nn.ModuleDict({"a": nn.Linear(32, 3), "b": nn.Linear(32, 5)})

    def forward(self, x, task="a"):
        return self.heads[task](self.trunk(x).relu())


def test_parameters_that_no_example_runs_are_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        scalable = ScalableModel(Tasks(), X)
    (note,) = scalable.axis_map.notes
    assert note.startswith("no example runs heads.b.weight, heads.b.bias: they stay whole") and "examples=" in note
    assert note in caplog.text
    assert scalable.axis_map.frozen_by["heads.b.weight", 1] == "not used in the traced run"


@pytest.mark.parametrize("second", [((X,), {"task": "b"}), {"x": X, "task": "b"}, (X, "b"), Call((X, "b"))])
def test_several_examples_cut_what_each_of_them_runs(second):
    scalable = ScalableModel(Tasks(), X, examples=[second])
    assert scalable.axis_map.notes == () and scalable.sizes == (32,)
    sub = scalable.extract(0.5).module
    assert sub(X).shape == (4, 3) and sub(X, task="b").shape == (4, 5)
    assert scalable.verify().exact


def test_examples_may_be_given_alone():
    assert ScalableModel(Tasks(), examples=[X, (X, "b")]).sizes == (32,)
    with pytest.raises(ValueError, match="cannot be traced without an example"):
        ScalableModel(Tasks())


def test_an_error_in_the_second_example_is_found_by_verify():
    class Hidden(Tasks):
        def forward(self, x, task="a"):
            x = self.trunk(x).relu()
            if task == "b":
                x = x.amax(1, keepdim=True) - x  # a maximum counts a missing channel otherwise than a zero one
            return self.heads[task](x)

    report = ScalableModel(Hidden(), X, examples=[(X, "b")]).verify([0.5])
    assert report.explained_by == ("amax",)


class Keyword(nn.Module):
    """Takes its tensors by name, as language models do."""

    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.out = nn.Embedding(9, 16), nn.Linear(16, 24), nn.Linear(24, 2)

    def forward(self, input_ids=None, attention_mask=None):
        x = self.embed(input_ids) * attention_mask[..., None]
        return {"logits": self.out(self.mid(x).relu().sum(1))}


BATCH = {"input_ids": torch.randint(0, 9, (2, 5)), "attention_mask": torch.ones(2, 5)}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"example_inputs": BATCH}, id="a dict"),
        pytest.param({"example_inputs": UserDict(BATCH)}, id="a BatchEncoding is a UserDict"),
        pytest.param({"example_kwargs": BATCH}, id="keywords only"),
        pytest.param({"example_inputs": (), "example_kwargs": BATCH}, id="an empty tuple and keywords"),
        pytest.param({"example_inputs": tuple(BATCH.values())}, id="a tuple"),
        pytest.param({"example_inputs": list(BATCH.values())}, id="a list of arguments"),
    ],
)
def test_inputs_are_taken_as_people_have_them(given):
    scalable = ScalableModel(Keyword(), **given)
    assert sorted(scalable.sizes) == [16, 24]
    assert scalable.verify([0.5]).exact and scalable.cost(0.5, batch_size=3).params > 0
    assert AxisMap.trace(Keyword(), **given).sizes == scalable.sizes


class TakesAList(nn.Module):
    """A detector's way: a list of images, of any number and size."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, images):
        return [self.head(self.conv(image[None]).mean((2, 3))) for image in images]


def test_a_list_is_one_argument_where_the_model_takes_it_so():
    images = [torch.randn(3, 8, 8), torch.randn(3, 9, 7)]
    scalable = ScalableModel(TakesAList(), images)
    assert scalable.sizes == (8,) and scalable.verify([0.5]).exact
    assert examples_of(TakesAList(), images).calls[0].args[0] is images


def test_a_compiled_module_is_unwrapped():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    scalable = ScalableModel(torch.compile(model), torch.zeros(2, 4))
    assert scalable.model is model and scalable.sizes == (8,)


def test_the_tensors_of_a_compiled_module_are_asked_for_by_the_names_of_what_was_wrapped():
    axis_map = ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 4)).axis_map
    assert axis_map.shape("0.weight", (4,)) == (4, 4)
    with pytest.raises(ValueError, match=r"^'_orig_mod\.0\.weight' is of a model that torch\.compile made; give"):
        axis_map.shape("_orig_mod.0.weight", (4,))
    with pytest.raises(ValueError, match=r"^this model has no tensor '_orig_mod\.1\.weight'"):
        axis_map.shape("_orig_mod.1.weight", (4,))


def test_an_argument_that_the_forward_does_not_take_is_named():
    with pytest.raises(ValueError, match=r"\(TypeError: .*forward\(\) takes no argument 'mask'\); give example_inputs"):
        ScalableModel(Tasks(), X, {"mask": 1})


class Opaque(nn.Module):
    """Returns a function that gives the logits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        logits = self.layers(x)
        return lambda: logits


def test_an_answer_without_a_tensor_is_refused_with_the_remedy_and_the_remedy_helps():
    with pytest.raises(ValueError, match=r"^the model returns <function .* holds no tensor") as refused:
        ScalableModel(Opaque(), torch.zeros(2, 4))
    assert str(refused.value).endswith("; say with outputs= where it is, such as outputs=lambda out: out.logits")
    assert ScalableModel(Opaque(), torch.zeros(2, 4), outputs=lambda out: out()).sizes == (8,)
    with pytest.raises(ValueError, match=r"^outputs= gives 3, which holds no tensor .*; it must give a tensor of"):
        ScalableModel(Opaque(), torch.zeros(2, 4), outputs=lambda out: 3)


def test_what_cannot_be_traced_at_all_is_refused_with_the_remedy():
    class Scripted(torch.jit.ScriptModule):
        pass

    with pytest.raises(TypeError, match=r"torch\.jit.*give the module it came from"):
        ScalableModel(Scripted(), X)
    with pytest.raises(TypeError, match=r"^'1' of Sequential was compiled by torch\.jit"):
        ScalableModel(nn.Sequential(nn.Linear(12, 4), Scripted()), X)
    with pytest.raises(ValueError, match=r"'0\.weight' of Sequential has no size yet; run the model once"):
        ScalableModel(nn.Sequential(nn.LazyLinear(4)), X)
