"""The campaign trains with torch: without it these tests are left out, unless nothing may be skipped."""

import importlib.util
import os

if os.environ.get("WHATIF_STRICT") != "1" and importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
