"""Running statistics: which they are, static in training, recalibrated for a deployed width."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from submodels import norms

torch.set_num_threads(1)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).double()


def _batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 2, 8, 8, dtype=torch.float64, generator=generator) for n in sizes]


def _snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _settings(module):
    return [(part.training, getattr(part, "momentum", "-"), len(part._forward_hooks)) for part in module.modules()]


def _equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Which buffers


def test_statistics_names_three_buffers_for_every_batch_norm_and_nothing_else():
    net = nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.BatchNorm1d(3, track_running_stats=False))
    net.register_buffer("running_total", torch.zeros(1))
    assert norms.statistics(net) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


def test_statistics_of_a_bare_norm_have_no_prefix():
    assert norms.statistics(nn.BatchNorm1d(2)) == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize(
    "norm", [nn.SyncBatchNorm(2), nn.BatchNorm3d(2), nn.InstanceNorm1d(2, track_running_stats=True)]
)
def test_sync_and_tracking_instance_norms_have_statistics(norm):
    assert len(norms.statistics(nn.Sequential(norm))) == 3


def test_an_instance_norm_that_tracks_nothing_has_no_statistics():
    assert norms.statistics(nn.InstanceNorm2d(2, affine=True)) == frozenset()


def test_a_shared_norm_is_listed_under_both_its_names():
    norm = nn.BatchNorm1d(2)
    assert "0.running_mean" in norms.statistics(nn.Sequential(norm, norm))
    assert "1.running_mean" in norms.statistics(nn.Sequential(norm, norm))


def test_timm_norms_with_an_activation_count_as_batch_norms():
    timm_layers = pytest.importorskip("timm.layers")
    net = nn.Sequential(nn.Conv2d(2, 2, 1), timm_layers.BatchNormAct2d(2))
    assert "1.running_var" in norms.statistics(net)
    assert norms.has_batch_norm(net)
    norms.recalibrate(net, [torch.randn(4, 2, 3, 3)])
    assert net[1].num_batches_tracked == 1


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        (nn.Sequential(nn.Linear(1, 1)), False),
        (nn.InstanceNorm2d(2, track_running_stats=True), False),
        (nn.GroupNorm(1, 2), False),
        (nn.Sequential(nn.Sequential(nn.BatchNorm2d(2))), True),
        (nn.BatchNorm1d(2, track_running_stats=False), True),
    ],
)
def test_has_batch_norm_asks_whether_the_batch_is_normalised_over(module, answer):
    assert norms.has_batch_norm(module) is answer


def test_one_sample_is_refused_with_batch_norm_and_the_remedy_is_named():
    with pytest.raises(ValueError, match=r"a client with 1 sample cannot train BatchNorm \(layer '1'\).*more samples"):
        norms.check_batch(_net(), 1)


def test_two_samples_or_a_model_without_batch_norm_pass():
    norms.check_batch(_net(), 2)
    norms.check_batch(nn.Linear(1, 1), 1)


# recalibrate, by hand


def test_two_values_give_their_mean_and_unbiased_variance():
    norm = nn.BatchNorm1d(1)
    norms.recalibrate(norm, [torch.tensor([[0.0], [2.0]])])
    assert (norm.running_mean.item(), norm.running_var.item(), norm.num_batches_tracked.item()) == (1.0, 2.0, 1)


def test_two_batches_count_as_one_sample_of_four():
    norm = nn.BatchNorm1d(1).double()
    x = torch.tensor([[0.0], [2.0], [4.0], [6.0]], dtype=torch.float64)
    norms.recalibrate(norm, [x[:2], x[2:]])
    assert norm.running_mean.item() == 3.0
    assert norm.running_var.item() == pytest.approx(20 / 3, abs=1e-15)
    assert norm.num_batches_tracked.item() == 2


def test_a_batch_of_three_weighs_more_than_a_batch_of_two():
    norm = nn.BatchNorm1d(1)
    norms.recalibrate(norm, [torch.tensor([[0.0], [0.0], [0.0]]), torch.tensor([[5.0], [5.0]])])
    assert norm.running_mean.item() == 2.0  # not 2.5, the mean of the two means
    assert norm.running_var.item() == pytest.approx((3 * 4 + 2 * 9) / 4)  # although neither batch varies


def test_what_was_there_before_leaves_no_trace_not_even_nan():
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(float("nan"))
    norms.recalibrate(norm, [torch.tensor([[0.0], [2.0]])])
    assert norm.running_mean.item() == 1.0


def test_an_instance_norm_keeps_the_mean_variance_of_its_instances():
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    x = torch.tensor([[[0.0, 2.0]], [[10.0, 14.0]]])  # means 1 and 12, variances 2 and 8
    norms.recalibrate(norm, [x[:1], x[1:]])
    assert norm.running_mean.item() == pytest.approx(6.5)
    assert norm.running_var.item() == pytest.approx(5.0)


# recalibrate, against literal references


def test_later_layers_equal_a_pass_written_out_with_loops():
    net, batches = _net(), _batches(4, 4, 3)
    norms.recalibrate(net, batches)
    values = [[], []]
    for x in batches:
        x = net[0](x)
        values[0].append(x.transpose(0, 1).flatten(1))
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        x = net[4](torch.relu((x - mean) / torch.sqrt(var + net[1].eps)))  # weight 1, bias 0; dropout off
        values[1].append(x.transpose(0, 1).flatten(1))
    for norm, seen in zip((net[1], net[5]), values):
        seen = torch.cat(seen, 1)
        torch.testing.assert_close(norm.running_mean, seen.mean(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(norm.running_var, seen.var(1), rtol=0, atol=1e-12)


def test_equal_batches_give_the_cumulative_mean_of_torch_itself():
    net, batches = _net(), _batches(4, 4, 4)
    reference = copy.deepcopy(net).train()
    reference[3].eval()
    for norm in (reference[1], reference[5]):
        norm.reset_running_stats()
        norm.momentum = None
    for x in batches:
        reference(x)
    norms.recalibrate(net, batches)
    for i in (1, 5):
        torch.testing.assert_close(net[i].running_mean, reference[i].running_mean, rtol=0, atol=1e-12)
        assert net[i].num_batches_tracked == reference[i].num_batches_tracked


@settings(max_examples=20)
@given(cuts=st.sets(st.integers(1, 5), max_size=4), seed=st.integers(0, 99))
def test_the_first_layer_does_not_depend_on_how_samples_are_batched(cuts, seed):
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    edges = [0, *(2 * cut for cut in sorted(cuts)), 12]
    norm = nn.BatchNorm1d(3).double()
    norms.recalibrate(norm, [x[a:b] for a, b in itertools.pairwise(edges)])
    torch.testing.assert_close(norm.running_mean, x.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_var, x.var(0), rtol=0, atol=1e-12)


def test_the_order_of_batches_does_not_matter():
    a, b, batches = _net(), _net(), _batches(4, 2, 7)
    norms.recalibrate(a, batches)
    norms.recalibrate(b, batches[::-1])
    for name in norms.statistics(a):
        torch.testing.assert_close(a.state_dict()[name], b.state_dict()[name], rtol=0, atol=1e-12)


def test_a_norm_used_twice_in_a_pass_counts_both_uses():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1).double()

        def forward(self, x):
            return self.norm(x) + self.norm(input=x + 4)

    net = Twice()
    norms.recalibrate(net, [torch.tensor([[0.0], [2.0]], dtype=torch.float64)])
    assert net.norm.running_mean.item() == 3.0
    assert net.norm.running_var.item() == pytest.approx(20 / 3)
    assert net.norm.num_batches_tracked == 2


# recalibrate, what it leaves alone


def _mixed_modes(module):
    module.train()
    module[1].eval()
    module[3].eval()
    return module


@pytest.mark.parametrize("mode", [nn.Module.train, nn.Module.eval, _mixed_modes])
def test_only_statistics_change(mode):
    net = mode(_net())
    before, flags = _snapshot(net), _settings(net)
    buffers = {name: id(buffer) for name, buffer in net.named_buffers()}
    assert norms.recalibrate(net, _batches(4, 3)) is None
    after = net.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == norms.statistics(net)
    assert _settings(net) == flags
    assert {name: id(buffer) for name, buffer in net.named_buffers()} == buffers
    assert all(parameter.grad is None for parameter in net.parameters())


def test_recalibrating_draws_no_random_numbers():
    net, state = _net(), torch.get_rng_state()
    norms.recalibrate(net, _batches(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_recalibrating_builds_no_graph():
    net, graphs = _net(), []
    net[7].register_forward_hook(lambda module, args, output: graphs.append(output.requires_grad))
    norms.recalibrate(net, _batches(4, 4))
    assert graphs == [False, False]


def test_a_batch_that_raises_leaves_everything_as_it_was():
    net = _mixed_modes(_net())
    before, flags = _snapshot(net), _settings(net)
    with pytest.raises(ValueError, match=r"cannot be run on a batch of shape \(4, 9, 8, 8\), torch.float64"):
        norms.recalibrate(net, [*_batches(4), torch.zeros(4, 9, 8, 8, dtype=torch.float64)])
    assert _equal(net.state_dict(), before)
    assert _settings(net) == flags


def test_a_module_without_statistics_does_not_touch_the_data():
    def explosive():
        raise AssertionError("the data was read")
        yield

    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    norms.recalibrate(net, explosive())


def test_what_a_layer_caches_while_evaluating_is_dropped_again():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.scale, self.cache = nn.BatchNorm1d(1), nn.Parameter(torch.ones(1)), None

        def train(self, mode=True):
            super().train(mode)
            self.cache = None if mode else self.cache
            return self

        def forward(self, x):
            if not self.training and self.cache is None:
                self.cache = self.scale.detach() * 2
            return self.norm(x) * (self.scale * 2 if self.training else self.cache)

    net = Caching()
    norms.recalibrate(net, [torch.tensor([[0.0], [2.0]])])
    assert net.cache is None
    assert net.training
    assert net.norm.training


def test_a_norm_the_data_does_not_reach_keeps_its_statistics():
    net = nn.Sequential(nn.BatchNorm1d(1))
    net.unused = nn.BatchNorm1d(1)
    net.unused.running_mean.fill_(7)
    net.forward = net[0].__call__
    norms.recalibrate(net, [torch.tensor([[0.0], [2.0]])])
    assert net.unused.running_mean.item() == 7


# recalibrate, inputs and errors


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, torch.zeros(2)), lambda x: [x, torch.zeros(2)]])
def test_a_batch_is_a_tensor_or_begins_with_one(wrap):
    norm = nn.BatchNorm1d(1)
    norms.recalibrate(norm, iter([wrap(torch.tensor([[0.0], [2.0]]))]), device=torch.device("cpu"))
    assert norm.running_mean.item() == 1.0


@pytest.mark.parametrize(
    ("batches", "error", "sentence"),
    [
        ([], ValueError, "no batches to recalibrate from"),
        ([torch.zeros(0, 1)], ValueError, "holds no samples"),
        (torch.zeros(4, 1), TypeError, r"write recalibrate\(module, \[x\]\)"),
        ([{"x": torch.zeros(2, 1)}], TypeError, "not dict"),
        ([()], TypeError, "not tuple"),
        (
            [torch.zeros(2, 1), torch.zeros(1, 1)],
            ValueError,
            "'0' was given one value per channel.* at least 2 samples",
        ),
        ([torch.tensor([[0.0], [float("nan")]])], ValueError, "norm '0' is not finite"),
    ],
)
def test_bad_batches_are_refused_in_one_sentence_and_change_nothing(batches, error, sentence):
    net = nn.Sequential(nn.BatchNorm1d(1))
    before, flags = _snapshot(net), _settings(net)
    with pytest.raises(error, match=sentence) as caught:
        norms.recalibrate(net, batches)
    assert "\n" not in str(caught.value)
    assert _equal(net.state_dict(), before)
    assert _settings(net) == flags


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"run": "cpu"}, "run is 'cpu'; it must be a function of a batch"),
        ({"device": torch.ones(2)}, r"device is tensor\(\[1., 1.\]\); it must be a torch.device, or its name"),
        ({"device": 10**400}, "device is 1000.*; it must be a torch.device, or its name"),
        ({"device": "gpu"}, "device is 'gpu'; it must be a torch.device, or its name"),
        ({"device": ""}, "device is ''; it must be a torch.device, or its name"),
    ],
)
def test_a_wrong_option_of_recalibrate_is_named_before_a_batch_is_touched(options, sentence):
    norm, batches = nn.BatchNorm1d(1), iter([torch.zeros(2, 1)])
    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        norms.recalibrate(norm, batches, **options)
    assert "\n" not in str(caught.value)
    assert len(list(batches)) == 1


def test_one_sample_with_several_positions_is_enough():
    norm = nn.BatchNorm2d(1)
    norms.recalibrate(norm, [torch.tensor([[[[0.0, 2.0]]]])])
    assert norm.running_mean.item() == 1.0


def test_recalibrating_while_statistics_are_hidden_is_refused():
    norm = nn.BatchNorm1d(1)
    with norms.batch_statistics(norm), pytest.raises(ValueError, match="call it outside"):
        norms.recalibrate(norm, [torch.tensor([[0.0], [2.0]])])
    assert norm.running_mean.item() == 0.0
    assert norm.track_running_stats


# batch_statistics


@pytest.mark.parametrize("mode", [nn.Module.train, nn.Module.eval])
def test_batch_statistics_normalise_by_the_batch_in_either_mode(mode):
    norm = mode(nn.BatchNorm1d(1, eps=1e-12))
    with norms.batch_statistics(norm):
        assert norm(torch.tensor([[0.0], [2.0]])).flatten().tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2, track_running_stats=True)]
)
def test_training_inside_leaves_statistics_untouched(norm):
    net = nn.Sequential(norm).train()
    before, flags = _snapshot(net), _settings(net)
    with norms.batch_statistics(net):
        net(torch.randn(3, 2, 5))
        assert _equal(net.state_dict(), before)
    assert _settings(net) == flags
    net(torch.randn(3, 2, 5))
    assert not _equal(net.state_dict(), before)


def test_outputs_and_gradients_are_those_of_training_mode():
    net = _net()
    net[3] = nn.Identity()
    x = _batches(4)[0]
    expected = torch.autograd.grad(net.train()(x).square().sum(), list(net.parameters()))
    with norms.batch_statistics(net.eval()):
        probed = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, probed))


def test_modes_may_be_changed_inside_and_stay_changed():
    net = _net().train()
    x = _batches(4)[0]
    with norms.batch_statistics(net):
        net.eval()
        inside = net(x)
    assert not any(part.training for part in net.modules())
    assert not torch.equal(net(x), inside)


def test_an_error_inside_restores_the_norms_at_once():
    net = _net()
    before, flags = _snapshot(net), _settings(net)
    with norms.batch_statistics(net):
        with pytest.raises(ValueError, match="expected 4D"):
            net[1](torch.zeros(3))
        assert _equal(net.state_dict(), before)
        assert net[1].track_running_stats
    with pytest.raises(KeyError), norms.batch_statistics(net):
        raise KeyError
    assert _settings(net) == flags


def test_an_interrupt_inside_a_norm_is_undone_on_exit():
    def interrupt(*_):
        raise KeyboardInterrupt

    net = _net()
    before = _snapshot(net)
    with pytest.raises(KeyboardInterrupt), norms.batch_statistics(net):
        net[1].register_forward_pre_hook(interrupt)
        net(_batches(4)[0])
    assert _equal(net.state_dict(), before)
    assert net[1].track_running_stats


def test_contexts_may_be_nested():
    net = _net().train()
    before = _snapshot(net)
    with norms.batch_statistics(net):
        with norms.batch_statistics(net):
            net(_batches(4)[0])
        net(_batches(4)[0])
        assert _equal(net.state_dict(), before)
    assert all(norm.track_running_stats for norm in (net[1], net[5]))


def test_many_models_can_be_run_at_once_under_vmap():
    nets = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double() for _ in range(3)]
    parameters, buffers = stack_module_state(nets)
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    base = copy.deepcopy(nets[0])
    with norms.batch_statistics(base):
        together = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)))(parameters, buffers, x)
    for net, inputs, output in zip(nets, x, together):
        torch.testing.assert_close(net.train()(inputs), output, rtol=0, atol=1e-12)


# without_statistics


def test_without_statistics_gives_the_bits_of_batch_statistics_and_restores_the_norms():
    net, x = _net().train(), _batches(4)[0]
    before, flags = _snapshot(net), _settings(net)
    tracked = [norm for _, norm in norms.tracking(net)]
    torch.manual_seed(0)
    with norms.batch_statistics(net):
        expected = net(x)
    torch.manual_seed(0)
    with norms.without_statistics(tracked):
        assert torch.equal(net(x), expected)
        assert tracked and all([norm.running_mean is None and not norm.track_running_stats for norm in tracked])
    with pytest.raises(KeyError), norms.without_statistics(tracked):
        raise KeyError
    assert _equal(net.state_dict(), before) and _settings(net) == flags
