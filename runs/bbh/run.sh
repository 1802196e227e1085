#!/usr/bin/env bash
# Two public benchmarks as tasks: BIG-Bench Hard's tracking_shuffled_objects, then StepGame.
# Trains seed 0 of the looped model and of its parent, and scores both; see runs/bbh/README.md.
#
#   bash runs/bbh/run.sh [FOLDER]      FOLDER: where the benchmarks' files lie already
#
# The same command resumes. RUNS="swaps" or RUNS="stepgame" does only one of them.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=out/bbh files=${1:-out/bbh/files}
mkdir -p "$files"
raw=https://raw.githubusercontent.com
while read -r _ name; do
    case $name in
    tracking*) from=$raw/suzgunmirac/BIG-Bench-Hard/main/bbh ;;
    *) from=$raw/ZhengxiangShi/StepGame/main/Dataset/CompleteVersion/clean ;;
    esac
    [[ -e $files/$name || -e $files/$name.gz ]] ||
        { curl -sfL "$from/$name" -o "$files/$name.part" && mv "$files/$name.part" "$files/$name"; }
    if [[ -e $files/$name.gz ]]; then gzip -dc "$files/$name.gz"; else cat "$files/$name"; fi |
        sha256sum --check <(grep " $name$" runs/bbh/files.sha256 | sed 's/ [^ ]*$/ -/') > /dev/null 2>&1 ||
        { echo "run.sh: error: $files/$name is not the file of these experiments" >&2; exit 1; }
done < runs/bbh/files.sha256

for task in ${RUNS:-swaps stepgame}; do
    [[ -e $out/$task/train.jsonl ]] || python -m runs.bbh.$task "$files" $out/$task
    # All 30 layers of SmolLM2 stay, and four of them run in a loop.
    bash runs/task.sh $out/$task --shape 13,4,13 --row_length 512 -- --updates=1000
    for model in loop-0 parent-0; do
        python eval_gsm8k.py --model $out/$task/$model --template plain --steps 1,4,8,16,32 \
            --data $out/$task/$([[ $task == swaps ]] && echo long || echo sentences).jsonl
    done
done
