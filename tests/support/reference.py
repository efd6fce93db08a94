"""The losses of APPO, SAC and TD3 as their papers write them: float64, no autograd, no module.

Each function takes the parameters of a loss by the names of its `state_dict`, a batch whose
observations are normalised, and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDictBase

State = Mapping[str, torch.Tensor]


def normalized(
    observation: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    """Observations at zero mean and unit variance, within [-10, 10]."""
    return ((observation - mean) / (variance + 1e-8).sqrt()).clamp(-10.0, 10.0)


def mlp(state: State, prefix: str, x: torch.Tensor, activation: str = "relu") -> torch.Tensor:
    """Linear layers under `prefix`, with an activation between them."""
    names = [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
    layers = sorted({int(name.split(".")[0]) for name in names})
    for layer in layers:
        weight, bias = (state[f"{prefix}{layer}.{name}"] for name in ("weight", "bias"))
        x = x @ weight.mT + (bias.unsqueeze(-2) if bias.ndim == 2 else bias)
        if layer != layers[-1]:
            x = getattr(torch, activation)(x)
    return x


def _values(state: State, name: str, observation: torch.Tensor, action: torch.Tensor):
    """What two critics say, [2, n]."""
    return mlp(state, f"{name}.net.", torch.cat([observation, action], -1)).squeeze(-1)


def _of_critics(state: State, batch: TensorDictBase, next_value: torch.Tensor, gamma: float):
    """The critics' loss, and the means of what they say and of how far it is from its target."""
    after = batch["next"]
    bootstrap = gamma * ~after["terminated"].squeeze(-1) * next_value
    target = after["reward"].squeeze(-1) + bootstrap
    values = _values(state, "qvalue_network_params", batch["observation"], batch["action"])
    error = values - target
    loss = error.square().mean(1).sum()
    return {"loss_qvalue": loss, "q_value": values.mean(), "td_error": error.abs().mean()}


def td3(
    state: State,
    batch: TensorDictBase,
    noise: torch.Tensor,
    *,
    low: torch.Tensor,
    high: torch.Tensor,
    gamma: float,
    target_noise: float,
    target_noise_clip: float,
) -> dict[str, torch.Tensor]:
    """TD3's losses (arXiv 1802.09477, algorithm 1); noise in halves of the action's range."""
    center, reach = (high + low) / 2, (high - low) / 2

    def act(name: str, observation: torch.Tensor) -> torch.Tensor:
        return center + reach * mlp(state, f"{name}.net.", observation).tanh()

    after = batch["next", "observation"]
    step = (noise * target_noise).clamp(-target_noise_clip, target_noise_clip) * reach
    action = (act("target_actor_network_params", after) + step).clamp(low, high)
    next_value = _values(state, "target_qvalue_network_params", after, action).amin(0)
    now = act("actor_network_params", batch["observation"])
    judged = _values(state, "qvalue_network_params", batch["observation"], now)
    return {**_of_critics(state, batch, next_value, gamma), "loss_actor": -judged[0].mean()}


def sac(
    state: State,
    batch: TensorDictBase,
    noise: torch.Tensor,
    *,
    low: torch.Tensor,
    high: torch.Tensor,
    gamma: float,
    log_std_bounds: tuple[float, float] = (-5.0, 2.0),
) -> dict[str, torch.Tensor]:
    """SAC's losses (arXiv 1812.05905, eq. 5, 9 and 18), for a target entropy of -1 per action.

    The entropies are of actions within [-1, 1]; `noise` is [2, n, actions], of the next
    observations first.
    """
    center, reach = (high + low) / 2, (high - low) / 2
    least, most = log_std_bounds
    alpha = state["log_alpha"].exp()

    def act(observation: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc, raw = mlp(state, "actor_network_params.module.0.net.", observation).chunk(2, -1)
        log_std = least + (most - least) * (raw.tanh() + 1) / 2
        y = (loc + log_std.exp() * z).tanh()
        log_p = -z.square() / 2 - log_std - math.log(2 * math.pi) / 2 - (1 - y.square()).log()
        return center + reach * y, log_p.sum(-1)

    volume = reach.log().sum()  # by which the density per unit of action is smaller
    after = batch["next", "observation"]
    action, log_p = act(after, noise[0])
    next_value = _values(state, "target_qvalue_network_params", after, action).amin(0)
    next_value = next_value - alpha * (log_p - volume)
    action, log_p = act(batch["observation"], noise[1])
    judged = _values(state, "qvalue_network_params", batch["observation"], action).amin(0)
    excess = -log_p.mean() + noise.shape[-1]  # of the entropy over its target
    return {
        **_of_critics(state, batch, next_value, gamma),
        "loss_actor": (alpha * (log_p - volume) - judged).mean(),
        "loss_alpha": state["log_alpha"] * excess,
        "alpha": alpha,
        "entropy": -(log_p - volume).mean(),
    }


def appo(
    state: State,
    batch: TensorDictBase,
    *,
    gamma: float,
    lambda_: float,
    clip_epsilon: float,
    critic_coeff: float,
    rho_bar: float,
    c_bar: float,
) -> dict[str, torch.Tensor]:
    """IMPACT's losses with V-trace (arXiv 1912.00167, eq. 4; 1802.01561, eq. 1), of all of [B, T].

    `batch` has ``action_log_prob`` as the behaviour policy's. The critic has not moved since
    `APPOLoss.estimate`, so that clipping its move has no effect.
    """

    def policy(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        loc = mlp(state, f"{name}.module.0.net.", batch["observation"], "tanh")
        std = state[f"{name}.module.0.log_std"].exp().expand_as(loc)
        z = (batch["action"] - loc) / std
        log_p = (-z.square() / 2 - std.log() - math.log(2 * math.pi) / 2).sum(-1)
        return loc, std, log_p

    def value(observation: torch.Tensor) -> torch.Tensor:
        return mlp(state, "critic_network.net.", observation, "tanh").squeeze(-1)

    after = batch["next"]
    reward, done, terminated = (after[key].squeeze(-1) for key in ("reward", "done", "terminated"))
    target_loc, target_std, log_t = policy("target_actor_network")
    loc, std, log_p = policy("actor_network")
    log_b = batch["action_log_prob"]
    rho = (log_t - log_b).exp()
    v, v_next = value(batch["observation"]), value(after["observation"])
    reward = reward + gamma * v_next * (done & ~terminated)
    discount = gamma * ~done
    clipped_rho, trace = rho.clamp(max=rho_bar), lambda_ * rho.clamp(max=c_bar)
    delta = clipped_rho * (reward + discount * v_next - v)
    targets, advantages = torch.zeros_like(v), torch.zeros_like(v)
    correction, following = torch.zeros_like(v[:, 0]), v_next[:, -1]
    for t in reversed(range(v.shape[1])):
        bootstrap = lambda_ * following + (1 - lambda_) * v_next[:, t]
        advantages[:, t] = clipped_rho[:, t] * (reward[:, t] + discount[:, t] * bootstrap - v[:, t])
        correction = delta[:, t] + discount[:, t] * trace[:, t] * correction
        targets[:, t] = following = v[:, t] + correction
    advantage = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (log_b - log_t).exp().clamp(max=1.0) * (log_p - log_b).exp()
    clipped = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    kl = (std / target_std).log() - 0.5
    kl = kl + (target_std.square() + (target_loc - loc).square()) / (2 * std.square())
    entropy = (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean()
    return {
        "loss_objective": -torch.minimum(ratio * advantage, clipped * advantage).mean(),
        "loss_critic": 0.5 * critic_coeff * (v - targets).square().mean(),
        "entropy": entropy,
        "kl": kl.sum(-1).mean(),
        "clip_fraction": (ratio != clipped).double().mean(),
        "rho_clip_fraction": (rho > rho_bar).double().mean(),
    }
