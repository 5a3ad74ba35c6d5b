"""One processor of a DTS architecture: its layers, its cables, and its role in a round.

The lab's `dts` experiment starts one such process per role. Rank 0 sends commands to all others over the lab's own
network, which is not rate-limited; training data crosses only the cables.
"""

import json
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .dts_models import batch_of, build, part_of
from .push_pull import read_into
from .rank import COMMUNICATION_PRIORITY, Rank, run, time_steps, undisturbed

CONTROL_PORT, CABLE_PORT = 29_600, 29_700
CONNECT_S = 60.0
ALONE_STEPS = 5
LEARNING_RATE = 0.01


class Cable:
    """A connection over one cable; both ends know the number of the next bytes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def send(self, data: memoryview) -> None:
        """Send all the data."""
        self._socket.sendall(data)

    def receive(self, buffer: memoryview) -> None:
        """Fill the buffer."""
        read_into(self._socket, buffer)


def connect_all(request: dict[str, Any]) -> dict[str, Cable]:
    """Return the cable to each partner, listening or connecting as requested."""
    listening = {}
    for row in request["cables"]:
        if row["listens"]:
            listening[row["partner"]] = _listen(row["address"], CABLE_PORT)
    cables = {
        row["partner"]: Cable(_connect(row["address"], CABLE_PORT)) for row in request["cables"] if not row["listens"]
    }
    for partner, waiting in listening.items():
        cables[partner] = Cable(waiting.accept()[0])
        waiting.close()
    return cables


def _listen(address: str, port: int) -> socket.socket:
    waiting = socket.socket()
    waiting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    waiting.bind((address, port))
    waiting.listen()
    waiting.settimeout(CONNECT_S)
    return waiting


def _connect(address: str, port: int) -> socket.socket:
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port))
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().contiguous().numpy().data.cast("B")


class Part:
    """Layers that really compute; `forward` of the last ones includes the loss, `backward` the update."""

    def __init__(self, request: dict[str, Any]) -> None:
        network = build(request["dnn"])
        self.images, self.labels = batch_of(request["dnn"], request["seed"])
        before = part_of(network, None, request["first"]) if request["first"] else nn.Identity()
        self.module = part_of(network, request["first"], request["last"])
        self.is_last = request["last"] is None
        with torch.no_grad():
            self.input = before(self.images).contiguous()
            self.gradient = torch.zeros_like(self.module(self.input))
        self.is_first = request["first"] is None
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.flat = torch.zeros_like(parameters_to_vector(self.module.parameters()))

    def forward(self, received: torch.Tensor | None = None) -> memoryview:
        """Run the layers on the received activations, or on the images."""
        self._input = self.images if received is None else received.detach().requires_grad_(not self.is_first)
        self._output = self.module(self._input)
        if self.is_last:
            self._output = nn.functional.nll_loss(self._output, self.labels)
        return bytes_of(self._output)

    def backward(self, gradient: torch.Tensor | None = None) -> memoryview:
        """Run the layers backward from the output's gradient, update, and return the input's gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        self._output.backward(gradient)
        self.optimizer.step()
        return memoryview(b"") if self._input.grad is None else bytes_of(self._input.grad)

    def weights(self) -> memoryview:
        """All weights as one vector."""
        return bytes_of(parameters_to_vector(self.module.parameters()))

    def load(self, flat: torch.Tensor) -> None:
        """Load weights from one vector."""
        vector_to_parameters(flat, self.module.parameters())

    def alone_ms(self) -> dict[str, float]:
        """Median times of the two passes without other processes at work, ms."""
        received = None if self.is_first else self.input.clone()
        gradient = None if self.is_last else self.gradient
        passes: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(ALONE_STEPS + 1):
            passes["forward"] += time_steps(lambda: self.forward(received), 1)[0]
            passes["backward"] += time_steps(lambda: self.backward(gradient), 1)[0]
        return {name: statistics.median(times[1:]) for name, times in passes.items()}


class Replay(Part):
    """Layers that sleep for the time another rank's took alone: only the network is real."""

    seconds: dict[str, float]

    def forward(self, received: torch.Tensor | None = None) -> memoryview:
        """Sleep, and give something as large."""
        time.sleep(self.seconds["forward"])
        return bytes_of(self.gradient)

    def backward(self, gradient: torch.Tensor | None = None) -> memoryview:
        """Sleep, and give something as large."""
        time.sleep(self.seconds["backward"])
        return memoryview(b"") if self.is_first else bytes_of(self.input)


class Member:
    """One role. Names of roles are those of `whatif dts`: server, client 1, edge 1, worker 1."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.role: str = request["role"]
        self.batches = 1
        self.part = (Replay if request["compute"] == "replayed" else Part)(request)
        self.cables = connect_all(request)
        self.partners = [row["partner"] for row in request["cables"]]
        # Threads that read and write sockets; all start here, so that they get their priority with the others.
        self.pool = ThreadPoolExecutor(max_workers=max(2 * len(self.cables), 1))
        for future in [self.pool.submit(time.sleep, 0.05) for _ in range(2 * len(self.cables))]:
            future.result()
        self.received = {name: torch.zeros_like(self.part.input) for name in self.partners}
        self.gradients = {name: torch.zeros_like(self.part.gradient) for name in self.partners}
        self.models = {name: torch.zeros_like(self.part.flat) for name in self.partners}
        self.token = memoryview(bytearray(1))

    def round(self) -> None:
        """Play this role in a round of `batches` batches."""
        getattr(self, f"_{self.request['architecture']}_{self.role.split()[0]}")()

    # -- pipeline learning -------------------------------------------------------------------------------------------

    def _pipeline_learning_worker(self) -> None:
        number = int(self.role.split()[1])
        before, behind = (f"worker {number + step}" for step in (-1, 1))
        for _ in range(self.batches):
            out = self.part.forward(self._receive(before, self.received) if before in self.cables else None)
            gradient = None
            if behind in self.cables:
                self.cables[behind].send(out)
                gradient = self._receive(behind, self.gradients)
            back = self.part.backward(gradient)
            if before in self.cables:
                self.cables[before].send(back)

    # -- federated learning ------------------------------------------------------------------------------------------

    def _federated_client(self) -> None:
        for _ in range(self.batches):
            self.part.forward()
            self.part.backward()
        self._averaged_at("server")

    def _federated_server(self) -> None:
        self._average(self.partners)

    # -- split learning ----------------------------------------------------------------------------------------------

    def _split_client(self) -> None:
        number = int(self.role.split()[1])
        before, behind = (f"client {number + step}" for step in (-1, 1))
        if before in self.cables:
            self.part.load(self._receive(before, self.models))
        self._train_with("server")
        if behind in self.cables:
            self.cables[behind].send(self.part.weights())

    def _split_server(self) -> None:
        for client in self.partners:
            self._serve(client)

    # -- parallel split learning -------------------------------------------------------------------------------------

    def _parallel_split_client(self) -> None:
        for number in range(self.batches):
            if number:
                self.cables["server"].receive(self.token)
            self._train_with("server", 1)
            self.cables["server"].send(self.token)

    def _parallel_split_server(self) -> None:
        for number in range(self.batches):
            if number:
                for client in self.partners:
                    self.cables[client].send(self.token)
            coming: dict[Future[torch.Tensor], str] = {
                self.pool.submit(self._receive, client, self.received): client for client in self.partners
            }
            sending = []
            for future in as_completed(coming):
                self.part.forward(future.result())
                sending.append(self.pool.submit(self.cables[coming[future]].send, self.part.backward()))
            for sent in sending:
                sent.result()
            for client in self.partners:
                self.cables[client].receive(self.token)

    # -- federated split learning ------------------------------------------------------------------------------------

    def _federated_split_client(self) -> None:
        self._train_with(self.partners[0])

    def _federated_split_edge(self) -> None:
        self._serve(self.role.replace("edge", "client"))
        self._averaged_at("server")

    def _federated_split_server(self) -> None:
        self._average(self.partners)

    # -- what several of them do -------------------------------------------------------------------------------------

    def _receive(self, partner: str, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        self.cables[partner].receive(bytes_of(buffers[partner]))
        return buffers[partner]

    def _train_with(self, server: str, batches: int = 0) -> None:
        for _ in range(batches or self.batches):
            self.cables[server].send(self.part.forward())
            self.part.backward(self._receive(server, self.gradients))

    def _serve(self, client: str) -> None:
        for _ in range(self.batches):
            self.part.forward(self._receive(client, self.received))
            self.cables[client].send(self.part.backward())

    def _averaged_at(self, server: str) -> None:
        self.cables[server].send(self.part.weights())
        self.part.load(self._receive(server, self.models))

    def _average(self, others: list[str]) -> None:
        models = list(self.pool.map(lambda name: self._receive(name, self.models), others))
        average = memoryview(np.mean([model.numpy() for model in models], axis=0)).cast("B")
        list(self.pool.map(lambda name: self.cables[name].send(average), others))


class LocalTraining:
    """The whole network on one processor, as in the recording of one worker."""

    def __init__(self, dnn: str) -> None:
        self.model = build(dnn)
        self.images, self.labels = batch_of(dnn)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        """Take one training step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss: Any = nn.functional.nll_loss(self.model(self.images), self.labels)  # Partly untyped.
        loss.backward()
        self.optimizer.step()


class _Control:
    """Lines of JSON between rank 0 and all others."""

    def __init__(self, rank: Rank) -> None:
        address = rank.request["control"]
        if rank.number:
            self.streams = [_connect(address, CONTROL_PORT).makefile("rw")]
            self.tell(0, rank.number)
            return
        waiting = _listen(address, CONTROL_PORT)
        found = [waiting.accept()[0].makefile("rw") for _ in range(rank.workers - 1)]
        numbers = [json.loads(stream.readline()) for stream in found]
        self.streams = [found[numbers.index(number)] for number in range(1, rank.workers)]

    def tell(self, place: int, message: Any) -> None:
        self.streams[place].write(json.dumps(message) + "\n")
        self.streams[place].flush()

    def hear(self, place: int) -> Any:
        return json.loads(self.streams[place].readline())


def work(rank: Rank) -> dict[str, Any]:
    """Play one role; rank 0 also gives the commands and keeps the times."""
    control = _Control(rank)
    member = Member(rank.request)
    local = LocalTraining(rank.request["dnn"]) if rank.request["local"] else None
    orders: dict[str, Callable[[Any], Any]] = {
        "alone": lambda _: None if isinstance(member.part, Replay) else member.part.alone_ms(),
        "replay": lambda seconds: setattr(member.part, "seconds", seconds),
        "local": lambda count: None if local is None else time_steps(local.step, count)[0],
        "round": lambda batches: _round(member, batches),
        "end": lambda _: None,
    }
    with undisturbed():
        if isinstance(member.part, Replay):
            # It sleeps and sends: a computing process on the same core must not delay it.
            _communicates()
        if rank.number == 0:
            return _lead(rank, control, orders)
        while True:
            name, value = control.hear(0)
            control.tell(0, orders[name](value))
            if name == "end":
                return {}


def _communicates() -> None:
    import os
    from contextlib import suppress

    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(COMMUNICATION_PRIORITY))


def _round(member: Member, batches: int) -> int:
    """Play a round; return the time of its end, ns, on the clock that all processes of a machine share."""
    member.batches = batches
    member.round()
    return time.monotonic_ns()


def _lead(rank: Rank, control: _Control, orders: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    request = rank.request
    everybody = list(range(rank.workers))

    def order(name: str, value: Any, ranks: list[int]) -> list[Any]:
        """Send a command to some ranks at once; return their answers."""
        for number in ranks:
            if number:
                control.tell(number - 1, [name, value])
        return [orders[name](value) if number == 0 else control.hear(number - 1) for number in sorted(ranks)]

    def in_turn(name: str, value: Any, ranks: list[int]) -> list[Any]:
        return [order(name, value, [number])[0] for number in ranks]

    def local(count: int) -> list[list[float]]:
        ranks = request["local_ranks"]
        return (order if request["local_together"] else in_turn)("local", count, ranks)

    def timed(batches: int) -> float:
        begin_ns = time.monotonic_ns()
        end_ns: int = max(order("round", batches, everybody))
        return round((end_ns - begin_ns) / 1e6, 4)

    alone = in_turn("alone", None, everybody)
    for number, twin in request["twins"]:
        order("replay", {name: ms / 1e3 for name, ms in alone[twin].items()}, [number])
    local(2)
    timed(1)
    timed(1)
    plain, batch, epoch = [], [], []
    for _ in range(request["rounds"]):
        # The machine's speed changes within seconds: a plain step before and after everything that is timed.
        steps, batches = [local(1)], []
        for _ in range(2):
            batches.append(timed(1))
            steps.append(local(1))
        epoch.append(timed(request["epoch_batches"]))
        steps.append(local(1))
        plain.append([[ms for block in of_rank for ms in block] for of_rank in zip(*steps, strict=True)])
        batch.append(batches)
    for number in everybody[1:]:
        order("end", None, [number])
    return {"alone_ms": alone, "local_ms": plain, "batch_ms": batch, "epoch_ms": epoch}


if __name__ == "__main__":
    run(work, join=False)
