"""Pipeline learning: keep the layers on several processors, each of which passes on what it computed.

Source: Robinson et al., "DTS" (MASCOTS 2022) §III-A, equation (1).
Model:  worker after worker goes forward and sends what flows out, then backward and sends the gradient; nothing
        overlaps, as the paper's sum says: it is about memory, not time (`pipeline` has micro-batches). Workers are as
        few as hold the network, `cut` where least flows. Roles go by the heuristic of §II-C, up to `max_paths` of them
        (0: all), on the processors of the file `cluster`, else on machines like the recorded one. A step is `batches`
        batches. The update counts with the backward pass. Deviation: (1) sums the transfers over all layers.
Effort: large: a process for each part, torch.distributed send and recv between them, machines.
"""

from collections.abc import Iterable

from whatif import Phase, TaskGraph
from whatif.dts.cuts import parts_of, pipeline_cuts
from whatif.dts.dnn import Dnn
from whatif.dts.machines import Machines
from whatif.dts.options import train_distributed
from whatif.dts.plan import Plan, Role, Training
from whatif.units import Bandwidth

GIGABIT = Bandwidth("1Gbps")


def cuts(dnn: Dnn, training: Training, machines: Machines) -> Iterable[tuple[int, ...]]:
    """The parts through whose ends least flows."""
    return pipeline_cuts(dnn, machines, training.workers)


def roles(dnn: Dnn, training: Training) -> list[Role]:
    """One worker a part, which exchanges what flows in and its gradient with the worker before it."""
    parts = parts_of(dnn, training.cuts)
    found = []
    for number, part in enumerate(parts, 1):
        partners = {f"worker {number - 1}": 2 * part.in_bytes} if number > 1 else {}
        partners |= {f"worker {number + 1}": 2 * part.out_bytes} if number < len(parts) else {}
        found.append(Role(f"worker {number}", part.work_ns, part.memory_bytes, partners))
    return found


def play(plan: Plan, training: Training) -> None:
    """Every batch through all workers and back."""
    parts = parts_of(plan.dnn, training.cuts)
    done: list[int] = []
    for plan.batch in range(training.batches):
        done = [plan.compute("worker 1", plan.dnn.fetch_ns, "fetch", Phase.DATA, done)]
        for number, part in enumerate(parts, 1):
            if number > 1:
                done = [plan.send(f"worker {number - 1}", f"worker {number}", part.in_bytes, "activations", done)]
            done = [plan.compute(f"worker {number}", part.forward_ns, "forward", Phase.FORWARD, done)]
        for number, part in reversed(list(enumerate(parts, 1))):
            done = [plan.compute(f"worker {number}", part.backward_ns, "backward", Phase.BACKWARD, done)]
            if number > 1:
                ends = f"worker {number}", f"worker {number - 1}"
                done = [plan.send(*ends, part.in_bytes, "gradients", done, Phase.BACKWARD)]


def transform(
    graph: TaskGraph,
    *,
    workers: int = 0,
    cut: str = "",
    batches: int = 1,
    cluster: str | None = None,
    bandwidth: Bandwidth = GIGABIT,
    latency_us: float = 100.0,
    max_paths: int = 100,
) -> TaskGraph:
    """Spread the layers over workers that follow one another."""
    return train_distributed(
        graph, "pipeline_learning", workers=workers, cut=cut, batches=batches, cluster=cluster, bandwidth=bandwidth,
        latency_us=latency_us, max_paths=max_paths,
    )  # fmt: skip
