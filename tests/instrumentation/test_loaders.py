"""The DataLoader that feeds the training: found whoever made it, and however long before."""

import pytest

from tests.helpers import need

torch = need("torch")
watch = need("whatif.instrumentation.loaders").LoaderWatch
data = torch.utils.data


def test_the_loader_used_most_is_described_and_nothing_stays() -> None:
    numbers = torch.arange(40)
    begun = iter(data.DataLoader(numbers, batch_size=4))
    original = data.dataloader._BaseDataLoaderIter.__next__
    loaders = watch()
    try:
        assert loaders.summary() is None
        next(begun)
        expected = {"workers": 0, "batch_size": 4, "pin_memory": False, "prefetch_factor": None}
        assert loaders.summary() == expected
        workers = data.DataLoader(numbers, batch_size=8, num_workers=1, prefetch_factor=3)
        assert [len(batch) for batch in workers] == [8] * 5
    finally:
        loaders.remove()
    expected = {"workers": 1, "batch_size": 8, "pin_memory": False, "prefetch_factor": 3}
    assert loaders.summary() == expected
    assert data.dataloader._BaseDataLoaderIter.__next__ is original
    assert [len(batch) for batch in begun] == [4] * 9
    assert loaders.summary() == expected


def test_a_loader_that_is_patched_meanwhile_keeps_that_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = watch()
    ours = data.dataloader._BaseDataLoaderIter.__next__
    monkeypatch.setattr(data.dataloader._BaseDataLoaderIter, "__next__", lambda iterator: ours(iterator))
    theirs = data.dataloader._BaseDataLoaderIter.__next__
    loaders.remove()
    assert data.dataloader._BaseDataLoaderIter.__next__ is theirs
    next(iter(data.DataLoader(torch.arange(4))))
    assert loaders.summary() is None
    monkeypatch.undo()
    data.dataloader._BaseDataLoaderIter.__next__ = loaders._next
