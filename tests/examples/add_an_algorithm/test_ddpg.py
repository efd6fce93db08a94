from __future__ import annotations

import torch

from tests.examples.add_an_algorithm.ddpg import make_trainer


def test_training_moves_the_networks_and_their_targets():
    torch.manual_seed(0)
    trainer = make_trainer(ticks=10)
    before = {key: value.clone() for key, value in trainer.loss_module.state_dict().items()}
    trainer.train()
    trainer.close()
    after = trainer.loss_module.state_dict()
    weights = [key for key in before if key.endswith("weight")]
    assert any("target" in key for key in weights)
    assert [key for key in weights if torch.equal(before[key], after[key])] == []
