#!/bin/sh
# Your own task, from questions to a table: see `bash runs/task.sh --help`, and runs/task.py. Paths
# are relative to your folder, whose files never hide ours: data.py, for example.
root=$(cd "$(dirname "$0")/.." && pwd) || exit
export PYTHONPATH="$root" PYTHONSAFEPATH=1
exec python -m runs.task "$@"
