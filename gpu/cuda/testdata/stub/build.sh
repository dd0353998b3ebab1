#!/usr/bin/env bash
# Builds the stub driver and the kernels it runs into $1. Needs g++. STUB_MUTANT names a planted fault of the kernels.
set -euo pipefail
cd "$(dirname "$0")"
out=$1 tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cxx() { g++ -std=c++17 -O1 -fPIC -Wall -Wno-unknown-pragmas -fvisibility=hidden "$@"; }
shim=(-x c++ -DKV_SIMT_SHIM ${STUB_MUTANT:+-DKV_MUTANT_$STUB_MUTANT})
pids=()
cxx -c stub.cpp -o "$tmp/stub.o" & pids+=($!)
cxx -c simt.cpp -o "$tmp/simt.o" & pids+=($!)
cxx "${shim[@]}" -c ../../kernels/pages.cu -o "$tmp/pages.o" & pids+=($!)
for k in 0 1 2; do cxx "${shim[@]}" -DKV_TYPE=$k -c ../../kernels/decode.cu -o "$tmp/decode$k.o" & pids+=($!); done
for p in "${pids[@]}"; do wait "$p"; done
g++ -shared -o "$out" "$tmp"/*.o -Wl,-z,defs
