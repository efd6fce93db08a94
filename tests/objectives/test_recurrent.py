"""Recurrent networks, whose samples are single steps with the states that were collected."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule, ProbabilisticActor

from torchrl_unilab.objectives import APPOLoss

OBS, HIDDEN, ENVS, STEPS = 3, 4, 2, 6


def _core(kind: type[LSTMModule | GRUModule], prefix: str) -> LSTMModule | GRUModule:
    states = [f"{prefix}_{n}" for n in range(2 if kind is LSTMModule else 1)]
    return kind(
        input_size=OBS,
        hidden_size=HIDDEN,
        in_keys=["observation", *states],
        out_keys=[f"{prefix}_out", *(("next", state) for state in states)],
    )


def _collect(loss: APPOLoss) -> TensorDictBase:
    """Return a rollout of steps taken one by one, in which an episode ends."""
    read = {*loss.actor_network.in_keys, *loss.critic_network.in_keys}
    states = read - {"observation", "is_init"}
    td = TensorDict(is_init=torch.ones(ENVS, 1, dtype=torch.bool), batch_size=[ENVS])
    td.update({name: torch.zeros(ENVS, 1, HIDDEN) for name in states})
    steps = []
    for step in range(STEPS):
        td["observation"] = torch.randn(ENVS, OBS)
        with torch.no_grad():
            loss.critic_network(loss.actor_network(td))
        done = torch.full((ENVS, 1), step == 2)
        td["next", "observation"] = torch.randn(ENVS, OBS)
        td["next", "reward"] = torch.randn(ENVS, 1)
        td["next"].update({"done": done, "terminated": done, "is_init": done})
        steps.append(td)
        td = TensorDict({name: td["next", name] for name in states}, batch_size=[ENVS])
        td["is_init"] = done
    return torch.stack(steps, 1)


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_each_sample_of_a_recurrent_network_starts_from_the_state_that_was_collected(kind):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(HIDDEN, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictSequential(
            _core(kind, "actor"), TensorDictModule(head, ["actor_out"], ["loc", "scale"])
        ),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    value = TensorDictModule(nn.Linear(HIDDEN, 1), ["critic_out"], ["state_value"])
    loss = APPOLoss(actor, TensorDictSequential(_core(kind, "critic"), value), clip_epsilon=0.0)
    rollout = _collect(loss)

    estimated = loss.estimate(rollout)
    shuffled = estimated.reshape(-1)[torch.randperm(ENVS * STEPS)]
    losses = loss(shuffled)

    torch.testing.assert_close(estimated["target_log_prob"], rollout["action_log_prob"])
    torch.testing.assert_close(estimated["state_value"], rollout["state_value"].squeeze(-1))
    error = (shuffled["state_value"] - shuffled["value_target"]).square().mean()
    torch.testing.assert_close(losses["loss_critic"], 0.5 * error)
    assert losses["kl"] < 1e-6  # the policy is its target
