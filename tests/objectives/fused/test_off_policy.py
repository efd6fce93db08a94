"""What SAC's and TD3's fused updates have in common; tests/trainers has a reference for both."""

from __future__ import annotations

import itertools
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchrl.objectives import SACLoss, SoftUpdate

from tests.support.off_policy import (
    ACT,
    ALL,
    BOTH,
    CASES,
    LRS,
    OBS,
    OWN,
    assert_same_step,
    fused,
    make_loss,
    stock,
    transitions_of,
)
from torchrl_unilab.errors import ConfigError, LayoutKeyError, LayoutShapeError
from torchrl_unilab.modules import make_actor, make_critic, make_q_value, make_sac_actor
from torchrl_unilab.objectives import APPOLoss, FusedSACUpdate, FusedTD3Update

STATISTICS_OF_THE_POLICY = {"sac": ["loss_actor", "entropy", "loss_alpha"], "td3": ["loss_actor"]}

pytestmark = pytest.mark.usefixtures("double_precision")


def prepared(algorithm: str, size: int = 32, **settings):
    """A loss, its fused update, and transitions packed for it."""
    loss = make_loss(algorithm, **settings)
    update = fused(loss)
    return loss, update, update.prepare(transitions_of(loss, size, 0))


@pytest.mark.parametrize(("algorithm", "case"), ALL)
def test_steps_equal_those_of_the_loss_adam_and_soft_update(algorithm, case):
    loss = make_loss(algorithm, **(CASES | OWN[algorithm])[case])
    other, update = stock(loss), fused(loss)
    for i in range(3):
        batch = transitions_of(loss, 32, seed=i)
        observed, expected = assert_same_step(loss, other, update, batch)
        for key in set(observed) & set(expected.keys()):
            torch.testing.assert_close(
                observed[key], expected[key].to(observed[key]), rtol=1e-9, atol=1e-10, msg=key
            )
        torch.testing.assert_close(update.td_error, batch["td_error"], rtol=1e-9, atol=1e-10)
        for name, parameter in other.loss.named_parameters():
            torch.testing.assert_close(
                loss.get_parameter(name).grad, parameter.grad, rtol=1e-8, atol=1e-11, msg=name
            )


@BOTH
def test_several_steps_to_the_next_observation_and_priority_weights_count_as_in_the_loss(algorithm):
    loss = make_loss(algorithm)
    batch = transitions_of(loss, 32, seed=1)
    plain = fused(make_loss(algorithm)).prepare(batch)
    batch["steps_to_next_obs"] = torch.randint(1, 5, (32, 1))
    batch["priority_weight"] = torch.rand(32) + 0.1
    update = fused(loss)
    observed, expected = assert_same_step(loss, stock(loss), update, batch)
    for key in ("loss_qvalue", "loss_actor"):
        torch.testing.assert_close(observed[key], expected[key], rtol=1e-9, atol=1e-12)
    assert not torch.equal(plain, update.prepare(batch))


def test_two_critics_may_be_given_as_a_list():
    torch.manual_seed(0)
    critics = [make_q_value(OBS, ACT, hidden=(8,)) for _ in range(2)]
    loss = SACLoss(make_sac_actor(OBS, ACT, hidden=(8,)), critics)
    loss.make_value_estimator(gamma=0.9)
    assert_same_step(loss, stock(loss), fused(loss), transitions_of(loss, 32, 0))


@BOTH
def test_single_precision_follows_the_stock_loss(algorithm):
    torch.set_default_dtype(torch.float32)
    loss = make_loss(algorithm, layer_norm=True, normalized=True)
    other, update = stock(loss), fused(loss)
    for i in range(5):
        batch = transitions_of(loss, 32, seed=i)
        observed, _ = assert_same_step(loss, other, update, batch, rtol=2e-3, atol=2e-4)
    assert update.prepare(batch).dtype == observed["q_value"].dtype == torch.float32


@pytest.mark.parametrize("case", ["plain", "layer norm", "three and one layers", "linear"])
@BOTH
def test_products_in_another_dtype_leave_parameters_and_losses_in_their_own(algorithm, case):
    loss = make_loss(algorithm, **CASES[case])
    other, update = stock(loss), fused(loss, matmul_dtype=torch.float32)
    for i in range(5):
        batch = transitions_of(loss, 32, seed=i)
        observed, expected = assert_same_step(loss, other, update, batch, rtol=1e-3, atol=1e-4)
        for key in ("loss_qvalue", "loss_actor"):
            torch.testing.assert_close(observed[key], expected[key], rtol=1e-4, atol=1e-5)
            assert observed[key].dtype == torch.float64
    assert {parameter.dtype for parameter in loss.parameters()} == {torch.float64}


@BOTH
def test_gradients_by_bfloat16_point_where_exact_ones_do(algorithm):
    gradients = []
    for dtype in (None, torch.bfloat16):
        loss = make_loss(algorithm, hidden=((64, 64), (64, 64)))
        update = fused(loss, matmul_dtype=dtype)
        torch.manual_seed(1)
        update.step(update.prepare(transitions_of(loss, 256, seed=0)))
        gradients.append({n: p.grad.flatten() for n, p in loss.named_parameters() if p.ndim})
    for name, exact in gradients[0].items():
        assert torch.cosine_similarity(exact, gradients[1][name], dim=0) > 0.995, name
        assert not torch.equal(exact, gradients[1][name]), name


@BOTH
def test_products_in_another_dtype_see_parameters_that_others_set(algorithm):
    source, target = make_loss(algorithm), make_loss(algorithm)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.5)
    updates = [fused(loss, matmul_dtype=torch.bfloat16) for loss in (source, target)]
    target.load_state_dict(source.state_dict())
    observed = []
    for update in updates:
        torch.manual_seed(1)
        observed.append(update.step(update.prepare(transitions_of(source, 32, seed=0))))
    torch.testing.assert_close(*observed, rtol=0, atol=0)


@BOTH
def test_statistics_are_one_ordinary_tensor(algorithm):
    _, update, packed = prepared(algorithm)
    observed = update.step(packed)
    assert observed.shape == (len(update.statistics),)
    assert not observed.is_inference()
    assert not observed.requires_grad


# Without the policy's turn


@BOTH
def test_a_critic_step_leaves_the_policy_alone_and_moves_all_targets(algorithm):
    loss, update, packed = prepared(algorithm, normalized=True)
    update.step(packed)  # its policy gradients and Adam state must not leak into the next step
    before = {name: value.clone() for name, value in loss.state_dict().items()}

    update.step(packed, update_policy=False)

    after = loss.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    learnt = {name for name in before if ".net." in name}
    assert changed == {name for name in learnt if not name.startswith("actor_network_params")}


@BOTH
def test_a_critic_step_repeats_the_policys_statistics_which_are_nan_before_its_first_step(
    algorithm,
):
    _, update, packed = prepared(algorithm)

    before, first, second = (update.step(packed, update_policy=i == 1) for i in range(3))

    of_the_policy = [name in STATISTICS_OF_THE_POLICY[algorithm] for name in update.statistics]
    assert before.isnan().tolist() == of_the_policy
    assert (first == second).tolist() == of_the_policy


# Packing


def test_a_sample_is_cut_into_views_in_order():
    packed = torch.arange(20.0).view(10, 2)
    parts = FusedSACUpdate.minibatches(packed, 4)
    assert [len(part) for part in parts] == [3, 3, 2, 2]
    assert torch.equal(torch.cat(list(parts)), packed)
    assert {part.untyped_storage().data_ptr() for part in parts} == {
        packed.untyped_storage().data_ptr()
    }


@pytest.mark.parametrize("count", [0, 11, 2.0])
def test_a_sample_is_not_cut_into_none_nor_into_more_than_its_rows(count):
    with pytest.raises(ConfigError, match=f"{count} .expected an integer of 1 to 10"):
        FusedSACUpdate.minibatches(torch.zeros(10, 2), count)


@BOTH
def test_observations_are_normalised_by_the_statistics_of_the_moment(algorithm):
    loss = make_loss(algorithm, normalized=True)
    update, batch = fused(loss), transitions_of(loss, 32, 0)
    normalizer = loss.qvalue_network.normalizer
    before = update.prepare(batch)
    normalizer.update(torch.randn(100, OBS) + 20.0)
    after = update.prepare(batch)
    assert torch.equal(after[:, :OBS], normalizer(batch["observation"]))
    assert not torch.equal(after[:, :OBS], before[:, :OBS])
    assert torch.equal(after[:, OBS : OBS + ACT], batch["action"])
    assert_same_step(loss, stock(loss), update, batch)  # so does the stock loss


@pytest.mark.parametrize(
    ("spoil", "error", "complaint"),
    [
        (lambda batch: batch.exclude(("next", "reward")), LayoutKeyError, "'reward'"),
        (lambda batch: batch.reshape(2, 4), LayoutShapeError, r"\(2, 4\)"),
        (
            lambda batch: batch.set(("next", "reward"), torch.zeros(8, 2)),
            LayoutShapeError,
            r"^next of transitions: 'reward' has shape \(8, 2\) \(expected \(8, 1\)\)",
        ),
        (
            lambda batch: batch.set("action", torch.zeros(8, ACT + 1)),
            LayoutShapeError,
            r"'action' has shape \(8, 3\) \(expected \(8, 2\)",
        ),
    ],
    ids=["key", "batch size", "rewards", "width"],
)
def test_batches_that_do_not_fit_are_refused(spoil, error, complaint):
    loss = make_loss("sac")
    with pytest.raises(error, match=complaint):
        fused(loss).prepare(spoil(transitions_of(loss, 8, 0)))


def test_flags_of_numbers_end_an_episode_as_those_of_truth_values_do():
    loss = make_loss("sac")
    update, batch = fused(loss), transitions_of(loss, 8, 0)
    expected = update.prepare(batch)
    assert batch["next", "terminated"].any()
    for dtype in (torch.uint8, torch.float32):
        terminated = batch["next", "terminated"].to(dtype)
        numbers = batch.clone().set(("next", "terminated"), terminated)
        assert torch.equal(update.prepare(numbers), expected)


# Parameters and their memory


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [
        *itertools.product(("sac", "td3"), ("actor_network_params", "qvalue_network_params")),
        ("sac", "log_alpha"),
    ],
)
def test_networks_and_temperatures_whose_memory_has_moved_are_refused(algorithm, part):
    loss = make_loss(algorithm)
    update, batch = fused(loss), transitions_of(loss, 8, 0)
    parameters = [p for key, p in loss.named_parameters() if key.startswith(part)]
    vector_to_parameters(parameters_to_vector(parameters), parameters)
    with pytest.raises(ConfigError, match="its memory has moved"):
        update.prepare(batch)


@BOTH
def test_the_parameters_of_each_optimiser_are_views_of_one_tensor(algorithm):
    loss = make_loss(algorithm, layer_norm=True)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in loss.named_parameters()}
    update = fused(loss)
    assert {name: id(parameter) for name, parameter in loss.named_parameters()} == identities
    for key, value in loss.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert list(update.optimizers) == ["actor", "critic", "alpha"][: len(update.optimizers)]
    for adam, (prefix, lr) in zip(update.optimizers.values(), LRS.items(), strict=False):
        [group] = adam.param_groups
        [flat] = group["params"]
        assert group["lr"] == lr
        own = [p for key, p in loss.named_parameters() if key.startswith(prefix)]
        assert flat.numel() == sum(parameter.numel() for parameter in own)
        for parameter in own:
            assert parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            assert parameter.is_contiguous()


@BOTH
def test_the_users_actor_sees_every_step(algorithm):
    loss = make_loss(algorithm)
    actor, batch = loss.actor_network, transitions_of(loss, 16, 0)
    update = fused(loss)
    before = actor(batch.select("observation"))
    torch.manual_seed(0)
    update.step(update.prepare(batch))
    after = actor(batch.select("observation"))
    key = actor.out_keys[0]
    assert not torch.equal(after[key], before[key])
    assert set(map(id, actor.parameters())) == {
        id(p) for name, p in loss.named_parameters() if name.startswith("actor")
    }


def test_the_losss_own_forward_sees_every_step():
    loss = make_loss("sac")
    batch = transitions_of(loss, 16, 0)
    SoftUpdate(loss, tau=0.1)
    loss(batch.clone())  # fills the caches of the loss
    update = fused(loss)
    update.step(update.prepare(batch))
    fresh = make_loss("sac")
    SoftUpdate(fresh, tau=0.1)
    fresh.load_state_dict(loss.state_dict())
    torch.manual_seed(0)
    seen = loss(batch.clone())
    torch.manual_seed(0)
    expected = fresh(batch.clone())
    for key in ("loss_actor", "loss_qvalue"):
        assert torch.equal(seen[key], expected[key])


def test_targets_can_also_be_moved_by_torchrl_even_by_what_was_made_before():
    loss = make_loss("sac")
    targets = SoftUpdate(loss, tau=0.5)  # makes them equal to their networks
    update = fused(loss, tau=0.0)
    batch = transitions_of(loss, 16, 0)
    before = loss.qvalue_network_params.data.clone()
    update.step(update.prepare(batch))
    assert (loss.target_qvalue_network_params.data == before).all()
    targets.step()
    halfway = before.lerp(loss.qvalue_network_params.data, 0.5)
    for key, target in loss.target_qvalue_network_params.items(True, True):
        torch.testing.assert_close(target, halfway[key])
    # And the update goes by them.
    fresh = make_loss("sac")
    fresh.load_state_dict(loss.state_dict())
    again = fused(fresh, tau=0.0)
    observed = []
    for each in (update, again):
        torch.manual_seed(0)
        observed.append(each.step(each.prepare(batch)))
    assert torch.equal(*observed)


@BOTH
def test_a_step_never_looks_at_a_value(algorithm, no_looks):
    own = {"min_alpha": 0.5} if algorithm == "sac" else {}
    _, update, packed = prepared(algorithm, 21, layer_norm=True, **own)
    with no_looks():
        for i, minibatch in enumerate(update.minibatches(packed, 2)):
            update.step(minibatch, update_policy=bool(i))


@pytest.mark.gpu
@BOTH
def test_a_step_on_a_gpu_does_not_wait_for_it(algorithm, gpu_refuses_to_wait):
    torch.set_default_dtype(torch.float32)
    loss = make_loss(algorithm, layer_norm=True, normalized=True).to("cuda")
    loss.qvalue_network.normalizer.to("cuda")
    update = fused(loss)
    packed = update.prepare(transitions_of(loss, 32, 0).to("cuda"))

    def steps() -> list[torch.Tensor]:
        return [update.step(packed, update_policy=bool(i % 2)) for i in range(4)]

    steps()  # lets the libraries set themselves up, and captures
    with gpu_refuses_to_wait():
        observed = steps()
        update._graphs = None
        observed += steps()
    assert torch.stack(observed).isfinite().all()


@BOTH
def test_a_deep_copied_loss_whose_actor_would_not_learn_is_refused(algorithm):
    loss = make_loss(algorithm)
    with pytest.raises(ConfigError, match="other parameters than the loss learns"):
        fused(deepcopy(loss))
    fused(loss.to(torch.float32))  # which moves them together


@pytest.mark.parametrize("update", [partial(FusedSACUpdate, lr_alpha=0.1), FusedTD3Update])
@pytest.mark.parametrize("loss", [None, APPOLoss(make_actor(OBS, ACT), make_critic(OBS))], ids=type)
def test_another_loss_is_refused(update, loss):
    with pytest.raises(ConfigError, match=rf"^Fused\w+: {type(loss).__name__} \(expected "):
        update(loss, tau=0.01, lr_actor=0.1, lr_critic=0.1)


@BOTH
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bfloat16"])
def test_a_dtype_that_products_cannot_have_is_refused_before_memory_moves(algorithm, dtype):
    loss = make_loss(algorithm)
    before = [parameter.data_ptr() for parameter in loss.parameters()]
    with pytest.raises(ConfigError, match=r"matmul_dtype: .*expected None, torch\.bfloat16"):
        fused(loss, matmul_dtype=dtype)
    assert [parameter.data_ptr() for parameter in loss.parameters()] == before
