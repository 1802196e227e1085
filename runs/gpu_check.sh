#!/usr/bin/env bash
# Does loopgraft do on this GPU what it does on the CPU, and how fast? Under ten minutes on one card;
# without one it plays the same steps on the CPU, at a small shape. Please paste the JSON at the end
# into an issue.
#
#   bash runs/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out/gpu_check
PYTHONPATH=. python runs/gpu_check.py 2>&1 | tee out/gpu_check/log.txt
