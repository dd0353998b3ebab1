#!/usr/bin/env bash
# Builds the stub driver with the kernels in directory $2 into $1. Needs g++.
set -euo pipefail
out=$(realpath "$1") kernels=$(realpath "$2") tmp=$(mktemp -d)
cd "$(dirname "$0")"
trap 'rm -rf "$tmp"' EXIT
cxx() { g++ -std=c++17 -O1 -fPIC -Wall -Wno-unknown-pragmas -fvisibility=hidden "$@"; }
shim=(-x c++ -DKV_SIMT_SHIM)
pids=()
cxx -c stub.cpp -o "$tmp/stub.o" & pids+=($!)
cxx -c simt.cpp -o "$tmp/simt.o" & pids+=($!)
cxx "${shim[@]}" -c "$kernels"/pages.cu -o "$tmp/pages.o" & pids+=($!)
for k in 0 1 2; do cxx "${shim[@]}" -DKV_TYPE=$k -c "$kernels"/decode.cu -o "$tmp/decode$k.o" & pids+=($!); done
for p in "${pids[@]}"; do wait "$p"; done
g++ -shared -o "$out" "$tmp"/*.o -Wl,-z,defs
