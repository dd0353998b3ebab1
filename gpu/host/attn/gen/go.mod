module github.com/kvtier/kvtier/gpu/host/attn/gen

go 1.26.0
