#!/usr/bin/env bash
# The whole study, or some of its items: train, measure, then tables, pictures and the page.
#
#   bash runs/study/all.sh [ITEM ...] [--quick] [--seeds N] [--jobs N]
#
# All of it takes 4 to 5 hours on two idle cores, two runs at a time with one thread each. Stop it
# with ctrl-C; the same command goes on, on another machine, too, if runs/study/results is there.
# What it says is added to runs/study/results/all.log. See play.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
log=runs/study/results/all.log quick='' items=()
for word; do
    case $word in
    --quick) quick=$word log=/dev/null ;;
    [a-z]*) items+=("$word") ;;
    esac
done
failed=''
trap 'exit 130' INT
python runs/study/play.py "$@" 2>&1 | tee -a $log || failed=1
python runs/study/study.py tables $quick "${items[@]}"
if [[ ! $quick ]]; then python runs/study/study.py page; fi
[[ ! $failed ]]
