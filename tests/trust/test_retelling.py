"""A trace written in another way gives the same answer; a damaged one is read or refused."""

from __future__ import annotations

from functools import cache

import pytest

from tests.trust.common import Read, Trace, extra_folder, halved, loaded, small_traces, written
from tests.trust.retelling import RETELLINGS, damages, same_answer


@cache
def trace(name: str) -> Trace:
    return small_traces()[name]


@cache
def answer(name: str) -> Read:
    return halved(written(trace(name)))


@pytest.mark.parametrize("name", ["by hand", "CPU"])
@pytest.mark.parametrize("how", RETELLINGS)
def test_a_retelling_gives_the_same_answer(name: str, how: str) -> None:
    assert answer(name).kind == "read"
    after = halved(RETELLINGS[how](trace(name)))
    assert same_answer(answer(name), after), after


@pytest.mark.parametrize("name", ["by hand", "CPU"])
def test_damage_is_read_or_refused_in_a_sentence(name: str) -> None:
    for what, damaged in damages(trace(name)).items():
        after = halved(written(damaged))
        assert after.kind in ("read", "refused"), (what, after)


@pytest.mark.slow
def test_retellings_of_other_peoples_traces() -> None:
    folder = extra_folder("traces")
    for name in (
        "hta/step_based_gp100.json.gz",
        "tracelens-h100-mi300/h100.gaunernst_bert-small-uncased__1016001.json.gz",
    ):
        recorded = loaded(folder / name)
        before = halved(written(recorded))
        for how, retell in RETELLINGS.items():
            after = halved(retell(recorded))
            assert same_answer(before, after), (name, how, after)
