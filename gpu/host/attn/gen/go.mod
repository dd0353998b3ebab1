module github.com/kvtier/kvtier/gpu/host/attn/gen

go 1.26.0

// No build imports these, since every file here is run by name: go mod tidy would drop them.
require (
	github.com/mmcloughlin/avo v0.5.0 // indirect
	golang.org/x/mod v0.42.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/tools v0.52.0 // indirect
)
