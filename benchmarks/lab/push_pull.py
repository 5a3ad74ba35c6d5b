"""Parameter servers over plain sockets: a worker pushes gradients while it computes and pulls the weights back.

Every message is a part of one parameter, with its urgency: a side that can send takes the most urgent waiting one,
and of equally urgent ones the first. A server sums the gradients of a part from all workers, updates that part of its
weights with plain SGD, and sends it to each of them.
"""

import heapq
import itertools
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

Bytes = npt.NDArray[np.uint8]

PORT = 29_666
LEARNING_RATE = 1e-4
# Parameter, first byte, bytes, urgency (the smallest goes first).
HEADER = struct.Struct("<iqqi")
# Data in a socket is sent before anything more urgent: keep it small, but large enough that the link stays busy while
# the thread that fills it waits for its turn.
SEND_BUFFER_BYTES, RECEIVE_BUFFER_BYTES = 64 << 10, 512 << 10
# Python's thread switch interval: the default of 5 ms is 600 kB on a link of 1 Gbit/s.
SWITCH_S = 2e-4
CONNECT_S = 30.0


class Sender:
    """A thread that sends parts of arrays on one connection, the most urgent first."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: list[tuple[int, int, int, int, memoryview]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._send, daemon=True).start()

    def put(self, urgency: int, parameter: int, begin: int, part: memoryview) -> None:
        """Queue a part for sending; its memory must not change until it is sent."""
        with self._changed:
            heapq.heappush(self._waiting, (urgency, next(self._numbers), parameter, begin, part))
            self._changed.notify()

    def _send(self) -> None:
        with suppress(OSError):
            while True:
                with self._changed:
                    while not self._waiting:
                        self._changed.wait()
                    urgency, _, parameter, begin, part = heapq.heappop(self._waiting)
                self._connection.sendall(HEADER.pack(parameter, begin, len(part), urgency))
                self._connection.sendall(part)


class Client:
    """A worker's side: hooks of its model push finished gradients, and let the forward pass wait for weights.

    `slice_bytes` cuts gradients, None sends them whole; with `by_use` parameters that are used first are most urgent.
    """

    def __init__(self, model: nn.Module, server: str) -> None:
        self._connection = _prepared(socket.socket())
        self._connection.settimeout(CONNECT_S)
        while self._connection.connect_ex((server, PORT)):
            self._connection.close()
            self._connection = _prepared(socket.socket())
            self._connection.settimeout(CONNECT_S)
        self._connection.settimeout(None)
        self.slice_bytes: int | None = None
        self.by_use = False
        self._parameters = list(model.parameters())
        self._number = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._weights = [as_bytes(parameter) for parameter in self._parameters]
        self._missing = [0] * len(self._parameters)  # bytes pushed and not yet pulled
        self._use: dict[int, int] = {}  # the order of first use, by parameter number
        self._came = threading.Condition()
        for module in model.modules():
            used = [self._number[id(parameter)] for parameter in module.parameters(recurse=False)]
            if used:
                module.register_forward_pre_hook(lambda module, inputs, used=used: self._need(used))
        for parameter in self._parameters:
            untyped: Any = parameter
            untyped.register_post_accumulate_grad_hook(self._push)
        self._sender = Sender(self._connection)
        threading.Thread(target=self._receive, daemon=True).start()

    def drain(self) -> None:
        """Wait for all weights."""
        self._need(range(len(self._parameters)))

    def close(self) -> None:
        """Close the connection, which ends both threads."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _need(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._use.setdefault(number, len(self._use))
        with self._came:
            while any(self._missing[number] for number in numbers):
                self._came.wait()

    def _push(self, parameter: Any) -> None:
        number = self._number[id(parameter)]
        gradient: memoryview = as_bytes(parameter.grad).data
        urgency = self._use[number] if self.by_use else 0
        with self._came:
            self._missing[number] = len(gradient)
        step = self.slice_bytes or len(gradient)
        for begin in range(0, len(gradient), step):
            self._sender.put(urgency, number, begin, gradient[begin : begin + step])

    def _receive(self) -> None:
        with suppress(OSError):
            while (header := read(self._connection, HEADER.size)) is not None:
                number, begin, size, _ = HEADER.unpack(header)
                read_into(self._connection, memoryview(self._weights[number])[begin : begin + size])
                with self._came:
                    self._missing[number] -= size
                    self._came.notify_all()


class Server:
    """The server's side; `serve` returns when all workers have disconnected."""

    def __init__(self, model: nn.Module, address: str, workers: int) -> None:
        self._weights = [as_bytes(parameter) for parameter in model.parameters()]
        self._pushed = [[np.empty_like(array) for array in self._weights] for _ in range(workers)]
        self._arrived: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        with _prepared(socket.socket()) as listening:
            listening.bind((address, PORT))
            listening.listen(workers)
            listening.settimeout(CONNECT_S)
            self._connections = [listening.accept()[0] for _ in range(workers)]
        for connection in self._connections:
            connection.settimeout(None)
        self._senders = [Sender(connection) for connection in self._connections]

    def serve(self) -> None:
        """Receive, sum, update and send until every worker has closed its connection."""
        threads = [
            threading.Thread(target=self._receive, args=(worker, connection), daemon=True)
            for worker, connection in enumerate(self._connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _receive(self, worker: int, connection: socket.socket) -> None:
        with suppress(OSError):
            while (header := read(connection, HEADER.size)) is not None:
                number, begin, size, urgency = HEADER.unpack(header)
                read_into(connection, memoryview(self._pushed[worker][number])[begin : begin + size])
                key = number, begin
                with self._lock:
                    self._arrived[key] = self._arrived.get(key, 0) + 1
                    complete = self._arrived[key] == len(self._connections)
                    if complete:
                        del self._arrived[key]
                if complete:
                    self._update(number, begin, size)
                    for sender in self._senders:
                        sender.put(urgency, number, begin, memoryview(self._weights[number])[begin : begin + size])

    def _update(self, number: int, begin: int, size: int) -> None:
        parts = [arrays[number][begin : begin + size].view(np.float32) for arrays in self._pushed]
        total = parts[0] + parts[1] if len(parts) > 1 else parts[0].copy()
        for part in parts[2:]:
            total += part
        total *= LEARNING_RATE / len(parts)
        weights = self._weights[number][begin : begin + size].view(np.float32)
        weights -= total


def share_the_interpreter() -> None:
    """Set a thread switch interval that is short enough for the network."""
    sys.setswitchinterval(SWITCH_S)


def as_bytes(tensor: Any) -> Bytes:
    """A flat, writable view of the memory of a float32 tensor."""
    array: npt.NDArray[np.float32] = tensor.detach().numpy()
    return array.reshape(-1).view(np.uint8)


def read(connection: socket.socket, size: int) -> bytes | None:
    """Read ``size`` bytes; None if the other side has closed the connection."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = connection.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(found)


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fill the view from the connection."""
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side closed the connection within a message")
        view = view[count:]


def _prepared(made: socket.socket) -> socket.socket:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
