#!/bin/sh
# Your own task, from questions to a table: see runs/task.py, or `bash runs/task.sh --help`. Paths are
# relative to your folder, not to the checkout, and files there never stand in for ours.
root=$(cd "$(dirname "$0")/.." && pwd) || exit
export PYTHONPATH="$root" PYTHONSAFEPATH=1
exec python -m runs.task "$@"
