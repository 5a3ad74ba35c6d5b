"""The CPU time of the parts of a step, by hooks of the model and the optimizer."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")
step_parts = need("whatif.instrumentation.step_parts")
LoaderWatch = need("whatif.instrumentation.loaders").LoaderWatch


def busy(ms: float) -> None:
    end_ns = time.thread_time_ns() + int(ms * 1e6)
    while time.thread_time_ns() < end_ns:
        pass


class Slow(torch.nn.Module):  # type: ignore[name-defined, misc]
    """One product, and so much CPU time forward."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.product, self.ms = torch.nn.Linear(4, 4), ms

    def forward(self, x: Any) -> Any:
        busy(self.ms)
        return self.product(x)


@pytest.fixture
def training() -> tuple[Any, Any]:
    model = Slow(6)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any, passes: int = 1) -> None:
    busy(2)
    for _ in range(passes):
        loss = model(torch.ones(2, 4)).sum()
        busy(4)
        loss.backward()
    optimizer.step()


def test_each_part_has_its_time_and_nothing_stays_on_the_model(training: tuple[Any, Any]) -> None:
    model, optimizer = training
    parts = step_parts.StepParts(model, optimizer, LoaderWatch())
    for _ in range(5):
        step(model, optimizer)
    parts.remove()
    step(model, optimizer)
    found = parts.summary()
    assert list(found) == ["outside", "forward", "backward", "update"]
    # A thread's clock goes on in other programs' interrupts; no part takes less than it does.
    assert [found[name] >= least for name, least in (("outside", 2), ("forward", 6), ("backward", 4))] == [True] * 3
    assert found["update"] < found["outside"] < found["backward"] < found["forward"]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_the_updates_of_all_optimizers_are_the_update(training: tuple[Any, Any]) -> None:
    """The work of the first of two optimizers (SparseAdam for tables, Adam for the rest) was the backward pass's."""
    model, optimizer = training
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    first.register_step_post_hook(lambda *_: busy(12))
    parts = step_parts.StepParts(model, optimizer, LoaderWatch(), [first, optimizer])
    for _ in range(5):
        busy(2)
        loss = model(torch.ones(2, 4)).sum()
        busy(4)
        loss.backward()
        first.step()
        optimizer.step()
    found = parts.summary()
    parts.remove()
    assert found["update"] >= 12 > found["backward"]


class Batches(torch.utils.data.Dataset):  # type: ignore[name-defined, misc]
    """Eight samples of 3 ms each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        busy(3)
        return torch.ones(4)


class Nested(torch.utils.data.IterableDataset):  # type: ignore[name-defined, misc]
    """Samples that another loader fetches."""

    def __iter__(self) -> Any:
        yield from torch.utils.data.DataLoader(Batches(), batch_size=None)


@pytest.mark.parametrize("samples", [Batches(), Nested()], ids=["one loader", "a loader in a loader"])
def test_what_a_loader_takes_of_the_outside_is_reported(training: tuple[Any, Any], samples: Any) -> None:
    model, optimizer = training
    loaders = LoaderWatch()
    parts = step_parts.StepParts(model, optimizer, loaders)
    for batch in torch.utils.data.DataLoader(samples, batch_size=1):
        model(batch).sum().backward()
        optimizer.step()
    parts.remove()
    loaders.remove()
    found = parts.summary()
    assert list(found) == ["outside", "forward", "backward", "update", "loading"]
    assert 3 <= found["loading"] < found["outside"] < found["loading"] + 2


def test_what_another_thread_fetches_is_no_part(training: tuple[Any, Any]) -> None:
    model, optimizer = training
    loaders = LoaderWatch()
    parts = step_parts.StepParts(model, optimizer, loaders)
    for _ in range(4):
        other = threading.Thread(target=lambda: list(torch.utils.data.DataLoader(Batches(), batch_size=8)))
        other.start()
        other.join()
        step(model, optimizer)
    parts.remove()
    loaders.remove()
    assert "loading" not in parts.summary()


@pytest.mark.parametrize("forward_ms", [0, 3])
def test_the_watchers_time_the_parts_of_long_untraced_steps(training: tuple[Any, Any], forward_ms: int) -> None:
    """In those of short steps nothing is left, and the parts are those of the warm-up."""
    model, optimizer = training
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    original = iterator.__next__
    watchers = need("whatif.instrumentation.watchers").WarmupWatchers(model, optimizer)

    def train(ms: int) -> None:
        model.ms = ms
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    watchers.after_first_step(cuda=False)
    train(forward_ms)
    watchers.before_untraced()
    assert bool(model._forward_hooks) == (iterator.__next__ is not original) == bool(forward_ms)
    train(3 * forward_ms)
    watchers.remove()
    assert iterator.__next__ is original
    assert not model._forward_hooks
    forward = watchers.summary(5)["parts_ms"]["forward"]
    assert 3 * forward_ms <= forward < 3 * forward_ms + 1


def test_an_evaluation_between_steps_is_no_part_of_them(training: tuple[Any, Any]) -> None:
    model, optimizer = training
    parts = step_parts.StepParts(model, optimizer, LoaderWatch())
    for number in range(9):
        step(model, optimizer)
        if number == 4:
            busy(40)
            model(torch.ones(2, 4))
    found = parts.summary()
    assert 2 <= found["outside"] < 4


def test_calls_by_other_threads_do_not_count(training: tuple[Any, Any]) -> None:
    model, optimizer = training
    parts = step_parts.StepParts(model, optimizer, LoaderWatch())
    for _ in range(4):
        step(model, optimizer)
        other = threading.Thread(target=model, args=(torch.ones(1, 4),))
        other.start()
        other.join()
    assert parts.summary() is not None


def test_steps_of_another_shape_give_nothing(training: tuple[Any, Any]) -> None:
    model, optimizer = training
    for steps, passes in ((2, 1), (5, 2)):
        parts = step_parts.StepParts(model, optimizer, LoaderWatch())
        for _ in range(steps):
            step(model, optimizer, passes)
        parts.remove()
        assert parts.summary() is None
