"""verify: right maps are found exact, wrong ones are found out."""

import copy
from dataclasses import dataclass, replace

import modules
import pytest
import torch
from reference import slicing_loops as loops
from torch import nn

from submodels import ChannelGroup, Random, Rolling, ScalableModel, Static
from submodels.terms import Fixed, Group, Product
from submodels.verify import Comparison, Report, verify


def _scalable(build, **options):
    torch.manual_seed(0)
    return ScalableModel(build(), torch.zeros(modules.IMAGE), **options)


def _with(scalable, *, attributes=None, groups=(), **dims):
    """The same model under a map in which some axes are said to be something else; ``a__b`` stands for ``a.b``."""
    axis_map = scalable.axis_map
    changed = {name.replace("__", "."): tuple(terms) for name, terms in dims.items()}
    assert changed.keys() <= axis_map.dims.keys()
    other = copy.copy(scalable)
    other.axis_map = replace(
        axis_map,
        dims={**axis_map.dims, **changed},
        groups=(*axis_map.groups, *groups),
        attributes=axis_map.attributes if attributes is None else attributes,
    )
    return other


def _detected(scalable):
    """True if verify raises or reports that the sub-models are not exact."""
    try:
        return not scalable.verify().exact
    except RuntimeError:
        return True


# Wrong maps


def _stranger(scalable, like):
    """A new group of the size of another: the same channels, cut on their own."""
    size = scalable.sizes[like.id]
    return ChannelGroup(len(scalable.sizes), size), Group(len(scalable.sizes))


def test_a_residual_branch_that_is_not_aligned_with_its_stream_is_found_out():
    # What FedRolex's random extraction does to every identity shortcut: channel 3 is added to channel 41.
    right = _scalable(modules.SqueezeExcite)
    dims = right.axis_map.dims
    group, term = _stranger(right, dims["conv2.weight"][0])
    wrong = _with(right, groups=[group], conv2__weight=(term, *dims["conv2.weight"][1:]), conv2__bias=(term,))
    assert right.verify().exact
    assert _detected(wrong)


def test_a_norm_that_is_not_coupled_to_its_convolution_is_found_out():
    right = _scalable(modules.SqueezeExcite)
    dims = right.axis_map.dims
    group, term = _stranger(right, dims["norm.weight"][0])
    names = ("weight", "bias", "running_mean", "running_var")
    assert _detected(_with(right, groups=[group], **{f"norm__{name}": (term,) for name in names}))


def test_columns_that_are_not_coupled_to_the_rows_before_them_are_found_out():
    right = _scalable(modules.ConvFlattenLinear)
    dims = right.axis_map.dims
    group, term = _stranger(right, dims["conv2.weight"][1])
    assert _detected(_with(right, groups=[group], conv2__weight=(dims["conv2.weight"][0], term, Fixed(3), Fixed(3))))


@dataclass(frozen=True)
class _Shifted:
    """A term whose positions are all one place too far."""

    term: Product

    def size(self, counts):
        return self.term.size(counts)

    def groups(self):
        return self.term.groups()

    def index(self, kept, sizes):
        return (self.term.index(kept, sizes) + 1) % self.term.size(sizes)


def test_query_key_and_value_shifted_by_one_row_are_found_out():
    right = _scalable(modules.EinopsAttention)
    rows, columns = right.axis_map.dims["qkv.0.weight"]
    assert _detected(_with(right, qkv__0__weight=(_Shifted(rows), columns)))


def test_heads_taken_for_the_slowest_factor_are_found_out():
    right = _scalable(modules.EinopsAttention)
    rows, columns = right.axis_map.dims["qkv.0.weight"]
    three, heads, inner = rows.parts
    assert (three, inner) == (Fixed(3), Fixed(8))
    assert _detected(_with(right, qkv__0__weight=(Product((heads, three, inner)), columns)))


def test_channels_and_pixels_that_change_places_in_a_flatten_are_found_out():
    right = _scalable(modules.ConvFlattenLinear)
    rows, columns = right.axis_map.dims["fc1.weight"]
    assert _detected(_with(right, fc1__weight=(rows, Product(tuple(reversed(columns.parts))))))


def test_a_concatenation_in_the_wrong_order_is_found_out():
    right = _scalable(modules.DenselyConnected)
    rows, columns, *kernel = right.axis_map.dims["convs.2.weight"]
    first, second, third = columns.parts
    assert _detected(_with(right, convs__2__weight=(rows, type(columns)((first, third, second)), *kernel)))


def test_a_number_of_heads_that_does_not_shrink_is_found_out():
    right = _scalable(modules.EinopsAttention)
    attributes = {k: v for k, v in right.axis_map.attributes.items() if k[1] != "heads"}
    assert len(attributes) < len(right.axis_map.attributes)
    assert _detected(_with(right, attributes=attributes))


def test_a_bias_that_is_not_cut_with_its_weight_is_found_out():
    assert _detected(_with(_scalable(modules.SqueezeExcite), conv2__bias=(Fixed(16),)))


def test_a_model_that_starts_at_zero_hides_nothing():
    right = _scalable(modules.SqueezeExcite)
    with torch.no_grad():
        for parameter in right.model.parameters():
            parameter.zero_()
    rows, columns, *kernel = right.axis_map.dims["conv2.weight"]
    group, term = _stranger(right, rows)
    assert _detected(_with(right, groups=[group], conv2__weight=(term, columns, *kernel), conv2__bias=(term,)))


def test_the_error_names_the_model_and_the_remedy():
    right = _scalable(modules.EinopsAttention)
    rows, columns = right.axis_map.dims["qkv.0.weight"]
    with pytest.raises(RuntimeError, match=r"EinopsAttention differ .* declare="):
        _with(right, qkv__0__weight=(_Shifted(rows), columns)).verify()


def test_an_operation_that_takes_a_missing_channel_for_something_else_than_zero_is_found_out():
    class Exponential(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x):
            h = self.up(x).exp()
            return self.head(h) + h.sum(-1, keepdim=True)  # exp(0) = 1 counts

    with pytest.raises(RuntimeError, match="no operation explains it"):
        ScalableModel(Exponential(), torch.zeros(2, 4)).verify()


# Values that are not finite


def test_an_output_that_is_not_finite_is_an_error_not_a_pass():
    class Logarithm(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(4, 16), nn.Linear(16, 30)

        def forward(self, x):
            return self.head(self.up(x)).log()

    with pytest.raises(RuntimeError, match=r"output is not finite"):
        ScalableModel(Logarithm(), torch.zeros(2, 4)).verify()


def test_a_gradient_that_is_not_finite_is_an_error_not_a_pass():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.up(self.first(x)).abs().sqrt())  # finite, but its slope at zero is not

    with pytest.raises(RuntimeError, match=r"gradient of \S+ is not finite"):
        ScalableModel(Root(), torch.zeros(2, 4)).verify()


class _CountsBackward(torch.autograd.Function):
    """The identity with a gradient that counts channels: right going forward, wrong going back."""

    @staticmethod
    def forward(ctx, x):
        ctx.channels = x.shape[-1]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.channels


@pytest.mark.parametrize(
    "activation", [torch.tanh, lambda x: x.abs().sqrt()], ids=["smooth", "no slope at dropped channels"]
)
def test_an_error_in_a_gradient_alone_is_found_out(activation):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(_CountsBackward.apply(activation(self.up(x))))

    assert _detected(ScalableModel(Counting(), torch.zeros(2, 4)))


# Right maps


# Every module with one extractor, and every extractor without neutralised norms, are in test_models.py.
@pytest.mark.parametrize("build", [modules.TransformerEncoder, modules.DenselyConnected])
def test_a_right_map_is_exact_for_every_extractor(build):
    for extractor in (Static(), Rolling(), Random(5)):
        assert verify(modules.traced(build), (0.25, 0.7), extractor).exact


def test_an_operation_that_counts_its_channels_is_named_in_the_report():
    class Loudest(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(4, 16), nn.Linear(1, 3)

        def forward(self, x):
            return self.head(self.up(x).amax(-1, keepdim=True))

    report = ScalableModel(Loudest(), torch.zeros(64, 4)).verify()
    assert not report.exact
    assert report.explained_by == ("amax",)
    assert "the differences come from amax" in str(report)
    assert report.comparisons[-1].exact  # at full width nothing is missing


def test_a_report_holds_a_comparison_per_width():
    scalable = _scalable(modules.SqueezeExcite)
    report = scalable.verify((0.125, 1.0))
    assert [c.width for c in report.comparisons] == [0.125, 1.0]
    assert [c.share for c in report.comparisons] == [scalable.axis_map.share(0.125), 1.0]
    assert all(c.round_trip for c in report.comparisons)


def test_a_report_prints_as_a_table():
    exact = Comparison(0.5, forward=1e-16, gradient=2e-15, share=0.25, round_trip=True)
    assert str(Report((exact,), ())) == (
        "width  share  forward error  gradient error  round trip\n0.5    0.250  1.0e-16        2.0e-15         True"
    )
    wrong = Comparison(0.25, forward=0.1, gradient=0.2, share=0.0625, round_trip=True)
    assert str(Report((exact, wrong), ("amax", "topk"))).splitlines()[2:] == [
        "0.25   0.062  1.0e-01        2.0e-01         True",
        "the differences come from amax, topk, which count their channels",
    ]


@pytest.mark.parametrize(
    "flaw", [{"forward": 2e-7}, {"gradient": 2e-6}, {"round_trip": False}], ids=["forward", "gradient", "round trip"]
)
def test_exact_means_to_ten_to_the_minus_seven_in_every_respect(flaw):
    good = Comparison(0.5, forward=0.9e-7, gradient=0.9e-6, share=0.3, round_trip=True)
    assert good.exact
    assert not replace(good, **flaw).exact
    assert not Report((good, replace(good, **flaw)), ()).exact


def test_verify_leaves_model_gradients_and_global_generator_alone():
    scalable = _scalable(modules.DenselyConnected)
    scalable.model.train()
    before, state = copy.deepcopy(scalable.model.state_dict()), torch.get_rng_state()
    scalable.verify()
    after = scalable.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), state)
    assert scalable.model.training
    assert all(p.grad is None for p in scalable.model.parameters())


def test_verify_gives_the_same_report_twice():
    scalable = _scalable(modules.LayerScale)
    assert scalable.verify() == scalable.verify()


def test_norms_over_channels_are_neutralised_and_would_differ_if_they_were_not():
    scalable = _scalable(modules.LayerScale)
    model = loops.enliven(scalable.model).double()
    assert scalable.verify().exact
    sub = scalable.extract(0.5)
    x = torch.randn(modules.IMAGE, dtype=torch.float64)
    assert (sub.module(x) - loops.masked(model, sub.index)(x)).abs().max() > 1e-3


def test_a_batch_of_one_is_enough_of_an_example():
    torch.manual_seed(0)
    assert ScalableModel(modules.SqueezeExcite(), torch.zeros(1, 3, 16, 16)).verify().exact


def test_a_model_in_half_precision_is_verified_in_double():
    torch.manual_seed(0)
    model = modules.SqueezeExcite().to(torch.bfloat16)
    assert ScalableModel(model, torch.zeros(modules.IMAGE, dtype=torch.bfloat16)).verify().exact


def test_a_model_that_has_run_before_and_kept_a_tensor_is_verified_in_double_too():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head, self.basis = nn.Linear(4, 16), nn.Linear(16, 3), None

        def forward(self, x):
            if self.basis is None:
                self.basis = torch.eye(4, dtype=x.dtype, device=x.device)
            return self.head(self.up(x @ self.basis))

    model = Caching()
    model(torch.zeros(2, 4))
    assert ScalableModel(model, torch.zeros(2, 4)).verify().exact
    assert model.basis.dtype == torch.float32
