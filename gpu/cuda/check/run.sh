#!/bin/sh
# Checks and measures one GPU with what lies in this folder: needs the NVIDIA
# driver only, builds nothing, fetches nothing. Prints one JSON object on standard
# output; exits 1 if something is wrong. Arguments go to check (-device N).
set -u
cd "$(dirname "$0")" || exit 1
export CUDA_CACHE_PATH="${TMPDIR:-/tmp}/kvtier-gpu-check-cache"
timeout 300 ./check "$@"
