"""Candidates for advice: every installed transform that can be switched on, in its usual forms."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from whatif.models.kernels.fp8 import chosen_for_fp8
from whatif.prediction.composition import spelled
from whatif.prediction.transform import (
    Transform,
    built_in_names,
    load_transform,
    plug_in_names,
)
from whatif.questions.advice.effort import Effort, EffortSize
from whatif.questions.advice.trial import Refusal, Refused
from whatif.runtime.errors import WhatifError

# Forms to try of transforms whose defaults alone are not the usual question; the others are tried with defaults.
VARIANTS = {
    "amp": ("amp:target=bf16", "amp:target=fp16"),
    "batch_size": ("batch_size:factor=2",),
    "compile": ("compile", "compile:mode=reduce-overhead"),
    "data_loading": ("data_loading:workers=4",),
    "fused_adam": ("fused_adam", "fused_adam:to=foreach"),
}
# Not advised: these take more GPUs than the recorded step has.
OTHER_MACHINES = ("tensor_parallel",)
# Not advised if the run's author already applied it in part: functions that return how much, or "".
IN_PART = {"fp8": chosen_for_fp8}


class Candidates(Struct, frozen=True):
    """Transforms to try, the names of purely hypothetical ones, and those that cannot be loaded."""

    transforms: tuple[Transform, ...]
    hypothetical: tuple[str, ...] = ()
    broken: tuple[Refused, ...] = ()
    asked: frozenset[str] = frozenset()  # those that the user named, as on a command line


def installed(also: Iterable[Transform] = ()) -> Candidates:
    """Return every built-in and plug-in transform in the forms worth trying, apart from hypothetical questions.

    ``also`` are tried first, whatever their effort.
    """
    found: list[Transform] = list(also)
    asked = frozenset(map(spelled, found))
    hypothetical: list[str] = []
    broken: list[Refused] = []
    names = built_in_names()
    for name in [*names, *(name for name in plug_in_names() if name not in names)]:
        try:
            transform = load_transform(name)
            if Effort.of(transform.doc).size == EffortSize.NONE or name in OTHER_MACHINES:
                hypothetical.append(name)
                continue
            found += [load_transform(spec) for spec in VARIANTS.get(name, (name,))]
        except Exception as error:  # one broken plug-in must not hide all the others
            sentence = str(error) if isinstance(error, WhatifError) else f"{type(error).__name__}: {error}"
            broken.append(Refused((name,), (), Refusal.FAILED, sentence))
    return Candidates(tuple(found), tuple(hypothetical), tuple(broken), asked)
