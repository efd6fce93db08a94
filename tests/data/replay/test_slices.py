"""`PackedSliceSampler` knows what TorchRL's `SliceSampler` finds anew each time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

from torchrl_unilab.data import PackedReplayStorage, PackedReplayWriter, PackedSliceSampler
from torchrl_unilab.data.replay import slices
from torchrl_unilab.errors import ConfigError, PositionError, UsageError
from torchrl_unilab.processes import this_process
from torchrl_unilab.shm.rows import SharedRows
from torchrl_unilab.shm.shards import LOADING

CAPACITY = 12
KEYS = pytest.mark.parametrize(
    "key", [{"end_key": ("next", "done")}, {"traj_key": "episode"}, {}], ids=["end", "traj", "auto"]
)


def _rows(dones: list[bool], first: int = 0) -> TensorDict:
    """Steps of episodes that end where `dones` says."""
    done = torch.tensor(dones).unsqueeze(1)
    flags = {"done": done, "terminated": done & False, "truncated": done}
    count = len(dones)
    return TensorDict(
        {
            "episode": first + done.squeeze(1).long().cumsum(0) - done.squeeze(1).long(),
            "step": torch.arange(count),
            "is_init": done.roll(1),
            "next": flags,
        },
        [count],
    )


def _buffer(sampler: SliceSampler, storage: PackedReplayStorage, size: int = 24) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage, sampler=sampler, writer=PackedReplayWriter(), batch_size=size
    )


def _assert_same_boundaries(ours: SliceSampler, stock: SliceSampler, storage: object) -> None:
    torch.testing.assert_close(
        ours._get_stop_and_length(storage), stock._get_stop_and_length(storage), rtol=0, atol=0
    )


DONES = st.lists(st.booleans(), min_size=2, max_size=CAPACITY)  # TorchRL fails with one row
CHANGES = st.one_of(
    st.tuples(st.just("extend"), DONES),
    st.tuples(st.just("extend all"), DONES),  # the rows that were looked at are overwritten
    st.tuples(st.just("rewrite"), DONES),
    st.tuples(st.just("replace"), DONES),
)


@KEYS
@given(changes=st.lists(CHANGES, min_size=1, max_size=8))
def test_boundaries_are_torchrls_after_any_change(key, changes):
    ours, stock = PackedSliceSampler(slice_len=2, **key), SliceSampler(slice_len=2, **key)
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        buffer = _buffer(ours, storage)
        buffer.extend(_rows([False, True, False]))
        for i, (how, dones) in enumerate(changes):
            rows = _rows(dones, first=10 * i)
            if how == "extend":
                buffer.extend(rows)
            elif how == "extend all":
                for _ in range(2 * CAPACITY // len(rows)):
                    buffer.extend(rows)
            elif how == "rewrite":
                count = min(len(rows), len(storage))
                buffer[torch.arange(count)] = rows[:count]
            else:
                storage.load_rows(rows)
            _assert_same_boundaries(ours, stock, storage)


@KEYS
@pytest.mark.parametrize(
    "settings",
    [
        {"slice_len": 3},
        {"num_slices": 8},
        {"slice_len": 6, "strict_length": False},
        {"slice_len": 6, "strict_length": False, "pad_output": True},
        {"slice_len": 3, "span": True, "strict_length": False, "init_key": None},
        {"slice_len": 3, "truncated_key": None},
        {"slice_len": 3, "truncated_key": "cut", "init_key": None},
    ],
    ids=str,
)
def test_batches_for_a_seed_are_torchrls(key, settings):
    batches = []
    for kind in (PackedSliceSampler, SliceSampler):
        with PackedReplayStorage(40, example=_rows([False])[0]) as storage:
            buffer = _buffer(kind(**key, **settings), storage)
            torch.manual_seed(0)
            drawn = []
            for i in range(5):  # it is full after four
                buffer.extend(_rows([j % 5 == 4 for j in range(11)], first=10 * i))
                drawn.append(buffer.sample())
            batches.append(drawn)
    for one, other in zip(*batches, strict=True):
        assert set(one.keys(True)) == set(other.keys(True))
        assert (one == other).all()


@KEYS
def test_only_new_rows_are_looked_at(key, monkeypatch):
    looked: list[int] = []
    numbered = slices._numbered

    def count(column: torch.Tensor, first: int, end: int) -> torch.Tensor:
        looked.append(end - first)
        return numbered(column, first, end)

    monkeypatch.setattr(slices, "_numbered", count)
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        buffer = _buffer(PackedSliceSampler(slice_len=1, **key), storage)
        for rows in (5, 4, 3, 4, 2):
            buffer.extend(_rows([True] * rows))
            buffer.sample()
        before = 0 if "end_key" in key else 1  # with the newest of the rows before
        assert looked == [5, *(rows + before for rows in (4, 3, 4, 2))]
        buffer.sample()
        assert looked[-1] == before


def test_a_change_that_a_buffer_makes_through_views_is_noticed():
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        ours = PackedSliceSampler(slice_len=1, traj_key="episode")
        buffer = _buffer(ours, storage)
        buffer.extend(_rows([False] * 6))
        assert ours._get_stop_and_length(storage)[2].tolist() == [6]
        buffer.set_at_("episode", torch.arange(6), slice(0, 6))
        assert ours._get_stop_and_length(storage)[2].tolist() == [1] * 6


def test_what_is_known_of_a_storage_is_neither_of_another_nor_pickled():
    ours = PackedSliceSampler(slice_len=1, end_key=("next", "done"))
    stock = SliceSampler(slice_len=1, end_key=("next", "done"))
    for dones in ([True, False, True, False], [False, True, True, False]):
        with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
            storage.append(_rows(dones))
            _assert_same_boundaries(ours, stock, storage)
    assert pickle.loads(pickle.dumps(ours))._known == ()


def test_other_storages_are_left_to_torchrl():
    storage = LazyTensorStorage(CAPACITY)
    rows = _rows([False, True, True])
    storage.set(range(3), rows)
    _assert_same_boundaries(
        PackedSliceSampler(slice_len=1, traj_key="episode"),
        SliceSampler(slice_len=1, traj_key="episode"),
        storage,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"end_keys": [("next", "done")]},
        {"end_key": ("next", "done"), "cache_values": True},
        {"traj_key": "episode", "cache_values": True},
        {"ends": torch.arange(6) % 3 == 2, "cache_values": True},
    ],
    ids=str,
)
def test_what_it_does_not_look_for_is_left_to_torchrl_where_rows_do_not_take_turns(settings):
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        storage.append(_rows([False, True, False, False, True, False]))
        ours, stock = (kind(slice_len=1, **settings) for kind in (PackedSliceSampler, SliceSampler))
        _assert_same_boundaries(ours, stock, storage)
        assert _buffer(ours, storage).sample()["step"].max() <= 5


_USE_OURS = "slices of a replay with writers={}: its .*Use PackedSliceSampler"


@pytest.mark.parametrize(
    ("sampler", "settings", "named"),
    [
        (SliceSampler, {"traj_key": "episode"}, _USE_OURS),
        (SliceSampler, {"end_key": ("next", "done")}, _USE_OURS),
        (
            PackedSliceSampler,
            {"end_keys": [("next", "done")]},
            r"by \(\('next', 'done'\),\) .*Give end_key=",
        ),
        (PackedSliceSampler, {"traj_key": "gone"}, r"by 'gone' \(expected one key .*Give end_key="),
        (
            PackedSliceSampler,
            {"ends": torch.ones(4).bool(), "cache_values": True},
            r"by None \(expected .* no end_keys, ends, trajectories or use_gpu\)\.",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("writers", [1, 2])
def test_what_needs_positions_in_the_order_of_time_is_refused_without(
    writers, sampler, settings, named
):
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0], writers=writers) as storage:
        buffer = _buffer(sampler(slice_len=1, **settings), storage)
        for writer in range(writers):  # TorchRL fails with one row
            storage.use_writer(writer)
            storage.add(_rows([False] * 4))
            storage.rows.leave()
        with pytest.raises(ConfigError, match=named.format(writers)):
            buffer.sample()


@KEYS
def test_an_emptied_storage_is_refused(key):
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        buffer = _buffer(PackedSliceSampler(slice_len=2, **key), storage)
        buffer.extend(_rows([False] * 4))
        buffer.sample()
        storage._empty()
        with pytest.raises(UsageError, match=r"^cannot sample slices: 0 rows"):
            buffer.sample()


def _begin_to_clear(rows: SharedRows) -> None:
    """Leave rows as a process does that is killed when it begins to clear them."""
    rows._words[LOADING] = this_process()


def _after_look(
    number: int, action: Callable[[], object], rows: SharedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have another process's action follow one of the looks at what there is."""
    looks = count(1)

    def followed(look: Callable[[], Any]) -> Callable[[], Any]:
        def looked() -> Any:
            found = look()
            if next(looks) == number:
                action()
            return found

        return looked

    for name in ("window", "length"):
        monkeypatch.setattr(rows, name, followed(getattr(rows, name)))


@pytest.mark.parametrize("empty", [SharedRows.clear, _begin_to_clear])
@pytest.mark.parametrize("number", range(1, 4))  # as often as there is a look
def test_rows_that_go_away_while_slices_are_sampled_are_missed(number, empty, monkeypatch):
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        buffer = _buffer(PackedSliceSampler(slice_len=2, traj_key="episode"), storage)
        buffer.extend(_rows([False] * CAPACITY))
        buffer.sample()
        rows = storage.rows
        _after_look(number, lambda: empty(rows), rows, monkeypatch)
        with pytest.raises(PositionError, match=r"^no row \d+: 0 are written"):
            buffer.sample()


@pytest.mark.parametrize(
    ("number", "error"), [(1, "cannot sample slices: 0 rows"), (2, "no row 5: 5 are written")]
)
def test_slices_do_not_go_round_fewer_rows_that_take_their_place(number, error, monkeypatch):
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        buffer = _buffer(PackedSliceSampler(slice_len=CAPACITY, traj_key="episode"), storage)
        buffer.extend(_rows([False] * CAPACITY))
        buffer.sample()
        replace = partial(storage.load_rows, _rows([False] * 5))
        _after_look(number, replace, storage.rows, monkeypatch)
        with pytest.raises(UsageError, match=f"^{error}"):
            buffer.sample()


@pytest.mark.parametrize("number", [1, 2])
def test_a_thread_beside_one_that_has_seen_newer_rows_gets_whole_slices(number, monkeypatch):
    with PackedReplayStorage(CAPACITY, example=_rows([False])[0]) as storage:
        buffer = _buffer(PackedSliceSampler(slice_len=2, traj_key="episode"), storage)
        buffer.extend(_rows([False] * 4))
        buffer.sample()

        def overtake() -> None:
            storage.append(_rows([False] * 5, first=1))
            buffer.sampler.sample(storage, 2)

        rows = storage.rows
        _after_look(number, overtake, rows, monkeypatch)
        assert (buffer.sample()["step"].view(-1, 2).diff(dim=1) == 1).all()


CHANGES_OF_WRITERS = st.lists(
    st.tuples(
        st.sampled_from(["step", "steps", "extend", "empty", "reload"]),
        st.sampled_from([1, 2, 3, 5]),  # environments
        st.integers(1, 4),  # steps
    ),
    min_size=1,
    max_size=12,
)
SHARD_ROWS = 16


class _Environments:
    """Environments of a writer, whose episodes end after each seventh step, and its rows."""

    def __init__(self, writer: int) -> None:
        self.writer, self.time, self.envs = writer, [0] * 5, 1
        self.written: list[tuple[int, int]] = []  # (environment, time) of steps of as many

    def step(self, envs: int, steps: int) -> TensorDict:
        """Return steps [envs, steps]."""
        t = torch.tensor([range(now, now + steps) for now in self.time[:envs]])
        env = torch.arange(envs).unsqueeze(1).expand(envs, steps) + 100 * self.writer
        if envs != self.envs:
            self.written, self.envs = [], envs
        self.time[:envs] = [now + steps for now in self.time[:envs]]
        self.written += zip(env.t().flatten().tolist(), t.t().flatten().tolist(), strict=True)
        done = (t % 7 == 6).unsqueeze(-1)
        flags = {"done": done, "terminated": done & False, "truncated": done}
        rows = {"env": env, "t": t, "episode": 1000 * env + t // 7, "next": flags}
        return TensorDict(rows, [envs, steps])

    def whole(self) -> list[tuple[int, int]]:
        """Return rows of whole steps that are there."""
        kept = self.written[-SHARD_ROWS:]
        return kept[len(kept) % self.envs :]


@pytest.mark.parametrize("key", [{"end_key": ("next", "done")}, {"traj_key": "episode"}], ids=str)
@pytest.mark.parametrize("writers", [1, 2])
@given(changes=CHANGES_OF_WRITERS)
def test_slices_of_several_environments_and_writers_are_each_of_one(writers, key, changes):
    sampler = PackedSliceSampler(slice_len=3, strict_length=False, **key)
    of = [_Environments(writer) for writer in range(writers)]
    example = _Environments(0).step(1, 1)[0, 0]
    with PackedReplayStorage(writers * SHARD_ROWS, example=example, writers=writers) as storage:
        for i, (how, envs, steps) in enumerate(changes):
            storage.rows.leave()
            storage.use_writer(i % writers)
            mine = of[i % writers]
            if how == "empty":
                storage._empty()
                for each in of:
                    each.written = []
            elif how == "reload":
                storage.load_state_dict(storage.state_dict())
            elif how == "extend":
                storage.append(mine.step(1, steps)[0])
            else:
                storage.add(mine.step(envs, steps) if how == "steps" else mine.step(envs, 1)[:, 0])

            if there := {row for each in of for row in each.whole()}:
                _, _, lengths = sampler._get_stop_and_length(storage)
                assert int(lengths.sum()) == len(there)
                (positions,), marks = sampler.sample(storage, 30)
                drawn = storage[positions]
                rows = [*zip(drawn["env"].tolist(), drawn["t"].tolist(), strict=True)]
                assert {*rows} <= there
                ends = marks["next", "truncated"].squeeze(1).tolist()
                for row, after, end in zip(rows[:-1], rows[1:], ends[:-1], strict=True):
                    assert end or after == (row[0], row[1] + 1)
                    assert end or row[1] % 7 != 6  # no slice goes on past an episode


@pytest.mark.parametrize("key", [{"end_key": ("next", "done")}, {"traj_key": "episode"}], ids=str)
def test_trajectories_of_several_environments_are_as_long_as_these_were_stepped(key):
    sampler, environments = PackedSliceSampler(slice_len=2, **key), _Environments(0)
    with PackedReplayStorage(100) as storage:
        for steps, lengths in [(1, [1]), (3, [4]), (6, [7, 3])]:  # an episode has 7
            storage.add(environments.step(2, steps))
            assert sampler._get_stop_and_length(storage)[2].tolist() == 2 * lengths


def test_fragmented_slices_are_torchrls_own_sampler_alone_also_where_rows_take_turns():
    settings = {"slice_len": 3, "traj_key": "env", "step_key": "step", "fragmented": True}
    with pytest.raises(NotImplementedError, match=r"fragmented=True .*SliceSampler"):
        PackedSliceSampler(**settings)
    env, step = torch.meshgrid(torch.arange(2), torch.arange(6), indexing="ij")
    with PackedReplayStorage(24) as storage:
        buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(**settings), batch_size=30)
        storage.add(TensorDict({"env": env, "step": step}, [2, 6]))
        batch = buffer.sample()
        assert (batch["step"].view(10, 3).diff(dim=1) == 1).all()
        assert (batch["env"].view(10, 3).diff(dim=1) == 0).all()
