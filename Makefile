# Everything a developer or CI runs. Needs Go 1.26, Python 3.10 or later and, for the race detector, gcc.

GO      ?= go
PYTHON  ?= python3
VERSION ?= $(shell git describe --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
TOOL    := $(GO) tool -modfile=.ci/tools/go.mod
PYENV   := bin/python
ENGINES := bin/engines
PYPROTO := bin/tools/protoc-python
LINTER  := $(GO) tool -modfile=.ci/lint/go.mod golangci-lint
SEED    ?= 0
ROUNDS  ?= 200

.PHONY: build static gpu-check ptx-check demo demo-engine test-engines test unit race sabotage python torture lint proto proto-python proto-check bench clean

build: ## bin/kvtier, one binary: finds a CUDA driver at run time, so it needs glibc's loader (docs/adr/0013)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/kvtier ./cmd/kvtier

static: ## bin/kvtier-static, without CUDA and without a loader
	CGO_ENABLED=0 $(GO) build -tags nocuda -trimpath -ldflags '$(LDFLAGS)' -o bin/kvtier-static ./cmd/kvtier

GPU_CHECK := bin/gpu-check

gpu-check: ## bin/gpu-check: a folder to copy to a machine with a GPU; there run.sh needs the driver only, under 5 minutes, and prints one JSON
	@rm -rf $(GPU_CHECK) && mkdir -p $(GPU_CHECK)/kernels
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(GPU_CHECK)/check ./gpu/cuda/check
	CGO_ENABLED=0 $(GO) test -trimpath -ldflags '-s -w' -c -o $(GPU_CHECK)/conformance.test ./gpu/cuda
	gpu/cuda/testdata/stub/build.sh $(GPU_CHECK)/libcuda-stub.so gpu/cuda/kernels
	cp gpu/cuda/check/consumer.py gpu/cuda/check/run.sh $(GPU_CHECK)/
	cp gpu/cuda/kernels/*.cu gpu/cuda/kernels/*.h gpu/cuda/kernels/*.ptx.gz $(GPU_CHECK)/kernels/
	@du -sk $(GPU_CHECK) | awk '$$1 > 65536 { print "the folder has more than 64 MiB"; exit 1 } { print $$1 " KiB in $(GPU_CHECK)" }'

PTXAS := bin/ptxas

# $(PTXAS)/ready: NVIDIA's assembler from its wheel, 47 MB, under its own licence: used, never shipped.
$(PTXAS)/ready:
	$(PYTHON) -m venv $(PTXAS)
	$(PTXAS)/bin/pip install -q --disable-pip-version-check --no-deps nvidia-cuda-nvcc==13.5.37
	touch $@

ptx-check: $(PTXAS)/ready ## assembles all kernels for sm_80 and sm_90 without a GPU; a kernel that spills is an error
	PATH="$$(dirname "$$(find $(CURDIR)/$(PTXAS) -name ptxas -type f)"):$$PATH" $(GO) test -count=1 -run PTX -v ./gpu/cuda/kernels

demo: build ## the main job on this machine, nothing else needed
	bin/kvtier demo

test: race sabotage python ## every test that needs no engine

race: ## all packages under the race detector, which also turns on internal checks
	$(GO) test -race -timeout 20m ./...

unit: ## all packages without the race detector: allocation guards count exactly here
	$(GO) test -timeout 10m ./...

sabotage: ## breaking what a zero guards must make it non-zero
	$(GO) test -timeout 10m -tags sabotage -run 'Sabotage' ./...

# $(PYENV)/ready: the package with what its tests need, in an environment of its own.
$(PYENV)/ready: client/python/pyproject.toml
	$(PYTHON) -m venv $(PYENV)
	$(PYENV)/bin/pip install -q --disable-pip-version-check -e 'client/python[dev]'
	touch $@

python: build $(PYENV)/ready ## the Python package: lint, types, tests against the built daemon, and its wheel in a clean environment
	cd client/python && for at in . "--config pyproject.toml ../../examples"; do \
		$(CURDIR)/$(PYENV)/bin/ruff check $$at && $(CURDIR)/$(PYENV)/bin/ruff format --check $$at || exit 1; done
	cd client/python && $(CURDIR)/$(PYENV)/bin/mypy
	$(PYENV)/bin/python -m pytest client/python
	rm -rf bin/wheel
	$(PYTHON) -m venv bin/wheel
	bin/wheel/bin/pip install -q --disable-pip-version-check ./client/python
	bin/wheel/bin/python -m kvtier.check --socket /nonexistent.sock | grep 'start `kvtier serve`' >/dev/null
	bin/wheel/bin/python client/python/tests/wheel.py bin/kvtier

# $(ENGINES)/ready: the engines that run on a CPU, several GB because torch from PyPI brings its GPU libraries.
$(ENGINES)/ready: client/python/engines.txt client/python/engines-override.txt client/python/engines-sglang.txt client/python/engines-lmcache.txt client/python/pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install -q --disable-pip-version-check uv
	$(ENGINES)/bin/uv pip install -q --python $(ENGINES)/bin/python --override client/python/engines-override.txt \
		-r client/python/engines.txt -e 'client/python[dev]'
	$(ENGINES)/bin/uv pip install -q --python $(ENGINES)/bin/python --no-deps --target $(ENGINES)/sglang -r client/python/engines-sglang.txt
	$(ENGINES)/bin/uv pip install -q --python $(ENGINES)/bin/python --no-deps --target $(ENGINES)/lmcache -r client/python/engines-lmcache.txt
	touch $@

test-engines: build $(ENGINES)/ready ## the Python package with real engines
	$(ENGINES)/bin/python -m pytest client/python/tests/engine_transformers.py
	$(ENGINES)/bin/python -m pytest client/python/tests/engine_vllm.py
	$(ENGINES)/bin/python -m pytest client/python/tests/engine_vllm_tier.py
	PYTHONPATH=$(ENGINES)/sglang $(ENGINES)/bin/python -m pytest client/python/tests/engine_sglang.py client/python/tests/engine_sglang_pools.py
	PYTHONPATH=$(ENGINES)/lmcache $(ENGINES)/bin/python -m pytest client/python/tests/engine_lmcache.py

demo-engine: build $(ENGINES)/ready ## time to first token of a small real model: recompute, cold, warm from RAM, warm from NVMe
	$(ENGINES)/bin/python examples/transformers_demo.py --kvtier bin/kvtier

torture: ## hours: hundreds of rounds of the crash and random tests; prints its seeds
	KVTIER_TORTURE=$(ROUNDS) KVTIER_SEED=$(SEED) $(GO) test -race -timeout 12h -count=1 ./...

lint: proto-check ## formatting, vet, the linters of .golangci.yml, the wire format
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "gofmt these files:"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	$(LINTER) run ./...

$(PYPROTO)/ready:
	$(PYTHON) -m venv $(PYPROTO)
	$(PYPROTO)/bin/pip install -q --disable-pip-version-check grpcio-tools==1.76.0
	touch $@

# The generated code works with the protobuf runtime that made it and with all of the next major version.
proto-python: $(PYPROTO)/ready ## regenerate the Python code of proto/
	$(PYPROTO)/bin/python -m grpc_tools.protoc -I proto --python_out=client/python/src --pyi_out=client/python/src kvtier/v1/types.proto kvtier/v1/directory.proto kvtier/v1/pages.proto kvtier/v1/sessions.proto

proto: proto-python ## regenerate the code of proto/
	@mkdir -p bin/tools
	GOBIN=$(CURDIR)/bin/tools $(GO) install -modfile=.ci/tools/go.mod tool
	PATH="$(CURDIR)/bin/tools:$$PATH" bin/tools/buf generate --template proto/buf.gen.yaml

proto-check: ## lint the wire format, compare it with the last release, and the generated code with its source
	@mkdir -p bin/tools
	GOBIN=$(CURDIR)/bin/tools $(GO) install -modfile=.ci/tools/go.mod tool
	bin/tools/buf lint
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	sed "s|out: proto|out: $$tmp|" proto/buf.gen.yaml > "$$tmp/gen.yaml"; \
	PATH="$(CURDIR)/bin/tools:$$PATH" bin/tools/buf generate --template "$$tmp/gen.yaml"; \
	for f in "$$tmp"/kvtier/v1/*.go; do cmp "$$f" "proto/kvtier/v1/$$(basename $$f)" || { echo "run make proto"; exit 1; }; done
	@$(MAKE) -s $(PYPROTO)/ready
	@set -e; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PYPROTO)/bin/python -m grpc_tools.protoc -I proto --python_out="$$tmp" --pyi_out="$$tmp" kvtier/v1/types.proto kvtier/v1/directory.proto kvtier/v1/pages.proto kvtier/v1/sessions.proto; \
	for f in "$$tmp"/kvtier/v1/*; do cmp "$$f" "client/python/src/kvtier/v1/$$(basename $$f)" || { echo "run make proto"; exit 1; }; done
	@base=$$(git describe --tags --abbrev=0 2>/dev/null) && bin/tools/buf breaking --against ".git#tag=$$base" || test -z "$$base"

bench: build ## the figures of README, each beside its bound
	bin/kvtier bench local
	bin/kvtier bench commit
	bin/kvtier bench nvme
	bin/kvtier bench index

clean:
	rm -rf bin
