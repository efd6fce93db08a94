"""Parts of TorchRL beside the stock storage and environment, and beside ours, with one seed.

`GROUPS` has a case for each part; `outcome` runs one over both and says in a few words what came
of it. ``python -m tests.compatibility`` records all outcomes, the tests compare with the record.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.data.replay_buffers import checkpointers, samplers, writers
from torchrl.envs import GymEnv, TransformedEnv, transforms

from tests.support.transitions import episodes
from torchrl_unilab.data import PackedReplayStorage
from torchrl_unilab.envs import MujocoBatchEnv

Part = Callable[[], Any]
STORAGES = (LazyTensorStorage, PackedReplayStorage)
CAPACITY, ROWS = 50, 70


class Group(NamedTuple):
    """Parts of one kind.

    Attributes:
        title: Its heading on the page.
        parts: Name of a class of TorchRL, to what makes one, or why none is run.
        run: What is done with a part over the stock side (0) and ours (1).
        known: The classes of this kind that TorchRL has.
    """

    title: str
    parts: Mapping[str, Part | str]
    run: Callable[[Part, int], Any]
    known: Callable[[], set[str]]


def outcome(group: Group, name: str) -> str:
    """Run a part over the stock side and over ours, and say what came of it."""
    part = group.parts[name]
    if isinstance(part, str):
        return f"not run: {part}"
    stock, ours = (_attempt(partial(group.run, part, side)) for side in (0, 1))
    if isinstance(stock, str) and isinstance(ours, str):
        return "refused by both" + (f": {ours}" if stock == ours else f": {stock}; {ours}")
    why = WHY.get(name, "")
    if isinstance(ours, str):
        return f"refused: {ours}{why}"
    if isinstance(stock, str):
        return f"runs here; over the stock part: {stock}"
    return "same" if _alike(stock, ours) else f"differs{why}"


def _alike(stock: TensorDictBase, ours: TensorDictBase) -> bool:
    """Whether keys, shapes and values are equal; numbers to five digits."""
    keys = {*stock.keys(True, True)}
    return keys == {*ours.keys(True, True)} and all(
        stock[key].shape == ours[key].shape
        and torch.allclose(stock[key].double(), ours[key].double(), rtol=1e-5, atol=1e-5)
        for key in keys
    )


def _attempt(run: Callable[[], TensorDictBase]) -> TensorDictBase | str:
    torch.manual_seed(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except Exception as error:  # what TorchRL raises for a part that does not fit is anything
        return f"{type(error).__name__}, {str(error).splitlines()[0]}"


def _classes(module: Any, base: type) -> set[str]:
    """Names of the classes of a module that derive from one."""
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value is not base
        and not name.startswith("_")
    }


def _buffer(side: int, kind: Any = TensorDictReplayBuffer, **settings: Any) -> Any:
    """A buffer over the storage of a side, filled past its end."""
    buffer = kind(storage=STORAGES[side](CAPACITY), batch_size=12, **settings)
    for block in episodes(ROWS).set("age", torch.arange(ROWS) % 7).split(10):
        buffer.extend(block)
    return buffer


def _samples(buffer: Any) -> TensorDictBase:
    """Three batches, and the rows as they lie."""
    found = {f"sample {i}": buffer.sample().clone() for i in range(3)}
    if not isinstance(buffer, ReplayBufferEnsemble):
        found["rows"] = buffer.storage[:].clone()
    return TensorDict(found)


def _sampler(part: Part, side: int) -> TensorDictBase:
    return _samples(_buffer(side, sampler=part()))


def _writer(part: Part, side: int) -> TensorDictBase:
    return _samples(_buffer(side, writer=part()))


def _kind(part: Part, side: int) -> TensorDictBase:
    return _samples(part() and part()(side))


def _transform(part: Part, side: int) -> TensorDictBase:
    return _samples(_buffer(side, transform=part()))


def _checkpointer(part: Part, side: int) -> TensorDictBase:
    with tempfile.TemporaryDirectory() as directory:
        saved, loaded = _buffer(side), _buffer(side)
        for buffer in (saved, loaded):
            buffer.storage.checkpointer = part()
        saved.dumps(directory)
        loaded.empty()
        loaded.loads(directory)
        return _samples(loaded)


def _ensemble(side: int) -> Any:
    parts = [_buffer(side, ReplayBuffer) for _ in range(2)]
    return ReplayBufferEnsemble(*parts, batch_size=12)


def _environment(part: Part, side: int) -> TensorDictBase:
    """Thirty steps, with what falls on the way."""
    env: Any = GymEnv("Hopper-v5")
    if side:
        env = MujocoBatchEnv("Hopper-v5", num_envs=1, num_threads=1)
    env.set_seed(0)
    if side:
        env.reset()  # as GymEnv is when it is seeded
    env = TransformedEnv(env, part())
    try:
        step, steps = env.reset(), []
        torch.manual_seed(2)
        for action in 2 * torch.rand(30, 3) - 1:
            spec = env.full_action_spec["action"]
            drawn = action if spec.dtype.is_floating_point else spec.rand()
            step["action"] = drawn.to(spec.dtype).expand(spec.shape)
            done, step = env.step_and_maybe_reset(step)
            steps.append(done.clone())
        return torch.stack(steps).reshape(30)
    finally:
        env.close()


WHY = {
    "DoubleToFloat": ": observations are float32 already",
    "VecNorm": ": ours are float32, and its first variances are differences of near numbers",
}
"""Why a part differs, or is refused."""

ACTING = TensorDictModule(nn.Identity(), in_keys=["action"], out_keys=["action"])
PACKAGE = "needs a package or weights of others"
EXTENSION = "needs TorchRL's C++ extension, see the replay"

SAMPLERS: dict[str, Part | str] = {
    "RandomSampler": samplers.RandomSampler,
    "SamplerWithoutReplacement": samplers.SamplerWithoutReplacement,
    "ConsumingSampler": samplers.ConsumingSampler,
    "StalenessAwareSampler": samplers.StalenessAwareSampler,
    "SliceSampler": partial(samplers.SliceSampler, slice_len=4, traj_key="episode"),
    "SliceSamplerWithoutReplacement": partial(
        samplers.SliceSamplerWithoutReplacement, slice_len=4, traj_key="episode"
    ),
    "StreamingSliceSampler": partial(
        samplers.StreamingSliceSampler, slice_len=4, traj_key="episode"
    ),
    "PromptGroupSampler": "needs groups of prompts",
    "PrioritizedSampler": EXTENSION,
    "PrioritizedSliceSampler": EXTENSION,
    "SamplerEnsemble": "part of ReplayBufferEnsemble, below",
}

WRITERS: dict[str, Part | str] = {
    "RoundRobinWriter": writers.RoundRobinWriter,
    "TensorDictRoundRobinWriter": writers.TensorDictRoundRobinWriter,
    "TensorDictMaxValueWriter": partial(writers.TensorDictMaxValueWriter, rank_key="number"),
    "ImmutableDatasetWriter": writers.ImmutableDatasetWriter,
    "WriterEnsemble": "part of ReplayBufferEnsemble, below",
}

BUFFERS: dict[str, Part | str] = {
    "ReplayBuffer": lambda: partial(_buffer, kind=ReplayBuffer),
    "TensorDictReplayBuffer": lambda: _buffer,
    "HERReplayBuffer": "compared in tests/data/replay/test_contract.py, over goals",
    "ReplayBufferEnsemble": lambda: _ensemble,
    "PrioritizedReplayBuffer": EXTENSION,
    "TensorDictPrioritizedReplayBuffer": EXTENSION,
    "OfflineToOnlineReplayBuffer": "needs a data set",
    "RemoteTensorDictReplayBuffer": "needs torch.distributed.rpc",
    "RayReplayBuffer": PACKAGE,
}

CHECKPOINTERS: dict[str, Part | str] = {
    name: getattr(checkpointers, name)
    for name in (
        "TensorStorageCheckpointer",
        "FlatStorageCheckpointer",
        "NestedStorageCheckpointer",
        "ListStorageCheckpointer",
        "CompressedListStorageCheckpointer",
    )
} | {
    "H5StorageCheckpointer": "needs h5py",
    "StorageEnsembleCheckpointer": "part of ReplayBufferEnsemble, above",
}

T: Any = transforms
OBSERVATION: Any = {"in_keys": ["observation"]}
BOTH_ENDS: Any = {"in_keys": ["observation", ("next", "observation")]}

ON_SAMPLES: dict[str, Part | str] = {
    "BinarizeReward": partial(T.BinarizeReward, in_keys=[("next", "reward")]),
    "CatFrames": partial(T.CatFrames, 2, -1, **OBSERVATION),
    "CatTensors": partial(T.CatTensors, in_keys=["observation", "action"], out_key="both"),
    "ClipTransform": partial(T.ClipTransform, low=0.2, high=0.8, **BOTH_ENDS),
    "Compose": lambda: T.Compose(T.RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])),
    "DTypeCastTransform": partial(
        T.DTypeCastTransform, torch.float32, torch.float64, in_keys=["observation"]
    ),
    "DoubleToFloat": partial(T.DoubleToFloat, **OBSERVATION),
    "ExcludeTransform": partial(T.ExcludeTransform, "number"),
    "FlattenObservation": partial(T.FlattenObservation, -1, -1, **OBSERVATION),
    "MultiStepTransform": partial(T.MultiStepTransform, 3, 0.99),
    "ObservationNorm": partial(T.ObservationNorm, 1.0, 2.0, **BOTH_ENDS),
    "PolicyAgeFilter": partial(T.PolicyAgeFilter, 6, 3, policy_version_key="age"),
    "RenameTransform": partial(T.RenameTransform, ["observation"], ["seen"]),
    "Reward2GoTransform": partial(T.Reward2GoTransform, in_keys=[("next", "reward")]),
    "RewardClipping": partial(T.RewardClipping, 0.2, 0.8, in_keys=[("next", "reward")]),
    "RewardScaling": partial(T.RewardScaling, 1.0, 2.0, in_keys=[("next", "reward")]),
    "SelectTransform": partial(T.SelectTransform, "observation", "action"),
    "SignTransform": partial(T.SignTransform, in_keys=[("next", "reward")]),
    "SqueezeTransform": partial(T.SqueezeTransform, -1, in_keys=["number"]),
    "UnsqueezeTransform": partial(T.UnsqueezeTransform, -1, in_keys=["number"]),
    "VecNorm": partial(T.VecNorm, **OBSERVATION),
}

RUN_ON_STEPS: dict[str, Part] = {
    "ActionDiscretizer": partial(T.ActionDiscretizer, 3),
    "ActionScaling": partial(T.ActionScaling),
    "BinarizeReward": T.BinarizeReward,
    "CatFrames": partial(T.CatFrames, 3, -1, **OBSERVATION),
    "CatTensors": partial(T.CatTensors, in_keys=["observation"], out_key="all"),
    "ClipTransform": partial(T.ClipTransform, low=-0.1, high=0.1, **OBSERVATION),
    "Compose": lambda: T.Compose(T.StepCounter(), T.RewardSum()),
    "ConditionalPolicySwitch": partial(T.ConditionalPolicySwitch, ACTING, lambda _: False),
    "ConditionalSkip": partial(T.ConditionalSkip, lambda td: torch.zeros(td.shape, dtype=bool)),
    "DTypeCastTransform": partial(
        T.DTypeCastTransform, torch.float32, torch.float64, in_keys=["reward"]
    ),
    "DeviceCastTransform": partial(T.DeviceCastTransform, "cpu"),
    "DoubleToFloat": partial(T.DoubleToFloat, **OBSERVATION),
    "ExcludeTransform": partial(T.ExcludeTransform, "observation"),
    "ExpandAs": partial(T.ExpandAs, "reward", "observation", "wide"),
    "FiniteTensorDictCheck": T.FiniteTensorDictCheck,
    "FlattenObservation": partial(T.FlattenObservation, -1, -1, **OBSERVATION),
    "FrameSkipTransform": partial(T.FrameSkipTransform, 2),
    "Hash": partial(
        T.Hash, ["observation"], ["hash"], hash_fn=lambda value: value.sum(-1, keepdim=True)
    ),
    "InitTracker": T.InitTracker,
    "ModuleTransform": partial(T.ModuleTransform, module=ACTING, inverse=True),
    "NextObservationDelta": partial(T.NextObservationDelta, **OBSERVATION),
    "NoopResetEnv": partial(T.NoopResetEnv, 2, random=False),
    "ObservationNorm": partial(T.ObservationNorm, 1.0, 2.0, **OBSERVATION),
    "RNDTransform": partial(T.RNDTransform, nn.Linear(11, 2), nn.Linear(11, 2), **OBSERVATION),
    "RandomTruncationTransform": lambda: T.Compose(
        T.StepCounter(), T.RandomTruncationTransform(3, 9, prob=1.0)
    ),
    "RemoveEmptySpecs": T.RemoveEmptySpecs,
    "RenameTransform": partial(T.RenameTransform, ["observation"], ["seen"]),
    "RewardClipping": partial(T.RewardClipping, -0.5, 0.5),
    "RewardScaling": partial(T.RewardScaling, 1.0, 2.0),
    "RewardSum": T.RewardSum,
    "SelectTransform": partial(T.SelectTransform, "observation"),
    "SignTransform": partial(T.SignTransform, in_keys=["reward"]),
    "SqueezeTransform": partial(T.SqueezeTransform, -1, in_keys=["reward"]),
    "Stack": partial(T.Stack, in_keys=["observation"], out_key="stacked"),
    "StepCounter": partial(T.StepCounter, 7),
    "TargetReturn": partial(T.TargetReturn, 100.0),
    "TensorDictPrimer": lambda: T.TensorDictPrimer(memory=Unbounded(shape=(2,))),
    "TerminateTransform": partial(
        T.TerminateTransform, lambda td: td["observation"][..., :1] < 1.2
    ),
    "TimeMaxPool": partial(T.TimeMaxPool, in_keys=["observation"], T=2),
    "TrajCounter": T.TrajCounter,
    "UnaryTransform": partial(T.UnaryTransform, ["observation"], ["out"], fn=torch.tanh),
    "UnsqueezeTransform": partial(T.UnsqueezeTransform, -1, **OBSERVATION),
    "VecNorm": partial(T.VecNorm, **OBSERVATION),
    "VecNormV2": partial(T.VecNormV2, **OBSERVATION),
}

NOT_ON_STEPS = {
    "for samples of robots' data sets": "ActionChunkTransform",
    "needs discrete actions": "ActionMask DiscreteActionProjection",
    "needs text": "ActionTokenizerTransform Tokenizer",
    "for environments that reset themselves; ours reset when asked": "AutoResetTransform",
    "changes the batch size, which differs": "BatchSizeTransform",
    "for samples of recurrent policies": "BurnInTransform",
    "needs pixels": "CenterCrop Crop DecodeVideoTransform GrayScale PermuteTransform Resize "
    "ToTensorImage",
    "for Atari": "EndOfLifeTransform",
    "for actions of several dimensions": "FlattenAction",
    "for several rewards": "LineariseRewards",
    "needs TorchRL's robots or cells": "MacroPrimitiveTransform",
    "for beliefs over states": "MeanActionSelector",
    "for chunks of actions": "MultiAction",
    "for samples, below": "MultiStepTransform PolicyAgeFilter Reward2GoTransform",
    "for samples": "NextStateReconstructor RandomCropTensorDict",
    "abstract, or for other environments": "ObservationTransform",
    "needs a GPU": "PinMemoryTransform",
    PACKAGE: "R3MTransform RayTransform VC1Transform VIPRewardTransform VIPTransform",
    "for environments that tell success": "SuccessReward",
    "measures time, which differs": "Timer",
    "for Gymnasium's vector environments": "VecGymEnvTransform",
    "for gSDE's policies": "gSDENoise",
}
"""Transforms that are not run on steps: why, to their names."""

_NOT_RUN = ((name, why) for why, names in NOT_ON_STEPS.items() for name in names.split())
ON_STEPS: dict[str, Part | str] = dict(sorted([*RUN_ON_STEPS.items(), *_NOT_RUN]))

GROUPS = [
    Group("Samplers", SAMPLERS, _sampler, lambda: _classes(samplers, samplers.Sampler)),
    Group("Writers", WRITERS, _writer, lambda: _classes(writers, writers.Writer)),
    Group("Replay buffers", BUFFERS, _kind, lambda: set(BUFFERS)),
    Group(
        "Checkpointers",
        CHECKPOINTERS,
        _checkpointer,
        lambda: _classes(checkpointers, checkpointers.StorageCheckpointerBase),
    ),
    Group("Transforms of samples", ON_SAMPLES, _transform, lambda: set(ON_SAMPLES)),
    Group("Transforms of steps", ON_STEPS, _environment, lambda: _classes(T, T.Transform)),
]
"""The first five over `PackedReplayStorage`, the last around `MujocoBatchEnv`."""
