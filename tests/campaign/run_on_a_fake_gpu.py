"""`run_briefly` on a machine whose GPU is stood in for, and refuses to be traced."""

import pytest

from tests.campaign import run_briefly
from tests.instrumentation import gpu_machine

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        gpu_machine.install(patch, gpu_machine.FakeGpu(), gpu_machine.FakeKineto(kernels=False))
        run_briefly.main()
