"""The measuring process from outside: one question, one answer; ended where it falls silent."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from whatif.errors import WhatifError

from ..line_process import SILENCE_S, EndedError, LineProcess


class Way(NamedTuple):
    """How operators are measured: on which device of torch, with how many threads of a CPU, and in what state.

    ``ranks``: over how many processes, for collectives; 0 for operators of one device.
    """

    device: str
    threads: int
    cache: str
    method: str
    ranks: int = 0


class MeasuringProcess(LineProcess):
    """A process that measures calls in one way: one question, one answer.

    ``module`` of this package is what it runs; ``setup`` is the first line that it reads.
    """

    def __init__(
        self, setup: dict[str, Any], *, threads: int = 1, module: str = "worker", silence_s: float = SILENCE_S
    ) -> None:
        super().__init__(f"{__package__}.{module}", threads=threads, silence_s=silence_s)
        self._setup = setup

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.ask(self._setup)
            self.answer()
        except EndedError as error:
            self.__exit__()
            raise WhatifError(
                "opdb profile: expected a process that measures, got one that ended before its first answer; its last "
                f"line: {error}."
            ) from None
        except BaseException:  # Ctrl-C while torch is loaded
            self.__exit__()
            raise
        return self

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one job: ``ns``, a list, or ``skipped``, a reason. Raises EndedError."""
        self.ask(job)
        return self.answer()
