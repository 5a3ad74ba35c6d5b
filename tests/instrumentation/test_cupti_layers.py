"""Layers of real models by stamps alone: real forward and backward passes on the CPU, and the clock of the wall."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from whatif.instrumentation.cupti.layers import (
    ACCUMULATE,
    ANNOTATION,
    BACKWARD_PREFIX,
    OPERATOR,
    OVERHEAD,
    LayerStamps,
    Span,
)

LAYER = "whatif::layer::"


class Block(nn.Module):
    """Its sum belongs to it and not to a child; the ReLU works in place, which full backward hooks would break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x))) + x  # type: ignore[no-any-return]


def small_cnn(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), Block(width), Block(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(width, 10),
    )  # fmt: skip


def run(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    loss = nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,)))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def stamped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[LayerStamps]:
    stamps = LayerStamps(model, optimizer, time.time_ns)
    stamps.attach()
    try:
        yield stamps
    finally:
        stamps.remove()


def forward_of(spans: list[Span], node: Span) -> str:
    """The innermost forward span around the moment in which a node was made."""
    assert node.made_in is not None
    around = [
        span
        for span in spans
        if span.category == ANNOTATION
        and span.thread == node.made_in.thread
        and span.start_ns <= node.made_in.time_ns < span.end_ns
    ]
    return max(around, key=lambda span: span.start_ns).name.removeprefix(LAYER)


def backward_layers(spans: list[Span]) -> dict[str, set[str]]:
    """The layers of each kind of backward node."""
    found: dict[str, set[str]] = {}
    for span in spans:
        if span.category == OPERATOR:
            layer = forward_of(spans, span) if span.made_in else ""
            found.setdefault(span.name.removeprefix(BACKWARD_PREFIX), set()).add(layer)
    return found


def test_forward_calls_nest_as_modules_do() -> None:
    model = small_cnn()
    with stamped(model) as stamps:
        run(model)
    spans = {span.name.removeprefix(LAYER): span for span in stamps.spans if span.category == ANNOTATION}
    assert list(spans)[-1] == "(root)"
    assert {"0", "1", "1.conv", "1.norm", "1.act", "2.conv", "5"} <= set(spans)
    assert spans["1"].start_ns <= spans["1.conv"].start_ns <= spans["1.conv"].end_ns <= spans["1.norm"].start_ns
    assert spans["1.act"].end_ns <= spans["1"].end_ns <= spans["(root)"].end_ns


def test_backward_nodes_belong_to_the_layer_that_made_them() -> None:
    model = small_cnn()
    with stamped(model) as stamps:
        run(model)
    layers = backward_layers(stamps.spans)
    assert layers["ConvolutionBackward0"] == {"0", "1.conv", "2.conv"}
    assert layers["NativeBatchNormBackward0"] == {"1.norm", "2.norm"}
    assert layers["ReluBackward0"] == {"1.act", "2.act"}
    assert layers["AddBackward0"] == {"1", "2"}
    assert layers["AddmmBackward0"] == {"5"}
    assert layers["NllLossBackward0"] == {""}
    assert layers[ACCUMULATE] == {"0", "1.conv", "1.norm", "2.conv", "2.norm", "5"}


def attention() -> tuple[nn.Module, torch.Tensor]:
    """Its products are made outside its leaves."""
    return nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0), torch.randn(8, 64, 128)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    return small_cnn(32), torch.randn(32, 3, 32, 32)


@pytest.mark.parametrize("make", [convolutions, attention])
def test_nine_tenths_of_the_backward_time_land_on_a_layer(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    """From the first node to the last; what lies between two nodes belongs to the one before, as in the reader."""
    model, batch = make()
    # The first pass starts threads and allocates.
    model(batch).square().mean().backward()
    with stamped(model) as stamps:
        shares = []
        for _ in range(5):
            stamps.spans.clear()
            stamps.next_step()
            model(batch).square().mean().backward()
            nodes = sorted((span for span in stamps.spans if span.category == OPERATOR), key=lambda s: s.start_ns)
            ends_ns = [*(node.start_ns for node in nodes[1:]), nodes[-1].end_ns]
            until = zip(nodes, ends_ns, strict=True)
            labelled_ns = sum(end_ns - node.start_ns for node, end_ns in until if node.made_in)
            shares.append(labelled_ns / (nodes[-1].end_ns - nodes[0].start_ns))
    # Another process may have held up one of the passes.
    assert max(shares) >= 0.9


def test_the_update_is_marked_with_its_optimizer() -> None:
    model = small_cnn()
    optimizer = torch.optim.AdamW(model.parameters())
    with stamped(model, optimizer) as stamps:
        run(model, optimizer)
    assert [span.name for span in stamps.spans if span.name.startswith("Optimizer")] == ["Optimizer.step#AdamW.step"]


def test_every_span_is_pushed_and_popped_once() -> None:
    model = small_cnn()
    pushed: list[int] = []
    popped: list[int] = []
    stamps = LayerStamps(model, None, time.time_ns, pushed.append, lambda: popped.append(1))
    stamps.attach()
    run(model)
    stamps.remove()
    assert len(popped) == len(pushed) == len(set(pushed))
    assert {span.identifier for span in stamps.spans if span.category != OVERHEAD} == set(pushed)


def test_nothing_is_left_on_the_model() -> None:
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Data parallelism holds the nodes that accumulate gradients: hooks on them would pile up.
    held = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]  # type: ignore[union-attr]
    engine = torch.autograd._engine_run_backward
    counts = []
    with stamped(model, optimizer) as stamps:
        for _ in range(3):
            stamps.spans.clear()
            run(model, optimizer)
            counts.append(Counter(span.name for span in stamps.spans))
    assert counts[0] == counts[1] == counts[2]
    stamps.spans.clear()
    run(model, optimizer)
    assert stamps.spans == []
    assert torch.autograd._engine_run_backward is engine
    assert held


def test_a_retained_graph_is_stamped_in_each_pass() -> None:
    model = small_cnn()
    with stamped(model) as stamps:
        loss = model(torch.randn(8, 3, 32, 32)).sum()
        loss.backward(retain_graph=True)
        first = Counter(span.name for span in stamps.spans if span.category == OPERATOR)
        stamps.spans.clear()
        loss.backward()
        second = Counter(span.name for span in stamps.spans if span.category == OPERATOR)
    assert first == second
    assert first[BACKWARD_PREFIX + "ConvolutionBackward0"] == 3


def test_gradients_asked_for_directly_are_stamped() -> None:
    model = small_cnn()
    with stamped(model) as stamps:
        torch.autograd.grad(model(torch.randn(8, 3, 32, 32)).sum(), list(model.parameters()))
    assert backward_layers(stamps.spans)["AddmmBackward0"] == {"5"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_keep_their_names(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, padding=1)
            self.block = Block(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.block, self.stem(x), use_reentrant=reentrant)
            return x.mean((2, 3))

    model = Checkpointed()
    with stamped(model) as stamps:
        run(nn.Sequential(model, nn.Linear(16, 10)))
    layers = backward_layers(stamps.spans)
    assert layers["ConvolutionBackward0"] == {"stem", "block.conv"}
    assert layers["NativeBatchNormBackward0"] == {"block.norm"}
    recomputed = [span for span in stamps.spans if span.name == LAYER + "block.conv"]
    assert len(recomputed) == 2


def test_an_error_in_a_layer_leaves_the_stamps_in_order() -> None:
    class Faulty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    model = nn.Sequential(nn.Linear(4, 4), Faulty())
    with stamped(model) as stamps:
        with pytest.raises(ArithmeticError):
            model(torch.randn(2, 4))
        stamps.spans.clear()
        model[0](torch.randn(2, 4)).sum().backward()
    assert [span.name for span in stamps.spans if span.category == ANNOTATION] == [LAYER + "0"]
    assert backward_layers(stamps.spans)["AddmmBackward0"] == {"0"}
