# Everything a new user types: each target sets up its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
OLDEST_VENV ?= .venv-oldest

# Compiled as the package is installed: a change to one of them installs it again.
LOOPS := setup.py $(filter-out %/__init__.py %/__main__.py, $(wildcard whatif/*/_*.py))

# Bytecode is kept, whatever the caller's environment says: without it each worker rewrites each test's assertions anew,
# and each process compiles all modules of whatif.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-all test-oldest lint docs bench clean

# A predicted step of a GPU with its report; needs neither torch nor a GPU.
demo: $(DEMO_VENV)/.ready
	$(DEMO_VENV)/bin/whatif demo

# All tests but those that are marked as slow: five minutes on two cores.
test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n auto --dist loadfile -m "not slow" --durations=10

# The others: the lab, campaigns, refits, every page of the docs, a browser.
test-slow: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n auto --dist worksteal -m slow

# Both in one run: tests are collected once, and the last of them are waited for once.
test-all: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n auto --dist worksteal --durations=30

# The fast tests under the oldest versions of what users install; not in CI: torch of that age brings CUDA's libraries.
test-oldest:
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(PYTHON) tests/floors.py > $(OLDEST_VENV)/floors.txt
	$(OLDEST_VENV)/bin/python -m pip install -q --no-compile -c $(OLDEST_VENV)/floors.txt -e ".[record,plot,fast,opdb,cluster,test]"
	$(OLDEST_VENV)/bin/python -m pytest -n auto --dist loadfile -m "not slow"

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -n 2

# The documentation as a site, in site/: opens from disk.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

bench: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/run.py

$(DEMO_VENV)/.ready: pyproject.toml $(LOOPS)
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install -q --upgrade pip
	$(DEMO_VENV)/bin/python -m pip install -q .
	touch $@

$(VENV)/.ready: pyproject.toml tests/constraints.txt $(LOOPS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade pip
	$(VENV)/bin/python -m pip install -q --no-compile -c tests/constraints.txt -e ".[record,plot,fast,opdb,cluster,docs,test]"
	if [ "$$(uname -s)" = Linux ]; then \
		$(VENV)/bin/python -m pip install -q --no-deps -c tests/constraints.txt cupti-python cuda-bindings; \
	fi
	# On all cores, where pip takes one; without what is hardly imported.
	-$(VENV)/bin/python -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' $(VENV)/lib
	touch $@

clean:
	rm -rf $(VENV) $(DEMO_VENV) $(OLDEST_VENV) build dist site *.egg-info whatif/*/*.so
