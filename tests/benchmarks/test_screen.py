from __future__ import annotations

import dataclasses

import pytest
import torch
from tensordict import TensorDict

from tests.benchmarks.batched_appo import BatchedLearner, Member
from tests.benchmarks.screen import Screen
from torchrl_unilab.modules import ObservationNormalizer, make_actor, make_critic
from torchrl_unilab.objectives import APPOLoss
from torchrl_unilab.trainers import APPOConfig
from torchrl_unilab.trainers.loss_updates import APPOStepper

pytestmark = pytest.mark.usefixtures("double_precision")

OBS, ACT, ENVS, STEPS = 5, 3, 6, 8
SETTINGS = {
    "num_envs": ENVS,
    "num_steps": STEPS,
    "epochs": 3,
    "minibatches": 5,
    "hidden": (16, 8),
    "lr": 3e-3,
    "log_std": -0.4,
    "entropy_coeff": 0.01,
    "critic_coeff": 0.7,
}


def _rollouts(seeds: int, *, count: int = 2) -> list[dict[str, torch.Tensor]]:
    """Rollouts of policies that are not the learner's, as `BatchedLearner.update` takes them."""
    torch.manual_seed(7)
    found = []
    for _ in range(count):
        one = (seeds, 1, ENVS, STEPS)
        rollout = {
            "observation": 3.0 * torch.randn(seeds, OBS, ENVS, STEPS) + 1.0,
            "next_observation": 3.0 * torch.randn(seeds, OBS, ENVS, STEPS) + 1.0,
            "action": torch.randn(seeds, ACT, ENVS, STEPS),
            "log_prob": -2.5 + torch.randn(one),
            "reward": torch.randn(one),
            "done": torch.rand(one) < 0.3,
        }
        rollout["terminated"] = rollout["done"] & (torch.rand(one) < 0.5)
        found.append(rollout)
    return found


def _orders(config: APPOConfig) -> list[torch.Tensor]:
    torch.manual_seed(8)
    return [torch.randperm(ENVS * STEPS) for _ in range(config.epochs)]


def _as_trained(config: APPOConfig, seed: int, rollouts: list[dict[str, torch.Tensor]]):
    """What the package's own loss and stepper make of one seed's rollouts: parameters and rate."""
    torch.manual_seed(seed)
    normalizer = ObservationNormalizer(OBS)
    settings = {"hidden": config.hidden, "normalizer": normalizer}
    actor = make_actor(OBS, ACT, log_std=config.log_std, **settings)
    loss = APPOLoss(
        actor,
        make_critic(OBS, **settings),
        value_clip=config.value_clip,
        clip_epsilon=config.clip_epsilon,
        entropy_coeff=config.entropy_coeff,
        critic_coeff=config.critic_coeff,
        gamma=config.gamma,
        lambda_=config.lambda_,
        target_update_freq=config.epochs * config.minibatches,
    )
    stepper = APPOStepper(loss, config)
    for rollout in rollouts:
        own = {key: value[seed].permute(1, 2, 0) for key, value in rollout.items()}
        after = {"observation": own["next_observation"], "reward": own["reward"]}
        after |= {"reward": own["reward"] * config.reward_scale}
        after |= {"done": own["done"], "terminated": own["terminated"]}
        entries = {"observation": own["observation"], "action": own["action"], "next": after}
        batch = TensorDict(entries, batch_size=[ENVS, STEPS])
        batch["action_log_prob"] = own["log_prob"].squeeze(-1)
        normalizer.update(batch["observation"])
        pool = loss.estimate(batch).reshape(-1)
        for order in _orders(config):
            for minibatch in pool[order].chunk(config.minibatches):
                stepper.step(None, minibatch)
    head = actor[0]
    parts = [*head.net.parameters(), head.log_std, *loss.critic_network.parameters()]
    return torch.cat([part.detach().flatten() for part in parts]), stepper.lr


def test_members_learn_each_by_its_own_settings():
    first = APPOConfig(**SETTINGS)
    own = {"lr": 1e-3, "gamma": 0.9, "lambda_": 0.8, "clip_epsilon": 0.1, "log_std": 0.1}
    own |= {"max_grad_norm": 0.2, "desired_kl": 0.05, "entropy_coeff": 0.1, "reward_scale": 0.5}
    configs = [first, dataclasses.replace(first, **own, critic_coeff=0.3)]
    rollouts = _rollouts(2)
    members = [Member(seed, config) for seed, config in enumerate(configs)]
    learner = BatchedLearner((OBS, ACT), members)
    for rollout in rollouts:
        learner.update(rollout, _orders(first))
    for seed, config in enumerate(configs):
        parameters, lr = _as_trained(config, seed, rollouts)
        torch.testing.assert_close(learner.policies.flat[seed], parameters, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(learner.lr[seed, 0], lr, check_dtype=False, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("max_grad_norm", [0.3, 100.0])
@pytest.mark.parametrize("seeds", [[0], [0, 1]], ids=str)
def test_each_seed_learns_as_by_the_loss_and_its_stepper(seeds, max_grad_norm):
    config = APPOConfig(**SETTINGS, max_grad_norm=max_grad_norm)
    rollouts = _rollouts(len(seeds))
    learner = BatchedLearner((OBS, ACT), [Member(seed, config) for seed in seeds])
    for rollout in rollouts:
        learner.update(rollout, _orders(config))
    for seed in seeds:
        parameters, lr = _as_trained(config, seed, rollouts)
        close = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(learner.policies.flat[seed], parameters, **close)
        torch.testing.assert_close(learner.lr[seed, 0], lr, check_dtype=False, rtol=1e-6, atol=0.0)


def test_settings_that_it_does_not_know_are_refused():
    with pytest.raises(ValueError, match=r"'pool': 2.*expected"):
        BatchedLearner((OBS, ACT), [Member(0, APPOConfig(pool=2))])


def test_members_of_different_sizes_are_refused():
    members = [Member(0, APPOConfig()), Member(0, APPOConfig(epochs=3))]
    with pytest.raises(ValueError, match=r"'epochs': 3.*Train them apart"):
        BatchedLearner((OBS, ACT), members)


def _screen() -> Screen:
    torch.set_default_dtype(torch.float32)
    config = APPOConfig(num_envs=4, num_steps=50)
    return Screen("Swimmer-v5", [Member(seed, config) for seed in (0, 1)])


def test_staggered_first_episodes_do_not_count():
    trained = _screen()
    ended = sum(int(trained.collect()["done"].sum()) for _ in range(20))
    assert ended == 8
    assert trained.last_episodes() == [[None, None], [None, None]]
    trained.env.close()


def test_noise_and_discount_are_what_each_member_says(monkeypatch):
    monkeypatch.setattr(Screen, "evaluate", lambda _: [])
    torch.set_default_dtype(torch.float32)
    plain = APPOConfig(num_envs=8, num_steps=200, epochs=1, minibatches=1)
    other = dataclasses.replace(
        plain, noise_correlation=0.9, final_log_std=-2.0, gamma=0.9, final_gamma=0.99
    )
    screened = Screen("Swimmer-v5", [Member(0, plain), Member(0, other)])
    drawn, log_prob = [], screened.behaviour.log_prob

    def recording(noise: torch.Tensor) -> torch.Tensor:
        drawn.append(noise)
        return log_prob(noise)

    monkeypatch.setattr(screened.behaviour, "log_prob", recording)
    screened.train(2 * screened.config.frames_per_rollout)
    noise = torch.stack(drawn)  # [T, S, size, n]
    followed = (noise[1:] * noise[:-1]).mean((0, 2, 3))
    torch.testing.assert_close(followed, torch.tensor([0.0, 0.9]), atol=0.1, rtol=0)
    highest = screened.learner.policies.log_std.amax(1)
    assert highest[0] > -0.1
    assert highest[1] == -2.0
    assert screened.learner.discounts == pytest.approx([0.99, 1 - (0.1 * 0.01) ** 0.5])
    screened.env.close()


def test_the_actor_lags_by_one_update(monkeypatch):
    monkeypatch.setattr(Screen, "evaluate", lambda _: [])  # takes longer than all else
    trained = _screen()
    before = trained.learner.policies.flat.clone()
    frames = trained.config.frames_per_rollout
    trained.train(frames)
    assert torch.equal(trained.behaviour.flat, before)
    after = trained.learner.policies.flat.clone()
    trained.train(frames)
    assert torch.equal(trained.behaviour.flat, after)
    assert not torch.equal(trained.learner.policies.flat, after)
    trained.env.close()
