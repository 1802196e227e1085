#!/usr/bin/env bash
# The whole study, or some of its items: train, measure, then tables, pictures and the page.
#
#   bash runs/study/all.sh [ITEM ...] [--quick] [--seeds N]
#
# See play.py for what it does and where. It takes about HOURS on two idle cores, two runs at a time
# with one thread each; stop it with ctrl-C. The same command goes on, on another machine, too,
# if runs/study/results went there. Its lines are added to runs/study/results/all.log.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
quick='' items=()
for word; do
    case $word in --quick) quick=--quick ;; [a-z]*) items+=("$word") ;; esac
done
log=runs/study/results/all.log
if [[ $quick ]]; then log=/dev/null; fi
python runs/study/play.py "$@" 2>&1 | tee -a $log
python runs/study/study.py tables $quick "${items[@]}"
if [[ ! $quick ]]; then python runs/study/study.py page; fi
