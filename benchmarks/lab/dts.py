"""The five architectures of DTS with the paper's two networks: real passes, real sockets, a virtual cable per link.

DTS models links between pairs of processors, so the lab creates a pair of virtual devices for each, with its own rate.
If several processors compute at once, two of them really do (this machine has two cores) and the others sleep for the
time their twin took alone; if they take turns, all of them really compute.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .baseline import record_worker, trace_name
from .dts_models import BATCH, CUTS, IMAGE_PIXELS
from .hosts import Hosts, _in, _limit
from .job import Worker, run_job
from .jobs import SCHEMA, quartiles, write_record
from .rank import Rank, run

CLIENTS = 3
# The paper's epochs have at least 100 batches; costs per epoch weigh more in a short one.
EPOCH_BATCHES = 5
# A round is two batches and an epoch, with plain steps between them; DNN 2 takes four times as long.
ROUNDS = {"dnn1": 5, "dnn2": 4}
RATES_MBIT_S = {"dnn1": 200.0, "dnn2": 1000.0}
ARCHITECTURES = ("pipeline_learning", "federated", "split", "parallel_split", "federated_split")
MOST_BYTES = 300_000


@dataclass(frozen=True)
class Seat:
    """One role: its layers (the last one before them, and their last one), its core, whether it computes."""

    role: str
    first: str | None
    last: str | None
    core: int
    partners: tuple[str, ...]
    twin: str = ""  # the role whose times it sleeps
    local: bool = False  # also runs the baseline's steps


def seats(architecture: str, dnn: str) -> list[Seat]:
    """Return the roles of an architecture with three clients (or workers).

    Roles that take turns share one core, so that all run at the same speed; those that compute at once have two.
    """
    cut = CUTS[dnn]
    numbers = range(1, CLIENTS + 1)
    clients = tuple(f"client {number}" for number in numbers)
    if architecture == "pipeline_learning":
        bounds = (None, *cut.workers, None)
        return [
            Seat(
                f"worker {number}", bounds[number - 1], bounds[number], 0,
                tuple(f"worker {other}" for other in (number - 1, number + 1) if other in numbers), local=number == 1,
            )
            for number in numbers
        ]  # fmt: skip
    if architecture == "federated":
        found = [Seat("server", None, None, 0, clients)]
        for number, name in enumerate(clients, 1):
            twin = clients[0] if number > 2 else ""
            found.append(Seat(name, None, None, (number - 1) % 2, ("server",), twin, local=number <= 2))
        return found
    if architecture == "split":
        server = Seat("server", cut.client, None, 0, clients, local=True)
        chain = [
            (f"client {number}", ("server", *(f"client {n}" for n in (number - 1, number + 1) if n in numbers)))
            for number in numbers
        ]
        return [server, *(Seat(name, None, cut.client, 0, partners) for name, partners in chain)]
    if architecture == "parallel_split":
        # The server serves the first client while the others' gradients are in transit: two cores.
        server = Seat("server", cut.client, None, 0, clients, local=True)
        return [
            server,
            *(
                Seat(name, None, cut.client, 1, ("server",), "" if name == clients[0] else clients[0],
                     local=name == clients[0])
                for name in clients
            ),
        ]  # fmt: skip
    edges = tuple(f"edge {number}" for number in numbers)
    found = [Seat("server", cut.client, None, 0, edges)]
    for number, (client, edge) in enumerate(zip(clients, edges, strict=True), 1):
        core, is_real = (number - 1) % 2, number <= 2
        found.append(Seat(edge, cut.client, None, core, (client, "server"), "" if is_real else edges[0]))
        found.append(Seat(client, None, cut.client, core, (edge,), "" if is_real else clients[0], local=is_real))
    return found


@dataclass(frozen=True)
class DtsJob:
    """One architecture with one network; `run` builds the hosts and their cables and writes a record."""

    architecture: str
    dnn: str
    rate_mbit_s: float

    @property
    def name(self) -> str:
        """The record's name."""
        return f"{self.dnn}-{self.architecture}"

    @property
    def at_once(self) -> bool:
        """Whether two clients compute at once for a whole round."""
        return self.architecture in ("federated", "federated_split")

    def is_done(self, out: Path) -> bool:
        """Whether the record exists."""
        return (out / f"{self.name}.json").exists()

    def run(self, out: Path) -> None:
        """Measure, and write the record."""
        found = seats(self.architecture, self.dnn)
        with Hosts((len(found),)) as network:
            workers = self._workers(found, network)
            results = run_job(workers, timeout_s=235.0)
        lead = results[0]
        # If clients trained at once, the averaging role waited for the slowest; in turn, all of them count.
        together = [max(ranks, key=statistics.median) for ranks in lead["local_ms"]]
        in_turn = [[ms for steps in ranks for ms in steps] for ranks in lead["local_ms"]]
        local = [{"samples_ms": [steps]} for steps in (together if self.at_once else in_turn)]
        batch = [{"samples_ms": [samples]} for samples in lead["batch_ms"]]
        epoch = [{"samples_ms": [[sample]]} for sample in lead["epoch_ms"]]
        replayed = [seat.role for seat in found if seat.twin]
        compute = "real" if not replayed else "two processors real, the rest replayed"
        runs = [
            {
                "name": name, "compute": compute, "what_if": [self.what_if(batches)], "batches": batches,
                **quartiles(rounds if len(rounds) > 1 else [*rounds, *rounds]), "rounds": rounds,
            }
            for name, batches, rounds in (("batch", 1, batch), ("epoch", EPOCH_BATCHES, epoch))
        ]  # fmt: skip
        write_record(out / f"{self.name}.json", {
            "schema": SCHEMA, "name": self.name, "measured": time.strftime("%Y-%m-%d %H:%M"),
            "network": {"kind": "a cable for every link", "rate_mbit_s": self.rate_mbit_s},
            "workers": len(found), "experiment": "dts", "model": self.dnn, "batch": BATCH,
            "architecture": self.architecture, "replayed": replayed,
            "alone_ms": {seat.role: times for seat, times in zip(found, lead["alone_ms"], strict=True) if times},
            "baseline": {"trace": trace_name(self.dnn), **quartiles(local), "rounds": local},
            "runs": runs,
            "machine": lead["machine"], "load_average": [row["load_average"] for row in results],
        })  # fmt: skip

    def what_if(self, batches: int) -> str:
        """The same run as a what-if of `whatif apply`; an epoch has more batches."""
        return what_if(self.architecture, self.dnn, self.rate_mbit_s, batches)

    def _workers(self, found: list[Seat], network: Hosts) -> list[Worker]:
        place = {seat.role: number for number, seat in enumerate(found)}
        cables: dict[str, list[dict[str, Any]]] = {seat.role: [] for seat in found}
        pairs = [(seat.role, right) for seat in found for right in seat.partners if place[seat.role] < place[right]]
        addresses = {}
        for number, (left, right) in enumerate(pairs):
            hosts = network.hosts[place[left]], network.hosts[place[right]]
            addresses[left, right] = lay_cable(number, hosts[0].namespace, hosts[1].namespace, self.rate_mbit_s)
        for seat in found:
            for right in seat.partners:
                listens = place[seat.role] < place[right]
                pair = (seat.role, right) if listens else (right, seat.role)
                cables[seat.role].append({"partner": right, "listens": listens, "address": addresses[pair]})
        lead = {
            "twins": [[place[seat.role], place[seat.twin]] for seat in found if seat.twin],
            "local_ranks": [place[seat.role] for seat in found if seat.local],
            # If two clients train at once, so do the baseline's steps: they share the machine's memory.
            "local_together": self.at_once,
            "rounds": ROUNDS[self.dnn], "epoch_batches": EPOCH_BATCHES,
        }  # fmt: skip
        return [
            Worker(host, "benchmarks.lab.dts_roles", {
                "role": seat.role, "architecture": self.architecture, "dnn": self.dnn, "seed": number,
                "first": seat.first, "last": seat.last, "compute": "replayed" if seat.twin else "real",
                "local": seat.local, "cables": cables[seat.role], "control": network.hosts[0].address, **lead,
            }, seat.core)
            for number, (seat, host) in enumerate(zip(found, network.hosts, strict=False))
        ]  # fmt: skip


def what_if(architecture: str, dnn: str, rate_mbit_s: float, batches: int) -> str:
    """The what-if of a run of the lab."""
    cut = CUTS[dnn]
    options = {
        "pipeline_learning": f"cut={','.join(cut.workers)}",
        "federated": f"clients={CLIENTS}",
    }.get(architecture, f"clients={CLIENTS},cut={cut.client}")
    return f"dts:architecture={architecture},{options},batches={batches},bandwidth={rate_mbit_s:g}Mbps"


def lay_cable(number: int, left: str, right: str, rate_mbit_s: float) -> str:
    """Join two namespaces by a pair of rate-limited devices; return the first one's address."""
    device, addresses = f"cable{number}", (f"10.78.{number}.1", f"10.78.{number}.2")
    _in(left, "link", "add", device, "type", "veth", "peer", "name", device, "netns", right)
    for namespace, address in zip((left, right), addresses, strict=True):
        _in(namespace, "addr", "add", f"{address}/30", "dev", device)
        _in(namespace, "link", "set", device, "up")
        _limit(namespace, device, rate_mbit_s)
    return addresses[0]


@dataclass(frozen=True)
class RecordingJob:
    """The recording of one worker, on its own core, from which all of a network's runs are predicted."""

    dnn: str

    @property
    def name(self) -> str:
        """The recording's name."""
        return f"record-{self.dnn}"

    def is_done(self, out: Path) -> bool:
        """Whether the recording exists."""
        return (out / trace_name(self.dnn)).exists()

    def run(self, out: Path) -> None:
        """Record."""
        with Hosts((1,)) as network:
            trace = str((out / trace_name(self.dnn)).resolve())
            run_job([Worker(network.hosts[0], __name__, {"dnn": self.dnn, "trace": trace}, 0)], timeout_s=200.0)


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[DtsJob | RecordingJob]:
    """Both networks' recordings, then all architectures."""
    dnns = [name for name in IMAGE_PIXELS if not models or name in models]
    return [
        *(RecordingJob(dnn) for dnn in dnns),
        *(DtsJob(architecture, dnn, RATES_MBIT_S[dnn]) for dnn in dnns for architecture in ARCHITECTURES),
    ]


def work(rank: Rank) -> dict[str, Any]:
    """Record the training of one worker."""
    from .dts_roles import LocalTraining

    training = LocalTraining(rank.request["dnn"])
    return record_worker(training, Path(rank.request["trace"]), MOST_BYTES)


if __name__ == "__main__":
    run(work, join=False)
