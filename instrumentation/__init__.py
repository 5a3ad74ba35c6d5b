"""Records a training run for `whatif`: the only part of the program that needs torch.

    with whatif.instrumentation.record(model, optimizer, "run.json.gz") as recording:
        for batch in loader:
            train(batch)
            recording.step()

`whatif collect train.py` does the same to an unchanged script (`whatif.instrumentation.collect.collect`); there, a
script without a torch optimizer marks the end of each of its steps with `whatif.instrumentation.step()`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collector import step
    from .recorder import Recording, record

__all__ = ["record", "Recording", "step"]

_MODULE_OF = {"record": ".recorder", "Recording": ".recorder", "step": ".collector"}


def __getattr__(name: str) -> object:
    """Import the requested name on first use, so that `import whatif.instrumentation` does not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
