"""The search space: plans of parallelism, and the what-ifs that each of them consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

# How copies of the model keep state and exchange gradients: whole (DDP), ZeRO stages 1 and 2, all sharded (FSDP),
# sharded within a node and replicated across nodes (hybrid FSDP).
DDP, ZERO_1, ZERO_2, FSDP, HYBRID = 0, 1, 2, 3, 4
LEVELS = {DDP: "DDP", ZERO_1: "ZeRO-1", ZERO_2: "ZeRO-2", FSDP: "FSDP", HYBRID: "HSDP"}
# Parts of the model on each stage of an interleaved pipeline: Narayanan et al., SC 2021, figure 12, uses two.
CHUNKS = (1, 2)
# No useful plan has more micro-batches a step than this: each would be as small as possible.
MOST_PASSES = 2048


class Plan(Struct, frozen=True):
    """How devices share the training of one step: tensor × pipeline × data, and the schedule of each."""

    tensor: int
    pipeline: int
    data: int
    level: int  # one of LEVELS
    micro_batch: int  # samples of one forward pass
    passes: int  # forward passes of each copy in a step
    recompute: bool
    chunks: int = 1  # parts of the model on a stage; more than one is the interleaved schedule

    @property
    def devices(self) -> int:
        """The number of devices it takes."""
        return self.tensor * self.pipeline * self.data

    @property
    def samples(self) -> int:
        """The number of samples that all copies together train in a step."""
        return self.data * self.micro_batch * self.passes

    def is_plain(self, level: int) -> bool:
        """Whether each of several devices has its own copy of the whole model, with the state kept as at ``level``."""
        return self.data == self.devices > 1 and self.level == level

    @property
    def order(self) -> str:
        """The order of the passes, as an option of ``pipeline``."""
        return "interleaved" if self.chunks > 1 else "1f1b"

    @property
    def schedule(self) -> str:
        """The usual name of the order of the passes; "" without a pipeline."""
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.order}{chunks}" if self.pipeline > 1 else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {
            "devices": self.devices, "tensor": self.tensor, "pipeline": self.pipeline, "data": self.data,
            "sharding": LEVELS[self.level] if self.data > 1 else None, "micro_batch": self.micro_batch,
            "accumulation": self.passes, "recompute": self.recompute, "schedule": self.schedule or None,
            "chunks": self.chunks,
        }  # fmt: skip

    def inner(self, cluster: str) -> tuple[str, ...]:
        """Return the what-ifs that change what one device computes, for any micro-batch and number of copies."""
        cut = f"tensor_parallel:workers={self.tensor},cluster={cluster},vocabulary=true,sequence_parallel=true"
        return (*([cut] if self.tensor > 1 else []), *(["activation_checkpoint"] if self.recompute else []))

    def what_ifs(self, cluster: str, recorded_batch: int, passes: int | None = None) -> tuple[str, ...]:
        """Return the plan as what-ifs on a step of ``recorded_batch`` samples, spelled as on a command line."""
        count = self.passes if passes is None else passes
        batch_alone = self.pipeline == 1 and self.micro_batch != recorded_batch
        found = [f"batch_size:factor={self.micro_batch / recorded_batch!r}"] if batch_alone else []
        found += self.inner(cluster)
        if self.pipeline > 1:
            order = f",schedule=interleaved,chunks={self.chunks}" if self.chunks > 1 else ""
            found.append(
                f"pipeline:stages={self.pipeline},micro_batches={count},micro_batch={self.micro_batch}{order},"
                f"cluster={cluster}"
            )
        elif count > 1:
            found.append(f"gradient_accumulation:passes={count}")
        if self.data > 1:
            fully = {FSDP: "fsdp:", HYBRID: "fsdp:hybrid=true,"}
            name = {DDP: "distributed:", **fully}.get(self.level, f"zero:stage={self.level},")
            found.append(f"{name}workers={self.data},cluster={cluster}")
        return tuple(found)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def micro_batches(global_batch: int, most: int) -> list[int]:
    """Return the micro-batches that divide ``global_batch``, up to ``most`` samples, ascending."""
    return [size for size in range(1, most + 1) if global_batch % size == 0]


def plans_of(
    tensor: int, devices: int, global_batch: int, *, most_stages: int, micros: Sequence[int], recompute: bool,
    node: int = 0,
) -> Iterator[Plan]:  # fmt: skip
    """Yield the plans on ``devices`` devices that split blocks across ``tensor`` of them.

    ``node``: the devices in one node if the cluster has nodes; hybrid FSDP shards among them. Of the micro-batches
    ``micros`` those are tried that divide what each copy trains of ``global_batch``.
    """
    for pipeline in divisors(devices // tensor):
        data = devices // tensor // pipeline
        if pipeline > most_stages or global_batch % data:
            continue
        per_copy = global_batch // data
        for micro in micros:
            if per_copy % micro or per_copy // micro > MOST_PASSES:
                continue
            passes = per_copy // micro
            if passes < pipeline:  # most of it would be bubble
                continue
            for chunks in CHUNKS if pipeline > 1 else (1,):
                if chunks > 1 and (passes % pipeline or pipeline * chunks > most_stages):
                    continue
                unpipelined = tuple(level for level in LEVELS if level != HYBRID or 1 < node // tensor < data)
                levels = (DDP,) if data == 1 else (DDP, ZERO_1) if pipeline > 1 else unpipelined
                for level in levels:
                    yield Plan(tensor, pipeline, data, level, micro, passes, recompute, chunks)
