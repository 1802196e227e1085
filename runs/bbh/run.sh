#!/usr/bin/env bash
# Two public benchmarks as tasks: BIG-Bench Hard's tracking_shuffled_objects, then StepGame.
# Trains seed 0 of the looped model and of its parent, and scores both; see runs/bbh/README.md.
#
#   bash runs/bbh/run.sh [FOLDER]      FOLDER: where the benchmarks' files lie already
#
# The same command resumes. RUNS="swaps" or RUNS="stepgame" does only one of them, ARMS="random" the
# loop from random weights, and SEEDS="1 2" other seeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
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

[[ -e out/smollm2/hf ]] || bash runs/smollm2/run.sh model
[[ -e $out/cut ]] || python surgery.py out/smollm2/hf $out/cut --shape 8,4,6 --verify
[[ -e $out/parent ]] || python surgery.py out/smollm2/hf $out/parent --feed_forward
for task in ${RUNS:-swaps stepgame}; do
    dir=$out/$task updates=1000
    [[ -e $dir ]] || python -m runs.bbh.$task "$files" $dir
    if [[ $task == stepgame ]]; then
        updates=400
        python data.py prepare --input $dir/train.jsonl --prompt question --field answer \
            --tokenizer $out/cut --out $dir/data --row_length 512
    elif [[ ! -e $dir/data ]]; then
        python -m runs.bbh.mentions --stories $dir/train.jsonl --tokenizer $out/cut --out $dir/data
    fi
    for seed in ${SEEDS:-0}; do
        flags="--config=config/task.toml --data=$dir/data --seed=$seed --updates=$updates"
        flags+=" --eval_rows=32"
        parent="--init_from=$out/parent --out_dir=$dir/parent-$seed --optimizer=adamw --lr=3e-4"
        for arm in ${ARMS:-loop parent}; do
            case $arm in
            loop) python train.py $flags --init_from=$out/cut --out_dir=$dir/loop-$seed ;;
            random)
                python train.py $flags --init_from=$out/cut --out_dir=$dir/random-$seed --reinit \
                    --lr=0.01 --adam_lr=0.001 ;;
            parent)
                equal=$(python -m tools.plan $flags $parent --flops_of=$dir/loop-$seed --quiet)
                python train.py $flags $parent --updates="$equal" ;;
            esac
            for name in test $([[ $task == swaps ]] && echo long || echo sentences); do
                python eval_gsm8k.py --model $dir/$arm-$seed --data $dir/$name.jsonl \
                    --template plain --max_new_tokens 8 --steps 1,4,8,16,32
            done
        done
    done
done
