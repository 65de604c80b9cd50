"""What users hand to the functions of mixing and of the schedule is checked at the border, in one sentence."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hetperm import complexity, discrepancy, mixing, shuffle
from hetperm.mixing import simplex
from submodels import ScalableModel

ZETA = torch.tensor([[0.0, 2.0, 9.0], [2.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
Q, N = torch.ones(3), torch.tensor([10, 30, 30])
ALPHA = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
GENERATOR = torch.Generator()
SOME = torch.tensor([1.0, math.nan, 1.0])

# Functions of one tensor, the others being right
OF_A_TENSOR = {
    "sparse": mixing.sparse,
    "rows_of": mixing.rows_of,
    "effective_partners": mixing.effective_partners,
    "nonzero": mixing.nonzero,
    "self_weight": mixing.self_weight,
    "same_group_mass": lambda x: mixing.same_group_mass(x, "aab"),
    "solve": lambda x: mixing.solve(x, torch.ones(3), 1.0),
    "descend": lambda x: mixing.descend(x, torch.ones(3), 1.0, 2),
    "noise": lambda x: mixing.noise(x, Q, N),
    "level": lambda x: mixing.level(x, Q, N),
    "weights": lambda x: mixing.weights(x, Q, N),
    "weights_of": lambda x: mixing.weights_of([0], x, Q, N),
    "sparse_weights": lambda x: mixing.sparse_weights(x, Q, N),
    "spread of alpha": lambda x: mixing.spread(x, ZETA, Q),
    "spread of zeta": lambda x: mixing.spread(ALPHA, x, Q),
    "project": simplex.project,
    "schedule": lambda x: shuffle.schedule(x, GENERATOR),
    "rounds_of": shuffle.rounds_of,
    "pairwise": discrepancy.pairwise,
    "Distances": discrepancy.Distances,
    "reordered": lambda x: discrepancy.reordered(x, torch.arange(3)),
    "an order": lambda x: discrepancy.reordered(ZETA, x),
    "sketch": discrepancy.sketch,
    "noise of gradients": discrepancy.noise,
    "mean_and_noise": lambda x: discrepancy.mean_and_noise([x], [1]),
    "fill_noise": lambda x: discrepancy.fill_noise(x, N),
}
NO_TENSORS = {
    "None": None,
    "a number": 2.5,
    "a text": "x",
    "a list": [[0.0, 1.0], [1.0, 0.0]],
    "an array": np.zeros((3, 3)),
    "a scalar": torch.tensor(True),
    "bools": torch.ones(3, 3, dtype=torch.bool),
    "complex": torch.ones(3, 3, dtype=torch.cfloat),
    "meta": torch.ones(3, 3, device="meta"),
    "empty": torch.zeros(0, 0),
    "float8": torch.zeros(3, 3, dtype=torch.float8_e4m3fn),
    "unsigned": torch.zeros(3, 3, dtype=torch.uint16),
    "sparse in one of two": torch.zeros(3, 3).to_sparse(1),
}


@pytest.mark.parametrize("value", NO_TENSORS.values(), ids=NO_TENSORS)
@pytest.mark.parametrize("function", OF_A_TENSOR.values(), ids=OF_A_TENSOR)
def test_what_is_no_tensor_of_numbers_is_refused_in_one_sentence(function, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(value)
    assert caught.traceback[-1].path.parts[-3] in ("hetperm", "mixing", "server")  # raised here, not somewhere in torch
    assert "\n" not in str(caught.value) and str(caught.value)


OF_CLIENTS = {
    "n of solve": lambda x: mixing.solve(ZETA, x, 1.0),
    "n of weights": lambda x: mixing.weights(ZETA, Q, x),
    "q of weights": lambda x: mixing.weights(ZETA, x, N),
    "vc of weights": lambda x: mixing.weights(ZETA, Q, N, vc=x, vc_weight=0.1),
    "q of spread": lambda x: mixing.spread(ALPHA, ZETA, x),
    "n of fill_noise": lambda x: discrepancy.fill_noise(SOME, x),
    "sizes": lambda x: discrepancy.noise(torch.ones(3, 2), x),
    "vc of term": lambda x: complexity.term(x, N),
    "n of term": lambda x: complexity.term(torch.ones(3), x),
}
NO_NUMBERS = {
    "a text": "x",
    "texts": ["a", "b", "c"],
    "an object": object(),
    "negative": [-1.0, 1.0, 1.0],
    "infinite": [math.inf, 1.0, 1.0],
    "huge": [10**400, 1, 1],
    "other clients": torch.ones(4),
    "a column": torch.ones(3, 1),
    "complex": torch.ones(3, dtype=torch.cfloat),
    "meta": torch.ones(3, device="meta"),
    "sparse": torch.ones(3).to_sparse(),
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("function", OF_CLIENTS.values(), ids=OF_CLIENTS)
def test_what_are_no_numbers_of_these_clients_is_refused_in_one_sentence(function, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(value)
    assert caught.traceback[-1].path.parts[-3] in ("hetperm", "mixing")
    assert "\n" not in str(caught.value) and str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mixing.effective_partners(torch.ones(2, 2)), "row 0 of alpha sums to 2; a row holds weights >= 0"),
        (lambda: mixing.self_weight(torch.full((2, 2), math.nan)), "row 0 of alpha holds nan; a weight is finite"),
        (lambda: mixing.effective_partners(torch.tensor([[1.0, 0.0], [0.0, 0.0]])), "row 1 of alpha sums to 0"),
        (
            lambda: mixing.self_weight(torch.tensor([[2.0, -1.0], [0.0, 1.0]])),
            "row 0 of alpha holds -1; a weight is finite, zero or more",
        ),
        (lambda: mixing.same_group_mass(ALPHA, [[1], [2], [3]]), "groups must be one label for each client"),
        (lambda: mixing.same_group_mass(ALPHA, None), "groups is a NoneType; it must be a list"),
        (lambda: mixing.self_weight(ALPHA.to(torch.uint16)), "alpha is of torch.uint16, with which torch cannot comp"),
        (lambda: shuffle.schedule(ALPHA.to_sparse(1), GENERATOR), "alpha is sparse in 1 of its 2 dimensions; it must"),
        (lambda: mixing.sparse([]), "the blocks of alpha have the shapes []"),
        (lambda: mixing.sparse([torch.ones(1, 3), torch.ones(1, 2)]), "they must be (rows, N)"),
        (lambda: mixing.weights(-ZETA, Q, N), "zeta holds -9.0; a squared distance is zero or more"),
        (lambda: mixing.weights_of([3], ZETA, Q, N), "clients is [3]; it must be a list of positions from 0 to 2"),
        (lambda: mixing.weights_of(["a"], ZETA, Q, N), "clients is ['a']; it must be a number, or a tensor or list"),
        (lambda: mixing.noise(ZETA, None, N), "the noise q of the gradients is missing"),
        (lambda: mixing.weights(ZETA, Q, N, regularization=None), "unknown regularization None"),
        (lambda: mixing.weights(ZETA, Q, N, regularization=True), "unknown regularization True"),
        (lambda: mixing.weights(ZETA, Q, N, alpha_steps=1.5), "alpha_steps is 1.5; it must be a whole number"),
        (lambda: mixing.weights(ZETA, Q, N, share="x"), "share is 'x'; it must be a number of at least 0"),
        (lambda: mixing.weights(ZETA, Q, N, share=10**400), "it must be at most 1e+100, or inf, with which"),
        (lambda: mixing.weights(ZETA, Q, N, vc=Q, vc_weight=math.inf), "vc_weight is inf; it must be a number"),
        (lambda: mixing.weights(ZETA, Q, N, vc=Q, vc_weight=10**400), "it must be a number, zero or more, or 'raw'"),
        (lambda: mixing.solve(ZETA, N, "x"), "lam is 'x'; it must be a number, or a tensor or list of numbers"),
        (lambda: mixing.solve(ZETA, N, True), "lam is True; it must be a number, or a tensor or list of numbers"),
        (lambda: mixing.descend(ZETA, N, 1.0, 2.0), "steps is 2.0; it must be a whole number of at least 0"),
        (lambda: mixing.descend(ZETA, N, 1.0, 2**70), "steps is 1180591620717411303424; it must be at most 1,000,000"),
        (lambda: mixing.Rule(alpha_steps=2**70), "it must be at most 1,000,000"),
        (
            lambda: mixing.Rule(regularization=-1.0),
            "unknown regularization -1.0; use 'noise', 'level' or a number above",
        ),
        (lambda: mixing.Rule(regularization=np.zeros(2)), "unknown regularization array([0., 0.])"),
        (lambda: mixing.Rule(vc_weight=True), "vc_weight is True; it must be a number, zero or more, or 'raw'"),
        (lambda: mixing.Rule(vc_weight=np.zeros(2)), "vc_weight is array([0., 0.]); it must be a number"),
        (lambda: mixing.sparse_weights(ZETA, Q, N, vc=N, vc_weight=1e308), "vc_weight 1e+308 makes costs too large"),
        (lambda: mixing.spread(ALPHA * math.nan, ZETA, Q), "alpha holds a weight that is negative or not finite"),
        (lambda: mixing.nonzero(-ALPHA), "row 0 of alpha holds -"),
        (lambda: mixing.rows_of(ALPHA * math.nan), "row 0 of alpha holds nan; a weight is finite, zero or more"),
        (lambda: mixing.sparse([ALPHA[:1], ALPHA[1:] * math.inf]), "of alpha holds inf; a weight is finite"),
        (lambda: mixing.effective_partners(ALPHA - 2 * ALPHA), "row 0 of alpha holds -"),
        (lambda: mixing.spread(ALPHA, ZETA * math.nan, Q), "zeta[0, 0] is nan; it must be finite"),
        (lambda: shuffle.ring(2**70, GENERATOR), "N is 1180591620717411303424; it must be at most 100,000"),
        (lambda: discrepancy.sketch(torch.ones(5), 2**70), "size is 1180591620717411303424; it must be at most"),
        (lambda: discrepancy.Distances(ZETA)["a"], "rows is 'a'; it must be a tensor (n,) of int64"),
        (lambda: discrepancy.reordered(ZETA.to_sparse(), torch.arange(3)), "zeta is sparse; convert it"),
        (lambda: discrepancy.mean_and_noise([Q], [1, 2]), "2 sizes for fewer gradients; give one each"),
        (lambda: discrepancy.mean_and_noise([Q, Q], [1]), "1 sizes for more gradients; give one each"),
        (lambda: discrepancy.mean_and_noise([Q, Q], [1, -1]), "sizes is [1, -1]; it must hold the samples, above 0"),
        (lambda: discrepancy.mean_and_noise([Q, Q[:2]], [1, 1]), "a gradient of 2 numbers after one of 3"),
        (lambda: complexity.num_params(None, True), "scalable is None; it must be"),
        (lambda: complexity.vc(10**400, 3), "it must be at most 4,611,686,018,427,387,904"),
        (lambda: shuffle.ring(0, GENERATOR), "N is 0; it must be a whole number of at least 1"),
        (lambda: shuffle.ring(3, None), "the generator is a NoneType; give a torch.Generator"),
        (lambda: shuffle.schedule(ALPHA, 3), "the generator is a int; give a torch.Generator"),
        (lambda: shuffle.rounds_of(torch.tensor([[0, 5], [1, 0]])), "it must hold the number of a host, 0 to N - 1"),
        (lambda: shuffle.rounds_of(torch.zeros(2, 2, dtype=torch.long)), "in each round a host has one model"),
        (lambda: shuffle.rounds_of(torch.tensor([[0, 0], [1, 1]])), "each model visits each host once"),
        (lambda: discrepancy.distances([torch.ones(3, 5)], 7), "gradients of 3 clients and N is 7"),
        (lambda: discrepancy.fill_noise(torch.tensor([-1.0, math.nan, 1.0]), N), "q[0] is -1.0; a variance is zero"),
        (lambda: discrepancy.fill_noise(torch.tensor([1.0, math.inf]), N[:2]), "q[1] is inf; a variance is zero"),
        (
            lambda: discrepancy.fill_noise(torch.ones(3), N[:2]),
            "q of shape (3,) and n of shape (2,); give the noise and",
        ),
        (lambda: discrepancy.fill_noise(SOME, [10, 1e-320, 30]), "the noise of client 1 with n[1] = 1e-320 is too"),
        (
            lambda: discrepancy.fill_noise(torch.tensor([1e308, 1e308, math.nan], dtype=torch.float64), [1, 1, 1]),
            "the noise of client 2 with n[2] = 1.0 is too large for torch.float64",
        ),
        (lambda: complexity.term(Q, [1e-320, 1, 1]), "n holds 1e-320, too few for a vc of 1.0; give the s"),
        (lambda: discrepancy.noise(torch.full((2, 2), math.nan)), "the noise of these micro-gradients is nan"),
        (lambda: mixing.weights(ZETA, Q, N, lam=1), "unknown option 'lam' of mixing weights; known are regularization"),
        (lambda: mixing.weights(ZETA, Q, N, share=1e308), "share is 1e+308; it must be at most 1e+100, or inf"),
        (lambda: mixing.sparse_weights(ZETA, Q, N, share=1e308), "share is 1e+308; it must be at most 1e+100, or inf"),
        (lambda: mixing.weights(ZETA, torch.tensor([1e308, 1, 1]).double(), N), "q[0] is inf; a variance"),
        (lambda: mixing.weights(ZETA, [1e308, 1.0, 1.0], N), "q[0] is 1e+308; it must be at most 1e+100"),
        (lambda: mixing.weights(ZETA, Q, [1e308, 1e308, 1.0]), "n[0] is 1e+308; the samples of a client are from"),
        (lambda: mixing.weights(ZETA, Q, [1e-308, 1.0, 1.0]), "n[0] is 1e-308; the samples of a client are from"),
        (lambda: mixing.level(1e306 * ZETA.double(), Q, N), "zeta[0, 1] is 2e+306; it must be at most 1e+100"),
        (lambda: mixing.weights(1e306 * ZETA.double(), Q, N), "zeta[0, 1] is 2e+306; it must be at most 1e+100"),
        (lambda: mixing.solve(1e306 * ZETA.double(), N, 1.0), "cost[0, 1] is 2e+306; it must be at most 1e+100"),
        (
            lambda: mixing.weights(ZETA * 1e-30, Q * 1e-30, N, share=1e-300),
            "are beyond the numbers of float64: zeta, q, n",
        ),
        (lambda: mixing.weights(ZETA + torch.eye(3), Q, N), "zeta[0, 0] is 1.0; a client does not differ from itself"),
        (lambda: mixing.noise(torch.eye(3), Q, N), "zeta[0, 0] is 1.0; a client does not differ from itself"),
        (lambda: mixing.weights(torch.triu(ZETA), Q, N), "a distance is the same both ways, so give a symmetric"),
        (lambda: mixing.sparse_weights(torch.triu(ZETA), Q, N), "zeta[0, 2] is 9.0 and zeta[2, 0] is 0.0; a distance"),
        (lambda: mixing.weights_of([1], torch.triu(ZETA), Q, N), "zeta[1, 2] is 9.0 and zeta[2, 1] is 0.0; a distance"),
        (lambda: mixing.spread(ALPHA, torch.triu(ZETA), Q), "a distance is the same both ways, so give a symmetric"),
        (lambda: discrepancy.pairwise(3), "gradients is a int; it must be a tensor (N, d), or chunks of it"),
        (lambda: discrepancy.sketch(torch.ones(5), 0), "size is 0; it must be a whole number of at least 1"),
        (lambda: discrepancy.sketch(torch.ones(5), 4, -1), "seed is -1; it must be a whole number of at least 0"),
        (lambda: discrepancy.sketch(torch.ones(2, 0)), "has no coordinates; there is nothing to sketch"),
        (lambda: complexity.vc(2.0, 3), "num_params is 2.0; it must be a whole number"),
        (lambda: complexity.vc_of(nn.Linear), "it must be an nn.Module"),
        (lambda: complexity.num_layers(nn.LazyLinear(3)), "has parameters without a size yet"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_samples_are_counted_in_numbers_of_any_type(dtype):
    assert torch.equal(mixing.weights(ZETA, Q, N.to(dtype)), mixing.weights(ZETA, Q, N))


def test_weights_are_read_from_a_subclass_of_tensor_too():
    class Named(torch.Tensor):
        pass

    alpha = ALPHA.as_subclass(Named)
    for read in (mixing.effective_partners, mixing.rows_of, mixing.self_weight, mixing.nonzero):
        assert repr(read(alpha)) == repr(read(ALPHA))
    assert torch.equal(mixing.sparse(alpha).to_dense(), ALPHA)


def test_the_spread_of_sparse_weights_in_single_precision_is_that_of_dense_ones():
    dense, sparse = (mixing.spread(alpha, ZETA, Q) for alpha in (ALPHA, ALPHA.to_sparse()))
    assert dense.dtype == sparse.dtype == torch.float64
    torch.testing.assert_close(sparse, dense)


def test_distances_of_another_function_are_taken_with_their_rounding():
    g = 10 + torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    for zeta in (torch.cdist(g, g).square(), (g[:, None] - g).square().mean(-1).half()):
        zeta[7, 290] *= 1.0001
        alpha = mixing.weights(zeta, torch.ones(300), torch.ones(300))
        assert alpha.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"alpha_steps": 3}])
def test_a_vanishing_lam_leaves_everybody_with_the_nearest(options):
    lone = torch.eye(3).double()
    assert torch.equal(mixing.weights(ZETA, None, N, regularization=1e-320, **options), lone)
    assert torch.equal(mixing.descend(ZETA.double(), N, 1e-310, 5), lone)


def test_weights_that_are_all_zero_have_no_spread():
    none = torch.zeros(3, 3)
    assert torch.equal(mixing.spread(none.to_sparse(), ZETA, Q), mixing.spread(none, ZETA, Q))


@pytest.mark.parametrize("rule", [{}, {"regularization": "level"}, {"share": 2**70}, {"share": 3}])
def test_a_diagonal_that_rounding_left_counts_for_neither_form_of_the_weights(rule):
    zeta = ZETA + 0.005 * torch.eye(3)
    assert torch.equal(mixing.sparse_weights(zeta, Q, N, **rule).to_dense(), mixing.weights(zeta, Q, N, **rule))


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: complexity.num_params(None, 0.5), "scalable is None; it must be a submodels.ScalableModel"),
        (
            lambda: complexity.vc_of_widths(nn.Linear(2, 2), [1.0]),
            r"scalable is Linear\(.*; it must be a submodels.Scal",
        ),
        (lambda: complexity.vc_of_widths(object(), 0.5), "widths is 0.5; it must be a list of widths, one for each"),
        (lambda: discrepancy.distances(ZETA, "x"), "N is 'x'; it must be a whole number of at least 1"),
        (lambda: discrepancy.reordered(ZETA, torch.tensor([0, 3])), "its numbers must be from 0 to 2"),
        (lambda: discrepancy.mean_and_noise(None, [1]), "gradients is None and sizes \\[1\\]; give a list of each"),
    ],
)
def test_what_is_no_model_order_or_count_is_refused_in_one_sentence(act, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_the_parameters_of_a_width_beyond_the_whole_model_are_not_counted():
    scalable = ScalableModel(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 3))
    assert complexity.num_params(scalable, 1) == 50
    with pytest.raises(ValueError, match=r"width 2 is outside \(0, 1\]"):
        complexity.num_params(scalable, 2)
