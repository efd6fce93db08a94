from __future__ import annotations

from torchrl.envs.utils import check_env_specs

from tests.examples.add_a_task.hopping_ball import create_ball


def test_the_task_is_an_environment_of_torchrl():
    env = create_ball()
    check_env_specs(env)
    env.close()


def test_it_rewards_height():
    env = create_ball()
    rollout = env.rollout(5)
    height = rollout["next", "observation"][..., :1]
    effort = rollout["action"].abs()
    assert (rollout["next", "reward"] - (height - 0.01 * effort)).abs().max() < 1e-5
    env.close()
