#!/usr/bin/env bash
# Check that loopgraft does on this GPU what it does on the CPU, and measure how fast. This has not
# run on a GPU yet. We estimate 10 to 15 minutes in all, and at most 8 minutes for each --part, in
# case you have a GPU only for a short time. Without a GPU the same steps run on the CPU, with a
# small model. It needs the packages of requirements.txt and no network. Please paste the JSON of
# its last line into an issue.
#
#   bash runs/gpu_check.sh [--part correct | train | speed | decode]
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out/gpu_check
PYTHONPATH=. python runs/gpu_check.py "$@" 2>&1 | tee "out/gpu_check/log${2:+_$2}.txt"
