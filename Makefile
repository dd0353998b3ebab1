# Everything a developer or CI runs. Needs Go 1.26 and, for the race detector, gcc.

GO      ?= go
VERSION ?= $(shell git describe --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
TOOL    := $(GO) tool -modfile=.ci/tools/go.mod
LINTER  := $(GO) tool -modfile=.ci/lint/go.mod golangci-lint
SEED    ?= 0
ROUNDS  ?= 200

.PHONY: build demo test unit race sabotage torture lint proto proto-check bench clean

build: ## bin/kvtier, one static binary
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/kvtier ./cmd/kvtier

demo: build ## the main job on this machine, nothing else needed
	bin/kvtier demo

test: race sabotage ## every test

race: ## all packages under the race detector, which also turns on internal checks
	$(GO) test -race -timeout 20m ./...

unit: ## all packages without the race detector: allocation guards count exactly here
	$(GO) test -timeout 10m ./...

sabotage: ## breaking what a zero guards must make it non-zero
	$(GO) test -timeout 10m -tags sabotage -run 'Sabotage' ./...

torture: ## hours: hundreds of rounds of the crash and random tests; prints its seeds
	KVTIER_TORTURE=$(ROUNDS) KVTIER_SEED=$(SEED) $(GO) test -race -timeout 12h -count=1 ./...

lint: proto-check ## formatting, vet, the linters of .golangci.yml, the wire format
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "gofmt these files:"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	$(LINTER) run ./...

proto: ## regenerate the Go code of proto/
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
	@base=$$(git describe --tags --abbrev=0 2>/dev/null) && bin/tools/buf breaking --against ".git#tag=$$base" || test -z "$$base"

bench: build ## the figures of README, each beside its bound
	bin/kvtier bench local
	bin/kvtier bench commit
	bin/kvtier bench nvme
	bin/kvtier bench index

clean:
	rm -rf bin
