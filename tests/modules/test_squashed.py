from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import TanhNormal
from torchrl.objectives import SACLoss

from torchrl_unilab.errors import ConfigError
from torchrl_unilab.modules.critics import make_q_value
from torchrl_unilab.modules.squashed import make_sac_actor, make_td3_actor, squash

LOW, HIGH = torch.tensor([-1.0, 0.5]), torch.tensor([0.25, 4.0])
TYPES = [
    ExplorationType.RANDOM,
    ExplorationType.DETERMINISTIC,
    ExplorationType.MEAN,
    ExplorationType.MODE,
]


def _observations(*batch: int) -> TensorDict:
    return TensorDict(observation=5 * torch.randn(*batch, 3), batch_size=batch)


@pytest.mark.parametrize("how", TYPES, ids=str)
@pytest.mark.parametrize("batch", [(), (4,), (2, 8)], ids=str)
def test_the_direct_path_gives_what_torchrls_gives(how, batch):
    torch.manual_seed(0)
    actor = make_sac_actor(3, 2, low=LOW, high=HIGH, hidden=(8,))
    observations = _observations(*batch)
    with set_exploration_type(how):
        torch.manual_seed(1)
        stock = actor(observations.copy())  # with gradients
        torch.manual_seed(1)
        with torch.no_grad():
            direct = actor(observations.copy())
    assert set(direct.keys()) == set(stock.keys())
    for key, value in direct.items():
        torch.testing.assert_close(value, stock[key].detach(), rtol=1e-6, atol=1e-6)


def test_without_exploration_the_action_is_the_squashed_mean():
    actor = make_sac_actor(3, 2, low=LOW, high=HIGH)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        batch = actor(_observations(5))
    expected = (LOW + HIGH) / 2 + (HIGH - LOW) / 2 * batch["loc"].tanh()
    torch.testing.assert_close(batch["action"], expected)


@pytest.mark.parametrize("how", TYPES, ids=str)
def test_sac_actions_keep_off_their_bounds_so_that_they_have_a_probability(how):
    actor = make_sac_actor(3, 2, low=LOW, high=HIGH)
    with torch.no_grad():
        actor[0].net[-1].weight.mul_(1e4)
        with set_exploration_type(how):
            batch = actor(_observations(200))
        assert (batch["action"] >= LOW).all()
        assert (batch["action"] <= HIGH).all()
        stock = TanhNormal(batch["loc"], batch["scale"], low=LOW, high=HIGH)
        assert stock.log_prob(batch["action"]).isfinite().all()


def test_the_scale_stays_within_its_soft_bounds_and_keeps_a_gradient():
    actor = make_sac_actor(1, 1, hidden=(), log_std_bounds=(-2.0, 1.0))
    parameters = actor[0]
    with torch.no_grad():
        parameters.net[0].weight.copy_(torch.tensor([[0.0], [1.0]]))
        parameters.net[0].bias.zero_()
    raw = torch.tensor([[-100.0], [-4.0], [0.0], [4.0], [100.0]], requires_grad=True)
    log_std = parameters(TensorDict(observation=raw, batch_size=[5]))["scale"].log()
    ends = log_std.flatten().tolist()
    assert (ends[0], ends[2], ends[-1]) == pytest.approx((-2.0, -0.5, 1.0), abs=1e-6)
    log_std.sum().backward()
    assert (raw.grad[1:4] > 1e-3).all()


@given(st.floats(-50.0, 50.0), st.sampled_from([torch.float32, torch.float64]))
def test_squash_is_tanh_that_never_reaches_one(x, dtype):
    value = torch.tensor(x, dtype=dtype)
    y = squash(value.clone())
    resolution = torch.finfo(dtype).resolution
    torch.testing.assert_close(y, value.tanh(), rtol=0.0, atol=2 * resolution)
    assert y.abs().item() < 1.0


def test_td3_acts_from_bound_to_bound():
    actor = make_td3_actor(1, 2, low=LOW, high=HIGH, hidden=())
    with torch.no_grad():
        actor.net[0].weight.fill_(1.0)
        actor.net[0].bias.zero_()
    observation = torch.tensor([[-100.0], [0.0], [100.0]])
    action = actor(TensorDict(observation=observation, batch_size=[3]))["action"]
    assert torch.equal(action, torch.stack([LOW, (LOW + HIGH) / 2, HIGH]))
    half = make_td3_actor(1, 1, high=3.0, hidden=())  # low is -1
    with torch.no_grad():
        half.net[0].weight.zero_()
        half.net[0].bias.fill_(0.5493061443340549)  # artanh 0.5
    action = half(TensorDict(observation=torch.zeros(1, 1), batch_size=[1]))["action"]
    assert action.item() == pytest.approx(2.0)


def test_sac_finds_the_target_entropy_from_the_actor():
    loss = SACLoss(make_sac_actor(3, 2, low=LOW, high=HIGH), make_q_value(3, 2))
    assert loss.target_entropy.item() == -2.0


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({"low": torch.tensor([-1.0, 4.0]), "high": HIGH}, "low < high"),
        ({"low": 1.0, "high": 1.0}, "low < high"),
        ({"high": torch.ones(3)}, "or 2 of them"),
        ({"high": torch.ones(1)}, "or 2 of them"),
        ({"high": float("inf")}, "finite"),
        ({"hidden": (0,)}, "width of a network: 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [make_sac_actor, make_td3_actor])
def test_bounds_and_widths_that_cannot_work_are_refused(make, bounds, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make(3, 2, **bounds)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, None])
@pytest.mark.parametrize("make", [make_sac_actor, make_td3_actor])
def test_a_number_of_actions_that_cannot_be_is_refused(make, size):
    with pytest.raises(ConfigError, match=rf"actions: {size} .*integer"):
        make(3, size)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (-math.inf, 0.0), (0.0, math.inf)])
def test_bounds_of_the_scale_must_be_finite_and_in_order(bounds):
    with pytest.raises(ConfigError, match="log_std_bounds"):
        make_sac_actor(3, 2, log_std_bounds=bounds)


# The last pair is rounded beyond a bound by far more than a digit of its center.
RIM = [(2e38, 3e38), (0.0, 4.2e-45), (1.0, 1.0000001), (-472.4, 472.5)]


@pytest.mark.parametrize(("low", "high"), RIM)
def test_bounds_at_the_end_of_floating_point_leave_actions_within(low, high):
    actor = make_td3_actor(1, 1, low=low, high=high)
    for action in (actor.center - actor.reach, actor.center + actor.reach):
        assert torch.tensor(low) <= action <= torch.tensor(high)


@given(st.floats(-1000, 1000, width=32), st.floats(0.0625, 1000, width=32))
def test_no_action_is_rounded_beyond_its_bounds(low, width):
    low, high = torch.tensor([low]), torch.tensor([low]) + width
    actor = make_td3_actor(1, 1, low=low, high=high, hidden=())
    with torch.no_grad():
        actor.net[0].weight.fill_(1.0)
        saturated = TensorDict(observation=torch.tensor([[-1e4], [1e4]]), batch_size=[2])
        least, most = actor(saturated)["action"]
    assert low <= least
    assert most <= high
    room = 1e-6 * (float(low.abs()) + width)
    torch.testing.assert_close(least, low, rtol=0.0, atol=room)
    torch.testing.assert_close(most, high, rtol=0.0, atol=room)


@pytest.mark.parametrize("make", [make_sac_actor, make_td3_actor])
def test_a_state_of_other_bounds_is_refused_and_one_of_these_loaded(make):
    actor = make(3, 2, low=LOW, high=HIGH)
    actor.load_state_dict(make(3, 2, low=LOW, high=HIGH).state_dict())
    state = make(3, 2, low=LOW, high=2 * HIGH).state_dict()
    with pytest.raises(ConfigError, match=r"of \[-1.*\] to \[0\.5.*\] \(expected .*Make the actor"):
        actor.load_state_dict(state)
    with pytest.raises(ConfigError, match="Make the actor"):
        actor.load_state_dict(make(3, 3).state_dict())
    del state[next(key for key in state if key.endswith("reach"))]
    with pytest.raises(RuntimeError, match=r"Missing key.*reach"):
        actor.load_state_dict(state)
    pickle.loads(pickle.dumps(actor)).load_state_dict(actor.state_dict())
    make(3, 2).to("meta").load_state_dict(actor.state_dict(), assign=True)  # which has no bounds


@pytest.mark.parametrize("make", [make_sac_actor, make_td3_actor])
def test_an_actor_that_is_made_without_memory_is_checked_and_acts_once_a_state_is_loaded(make):
    actor = make(3, 2, low=LOW, high=HIGH)
    with torch.device("meta"):
        later = make(3, 2, low=LOW, high=HIGH)
        for bounds in ({"low": 2.0}, {"high": [1.0, 2.0, 3.0]}):
            with pytest.raises(ConfigError, match="low < high"):
                make(3, 2, **bounds)
    assert {parameter.device.type for parameter in later.parameters()} == {"meta"}
    later.load_state_dict(actor.state_dict(), assign=True)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        data = _observations(4)
        ours, theirs = (one(data.clone())["action"] for one in (later, actor))
    torch.testing.assert_close(ours, theirs)
    if make is make_sac_actor:
        assert later.spec == actor.spec


def test_a_state_whose_bounds_are_rounded_otherwise_is_loaded():
    actor = make_td3_actor(3, 2, low=LOW, high=HIGH)
    state = actor.state_dict()
    actor.load_state_dict(state | {"reach": state["reach"].nextafter(torch.tensor(9.0))})


def test_bounds_have_the_dtype_of_weights(monkeypatch):
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    actor = make_td3_actor(3, 2, low=LOW, high=5.3)
    assert actor.center.dtype == actor.reach.dtype == torch.float64


def test_an_actor_does_not_alias_the_bounds_it_was_given():
    low = LOW.clone()
    point, gaussian = (make(3, 2, low=low, high=HIGH) for make in (make_td3_actor, make_sac_actor))
    low.fill_(-100.0)
    for module in (point, gaussian[0]):
        assert torch.equal(module.center, (LOW + HIGH) / 2)
    assert torch.equal(gaussian.get_dist(_observations(1)).low, LOW)
    assert torch.equal(gaussian.spec["action"].space.low, LOW)
