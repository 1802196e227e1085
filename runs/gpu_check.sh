#!/usr/bin/env bash
# Does loopgraft do on this GPU what it does on the CPU, and how fast? It takes 10 to 15 minutes on
# one card by estimate: no GPU has run it. A part takes at most 8, for a card that is borrowed.
# Without a card it plays the same steps on the CPU, at a small shape. It needs requirements.txt and
# no network. Please paste the JSON at the end into an issue.
#
#   bash runs/gpu_check.sh [--part correct | train | speed | decode]
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out/gpu_check
PYTHONPATH=. python runs/gpu_check.py "$@" 2>&1 | tee "out/gpu_check/log${2:+_$2}.txt"
