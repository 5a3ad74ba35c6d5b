"""A pipeline of two stages on two hosts: micro-batches flow forward, the gradients of their activations back.

The model is cut where the what-if would cut it, its stages run the same schedule, and messages overlap the work:
each is sent as soon as it is ready, into a buffer that was posted at the start of the step.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.campaign.cnns import ResNet, Vgg
from whatif import read
from whatif.models.exchange.network_options import network_of
from whatif.models.layers.added_gradients import add_gradients
from whatif.models.parallel.pipeline import fastest_of
from whatif.models.parallel.pipeline_plan import plans
from whatif.models.parallel.pipeline_schedule import Pass, order
from whatif.prediction.predict import Baseline
from whatif.units import Bandwidth

from .baseline import trace_name
from .jobs import Job, Layout, Results, quartiles, slower_rank
from .models import MODELS, Training
from .rank import COMMUNICATION_PRIORITY, Rank, blocks_of, run, time_round, undisturbed

STAGES = 2
RATES_MBIT_S = (1000.0, 200.0)
# Models whose layers form a chain, with a batch of at least eight samples, divisible into the micro-batches.
CHAINS = ("resnet", "mlp", "vgg")
# A micro-batch's message would fit into the usual burst of a link at any rate.
PACKET_BYTES = 16_384
WAYS = tuple((schedule, micro_batches) for schedule in ("gpipe", "1f1b") for micro_batches in (4, 8))
BLOCK_S, FEWEST_STEPS, ROUNDS, WARMUP_STEPS = 0.35, 2, 6, 2


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Every model that is a chain of layers, at two rates."""
    return [_job(out, model, rate) for model in models or CHAINS if model in CHAINS for rate in RATES_MBIT_S]


def _job(out: Path, model: str, rate_mbit_s: float) -> Job:
    name = f"pipeline-{model}-{rate_mbit_s:g}mbit"
    request = {"model": model, "trace": str((out / trace_name(model)).resolve()), "rate_mbit_s": rate_mbit_s,
               "ways": WAYS, "rounds": ROUNDS}  # fmt: skip
    return Job(
        name, __name__, Layout((STAGES,), rate_mbit_s, packet_bytes=PACKET_BYTES), request, made=(f"{name}.json",),
        record=lambda results: _record(model, rate_mbit_s, results),
    )  # fmt: skip


def _record(model: str, rate_mbit_s: float, results: Results) -> dict[str, Any]:
    first, local = results[0], slower_rank(results, "local")
    runs = []
    for schedule, micro_batches in WAYS:
        name = name_of(schedule, micro_batches)
        rounds = first["rounds"][name]
        what_if = what_if_of(rate_mbit_s, schedule, micro_batches)
        runs.append({"name": name, "compute": "real", "what_if": [what_if], **first["cuts"][name],
                     **quartiles(rounds), "rounds": rounds})  # fmt: skip
    return {
        "experiment": "pipeline", "model": model, "batch": first["samples"],
        "baseline": {"trace": trace_name(model), **quartiles(local), "rounds": local},
        "runs": runs,
    }  # fmt: skip


def name_of(schedule: str, micro_batches: int) -> str:
    """Return the name of a run."""
    return f"{schedule}, {micro_batches} micro-batches"


def what_if_of(rate_mbit_s: float, schedule: str, micro_batches: int) -> str:
    """Return the what-if that describes it."""
    options = f"stages={STAGES},bandwidth={rate_mbit_s:g}Mbps"
    return f"pipeline:{options},schedule={schedule},micro_batches={micro_batches}"


def cut_of(trace: Path, schedule: str, micro_batches: int, rate_mbit_s: float, batches: int = 1) -> str:
    """Return the layer before which the what-if cuts the recorded model into two."""
    graph = Baseline.of(read(trace), "mark").graph
    network = network_of(graph, "lab", workers=STAGES, bandwidth=Bandwidth(f"{rate_mbit_s:g}Mbps"))
    graph = add_gradients(graph, micro_batches - 1)
    ways = plans(graph, STAGES, micro_batches, factor=batches / micro_batches, recompute=False, activation_mb=None)
    planned, _ = fastest_of(graph, ways, order(schedule, STAGES, micro_batches, 1), network)
    return graph.layers[int(planned.model.layer[planned.begins[1]])]


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of a model that run one after the other, with their names."""
    if isinstance(model, ResNet):
        stages: Any = model.stages  # of Sequentials
        blocks = [
            (f"stages.{number}.{place}", block)
            for number, stage in enumerate(stages)
            for place, block in enumerate(stage)
        ]
        return [("stem", model.stem), *blocks, ("classifier", nn.Sequential(_Mean(), model.classifier))]
    if isinstance(model, Vgg):
        layers = [(f"stages.{at}.{name}", layer) for at, stage in enumerate(model.stages)
                  for name, layer in stage.named_children()]  # fmt: skip
        return [*layers, ("classifier", nn.Sequential(nn.Flatten(), model.classifier))]
    assert isinstance(model, nn.Sequential)
    return list(model.named_children())


def halves(model: nn.Module, cut: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Divide the model into the parts before the layer `cut`, and the rest. The part that holds it stays whole."""
    parts = chain(model)
    (at,) = (place for place, (name, _) in enumerate(parts) if f"{cut}.".startswith(f"{name}."))
    modules = [module for _, module in parts]
    return nn.Sequential(*modules[:at]), nn.Sequential(*modules[at:])


class Link(Protocol):
    """The link to the other stage; both calls return a waitable. A tag distinguishes messages."""

    def send(self, tensor: Tensor, tag: int) -> Any:
        """Begin to send."""

    def receive(self, tensor: Tensor, tag: int) -> Any:
        """Take the message when it comes."""


class Gloo:
    """The connection to the stage whose rank is `peer`."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def send(self, tensor: Tensor, tag: int) -> Any:
        """Begin to send."""
        with _not_held_up():
            return dist.isend(tensor, self._peer, tag=tag)

    def receive(self, tensor: Tensor, tag: int) -> Any:
        """Take the message when it comes."""
        with _not_held_up():
            return dist.irecv(tensor, self._peer, tag=tag)


@contextmanager
def _not_held_up() -> Iterator[None]:
    """Give this thread the priority of those that communicate.

    Gloo's thread polls a connection while another thread holds its lock: if it kept that thread off its core,
    as a thread of higher priority does, both would wait forever.
    """
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(COMMUNICATION_PRIORITY))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, policy, param)


class Stage:
    """One of two stages: its half of the model with its optimizer, and its passes in the order of a schedule."""

    def __init__(
        self, model: str, number: int, cut: str, schedule: str, micro_batches: int, link: Link, batches: int = 1
    ) -> None:
        training = Training(model)
        self.number, self.link, self.count = number, link, micro_batches
        self._loss: Callable[[Any, Tensor], Tensor] = MODELS[model].loss
        # A step has as many samples as ``batches`` copies of the model.
        self._inputs = torch.cat([training.inputs[0]] * batches).chunk(micro_batches)
        self._targets = torch.cat([training.target] * batches).chunk(micro_batches)
        assert len(self._inputs) == micro_batches
        model_halves = halves(training.model, cut)
        self.model = model_halves[number]
        with torch.no_grad():
            self.message = model_halves[0](self._inputs[0])
        self.buffers = [torch.empty_like(self.message) for _ in range(micro_batches)]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, foreach=False)
        self._passes = order(schedule, STAGES, micro_batches, 1)[number]

    def step(self) -> None:
        """Take one training step of all micro-batches."""
        self.optimizer.zero_grad(set_to_none=True)
        # Activations are tagged with their micro-batch, gradients with the numbers after these.
        back = 0 if self.number else self.count
        coming = [self.link.receive(buffer, back + micro) for micro, buffer in enumerate(self.buffers)]
        ends: dict[int, tuple[Tensor, Tensor]] = {}
        sent = []
        for pass_ in self._passes:
            message = (self.backward if pass_.backward else self.forward)(pass_, coming, ends)
            if message is not None:
                # The message's memory must stay alive until it is sent.
                sent.append((message, self.link.send(message, self.count - back + pass_.micro_batch)))
        for _, work in sent:
            work.wait()
        self.update()

    def update(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def forward(self, one: Pass, coming: list[Any], ends: dict[int, tuple[Tensor, Tensor]]) -> Tensor | None:
        """Run a forward pass on the awaited message, if any; return the message to the other stage."""
        if self.number == 0:
            x = self._inputs[one.micro_batch]
            y: Tensor = self.model(x)
            ends[one.micro_batch] = x, y
            return y.detach().contiguous()
        coming[one.micro_batch].wait()
        x = self.buffers[one.micro_batch].detach().requires_grad_()
        # A copy: a stage may begin with an in-place operation (ReLU), which an autograd leaf does not allow.
        ends[one.micro_batch] = x, self._loss(self.model(x.clone()), self._targets[one.micro_batch]) / self.count
        return None

    def backward(self, one: Pass, coming: list[Any], ends: dict[int, tuple[Tensor, Tensor]]) -> Tensor | None:
        """The backward counterpart of `forward`."""
        x, y = ends.pop(one.micro_batch)
        if self.number == 0:
            coming[one.micro_batch].wait()
            y.backward(self.buffers[one.micro_batch])  # type: ignore[no-untyped-call]
            return None
        y.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad.contiguous()


def work(rank: Rank) -> dict[str, Any]:
    """Time all ways; the request has `model`, `trace`, `rate_mbit_s`, `ways` (schedule, micro-batches) and `rounds`."""
    request = rank.request
    local = Training(request["model"])
    steps: dict[str, Callable[[], None]] = {"local": local.step}
    cuts: dict[str, dict[str, Any]] = {}
    for schedule, micro_batches in request["ways"]:
        name = name_of(schedule, micro_batches)
        cut = cut_of(Path(request["trace"]), schedule, micro_batches, request["rate_mbit_s"])
        stage = Stage(request["model"], rank.number, cut, schedule, micro_batches, Gloo(1 - rank.number))
        steps[name] = stage.step
        cuts[name] = {"cut": cut, "message_bytes": stage.message.numel() * stage.message.element_size()}
    counts = blocks_of(steps, warmup_steps=WARMUP_STEPS, block_s=BLOCK_S, fewest=FEWEST_STEPS)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
    with undisturbed():
        for _ in range(request["rounds"]):
            time_round(steps, counts, rounds)
    return {"rounds": rounds, "cuts": cuts, "samples": local.samples}


if __name__ == "__main__":
    run(work)
