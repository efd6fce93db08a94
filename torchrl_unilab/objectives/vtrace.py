"""V-trace targets with a trace decay, which TorchRL's estimator lacks."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_unilab.errors import LayoutDtypeError, LayoutShapeError


def check_time_order(rollouts: TensorDictBase, done_key: NestedKey) -> None:
    """Refuse rollouts, [..., T], in which a trajectory that is not done is followed by another.

    Environments end to end would pass for one trajectory. Without ``("collector", "traj_ids")``
    nothing tells them apart. Waits for the rollouts' device.

    Raises:
        LayoutShapeError: They are no rollouts in order of time.
    """
    keys, shape = (("collector", "traj_ids"), ("next", done_key)), rollouts.batch_size
    ids, done = (rollouts.get(key, None) for key in keys)
    if ids is None or done is None:
        return
    ids, done = ids.reshape(shape), done.reshape(*shape, -1).any(-1)
    if ((ids[..., 1:] != ids[..., :-1]) & ~done[..., :-1]).any():
        raise LayoutShapeError(
            f"rollouts: of shape {[*shape]}, where a trajectory that is not done is followed by "
            "another (expected [environments, steps]). Leave reshape out, and cat_results at "
            "'stack'."
        )


def timeout_bootstrap(
    v_t: torch.Tensor, done_t: torch.Tensor, terminated_t: torch.Tensor, *, gamma: float
) -> torch.Tensor:
    """Return the value that an episode still had when a time limit truncated it.

    Added to the reward of its last step, it stands for the rest of the episode (Pardo et al.
    2018, Time limits in reinforcement learning, arXiv 1712.00378, section 3). A terminal
    state earns nothing, even if the time limit falls on the same step.

    Args:
        v_t: Value of the true next observation, for a cut episode the final one, [...].
        done_t: Episode ended with this step, bool [...].
        terminated_t: It ended in a terminal state, bool [...].
        gamma: Discount.

    Returns:
        ``gamma * v_t`` where an episode was cut, else 0, [...].

    Raises:
        LayoutShapeError: The shapes differ.
        LayoutDtypeError: `done_t` or `terminated_t` is not bool, or an argument is no tensor.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.objectives import timeout_bootstrap
        >>> value, done = torch.tensor([2.0, 2.0]), torch.tensor([True, True])
        >>> terminated = torch.tensor([False, True])
        >>> timeout_bootstrap(value, done, terminated, gamma=0.5).tolist()
        [1.0, 0.0]
    """
    _check("timeout_bootstrap", {"done_t": done_t, "terminated_t": terminated_t}, v_t=v_t)
    return (gamma * v_t).masked_fill(~done_t | terminated_t, 0.0)


def _check(what: str, masks: dict[str, torch.Tensor], **values: torch.Tensor) -> None:
    """Refuse what is no tensor, another shape than the first value's, and masks that are not."""
    first = next(iter(values.values()))
    for name, tensor in {**values, **masks}.items():
        if not isinstance(tensor, torch.Tensor):
            raise LayoutDtypeError(
                f"{what}: {name} is {type(tensor).__name__} (expected a tensor). "
                "Call torch.as_tensor() on it."
            )
        if tensor.shape != (shape := first.shape):
            raise LayoutShapeError(
                f"{what}: {name} has shape {tuple(tensor.shape)} (expected {tuple(shape)}). "
                "Pass tensors of one shape."
            )
        if name in masks and tensor.dtype is not torch.bool:
            raise LayoutDtypeError(
                f"{what}: {name} is {tensor.dtype} (expected torch.bool). Call bool() on it."
            )


def vtrace(
    log_rho: torch.Tensor,
    v_tm1: torch.Tensor,
    v_t: torch.Tensor,
    r_t: torch.Tensor,
    done_t: torch.Tensor,
    terminated_t: torch.Tensor,
    *,
    gamma: float,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace value targets and policy-gradient advantages.

    Espeholt et al. 2018 (arXiv 1802.01561), eq. 1 and section 4.2, with
    ``c = lambda_ * min(rho, c_bar)`` (remark 2). With ``lambda_ = 1`` it equals
    `torchrl.objectives.value.functional.vtrace_advantage_estimate`.

    The value after a step is that of the true next observation, so a truncated step
    bootstraps from its final observation and a terminated one from nothing.

    Args:
        log_rho: Log ratio of target to behaviour policy, [..., T], time last.
        v_tm1: Value of the observation acted on, [..., T].
        v_t: Value of the true next observation, [..., T].
        r_t: Reward, [..., T].
        done_t: Episode ended with this step, bool [..., T].
        terminated_t: It ended in a terminal state, bool [..., T].
        gamma: Discount.
        lambda_: Decay of the traces.
        rho_bar: Bound of the importance ratio in the temporal differences.
        c_bar: Bound of the importance ratio in the traces.

    Returns:
        Value targets ``vs`` [..., T] and advantages [..., T], neither with a gradient. An advantage
        bootstraps from ``lambda_ * vs + (1 - lambda_) * v`` of the next step.

    Raises:
        LayoutShapeError: A tensor has another shape than `log_rho`, or there is no step.
        LayoutDtypeError: `done_t` or `terminated_t` is not bool, or an argument is no tensor.

    Examples:
        >>> import torch
        >>> from torchrl_unilab.objectives import vtrace
        >>> one = torch.ones(1, 1)
        >>> no = torch.zeros(1, 1, dtype=torch.bool)
        >>> targets, _ = vtrace(0 * one, 2 * one, 4 * one, one, no, no, gamma=0.5)
        >>> targets.item()
        3.0
    """
    masks = {"done_t": done_t, "terminated_t": terminated_t}
    _check("vtrace", masks, log_rho=log_rho, v_tm1=v_tm1, v_t=v_t, r_t=r_t)
    shape = log_rho.shape
    if not shape or not shape[-1]:
        raise LayoutShapeError(
            f"vtrace: shape {tuple(shape)} (expected [..., time], with a step). Collect at least "
            "one step."
        )
    with torch.no_grad():
        rho = log_rho.exp()
        clipped_rho = rho.clamp(max=rho_bar)
        r_t = r_t + timeout_bootstrap(v_t, done_t, terminated_t, gamma=gamma)
        v_t = v_t.masked_fill(done_t, 0.0)  # not even where it is not finite
        discount_t = gamma * (~done_t).to(v_t.dtype)  # a bool alone would give the default dtype
        delta_t = clipped_rho * (r_t + discount_t * v_t - v_tm1)
        trace_t = discount_t * lambda_ * rho.clamp(max=c_bar)
        correction = torch.zeros_like(delta_t[..., 0])
        corrections = []
        for delta, trace in zip(delta_t.unbind(-1)[::-1], trace_t.unbind(-1)[::-1], strict=True):
            correction = torch.addcmul(delta, trace, correction)
            corrections.append(correction)
        target_tm1 = torch.stack(corrections[::-1], dim=-1) + v_tm1
        # Past the end of the rollout only the next value is known.
        target_t = torch.cat([target_tm1[..., 1:], v_t[..., -1:]], dim=-1)
        target_t = lambda_ * target_t + (1.0 - lambda_) * v_t
        return target_tm1, clipped_rho * (r_t + discount_t * target_t - v_tm1)
