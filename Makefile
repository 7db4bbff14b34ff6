# Every target makes what it needs: `make demo` and `make test` work on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
PIP := -m pip install -qq --disable-pip-version-check
NBCONVERT := .venv/bin/jupyter-nbconvert --log-level=WARN --to notebook --execute
DEMO_STEPS ?= 12
JOBS ?= auto
# What pip puts on the disk; nearly all of it is PyTorch.
SIZE := 6 GB on Linux, of which 4.3 GB are CUDA libraries for PyTorch; 1 GB on macOS
# What touches diffusers: models, pipelines, schedulers, compilation. Mathematics, reports and docs are the same everywhere.
OLDEST := families compatibility gpu methods toy runtime attention/test_softmax.py cli/test_generate.py \
  benchmarking/test_orders.py \
  drawing/test_running.py drawing/test_compare.py \
  $(addprefix test_,$(addsuffix .py,errors identity loading patch peers plans))
APART := tests/drawing/test_demo.py tests/compatibility/test_features.py
OLDEST_TESTS ?= $(addprefix tests/,$(OLDEST))

.PHONY: help demo test test-oldest test-apart lint size format docs kernels notebooks notebook-outputs clean

help:
	@echo "make demo         some prompts with both toys: untouched, the fastest method, the closest one"
	@echo "make test         the tests"
	@echo "make test-oldest  the core tests on diffusers 0.32.1"
	@echo "make test-apart   the page of the demo, and weights quantised by torchao"
	@echo "make lint         ruff, mypy, layers of imports, sizes, and the prose;  make format mends what ruff can"
	@echo "make size         how large the package and its tests are, and may be"
	@echo "make docs         build the site into outputs/site, with all links checked"
	@echo "make kernels      compile the Triton kernels for cards that need not be here; fails if one spills"
	@echo "make notebooks    execute the notebooks into outputs/notebooks"
	@echo "make notebook-outputs  the same in place, on an idle machine: they are committed with what they print and draw"

demo: .venv/.installed
	.venv/bin/elfatt-sd try --model toy --model toy-dit --prompt "a red star on a striped blue background" \
	  --prompt "a yellow circle on a checkered purple background" --repeats 1 --steps $(DEMO_STEPS) --out outputs/demo

test: .venv/.installed-dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(JOBS) $(ARGS)

test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n $(JOBS) $(OLDEST_TESTS)

test-apart: .venv-apart/.installed
	OMP_NUM_THREADS=1 .venv-apart/bin/python -m pytest $(APART)

lint: .venv/.installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo --no-cache
	.venv/bin/python -m tools.size --check
	.venv/bin/python -m tools.prose

size: .venv/.installed-dev
	.venv/bin/python -m tools.size

format: .venv/.installed-dev
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

# Strict: a link or an anchor that leads nowhere is an error. It needs no network.
docs: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict

# Triton comes with PyTorch on Linux.
kernels: .venv/.installed-dev
	TRITON_DEFAULT_FP_FUSION=1 .venv/bin/python benchmarks/kernels.py

notebooks: .venv/.installed-dev
	$(NBCONVERT) --output-dir outputs/notebooks notebooks/*.ipynb

# Images as JPEG, without times of day: small, and equal images stay equal bytes.
notebook-outputs: .venv/.installed-dev
	$(NBCONVERT) --inplace --ExecutePreprocessor.record_timing=False \
	  --ExecutePreprocessor.extra_arguments=--InlineBackend.figure_formats=jpeg \
	  $(foreach kind,image/jpeg text/markdown text/html,--ExecutePreprocessor.extra_arguments=--DisplayFormatter.active_types=$(kind)) \
	  notebooks/*.ipynb

clean:
	rm -rf .venv .venv-oldest .venv-apart build dist .mypy_cache .ruff_cache .pytest_cache

.venv/.installed: pyproject.toml constraints.txt
	@echo "Installing into .venv, once: $(SIZE)"
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) -c constraints.txt -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "Adding what tests, evaluation and notebooks need to .venv: 0.5 GB more"
	.venv/bin/python $(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	@echo "Installing into .venv-oldest, once: $(SIZE)"
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python $(PIP) -c constraints-oldest.txt -e '.[peers]' peft pytest pytest-timeout pytest-xdist mpmath
	@touch $@

# Gradio wants an older Pillow than .venv has, torchao prints at every import of diffusers; the rest is taken from there.
.venv-apart/.installed: .venv/.installed-dev
	$(PYTHON) -m venv .venv-apart
	.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$(.venv-apart/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/main.pth"
	.venv-apart/bin/python $(PIP) 'gradio>=6,<7' websockets torchao==0.18.0
	@touch $@
