#!/usr/bin/env bash
# A public benchmark as a task: BIG-Bench Hard's tracking_shuffled_objects. Trains seed 0 of the
# looped model and of its parent, and scores both; see runs/bbh/README.md.
#
#   bash runs/bbh/run.sh [FOLDER]      FOLDER: where the benchmark's files lie already
#
# The same command resumes. SEEDS="1 2" trains other seeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
out=out/bbh files=${1:-out/bbh/files}
mkdir -p "$files"
from=https://raw.githubusercontent.com/suzgunmirac/BIG-Bench-Hard/main/bbh
while read -r _ name; do
    [[ -e $files/$name ]] ||
        { curl -sfL "$from/$name" -o "$files/$name.part" && mv "$files/$name.part" "$files/$name"; }
done < runs/bbh/files.sha256
sums=$PWD/runs/bbh/files.sha256
(cd "$files" && sha256sum --quiet --check "$sums")

[[ -e out/smollm2/hf ]] || bash runs/smollm2/run.sh model
[[ -e $out/cut ]] || python surgery.py out/smollm2/hf $out/cut --shape 8,4,6 --verify
[[ -e $out/parent ]] || python surgery.py out/smollm2/hf $out/parent --feed_forward
dir=$out/swaps
[[ -e $dir ]] || python -m runs.bbh.swaps "$files" $dir
[[ -e $dir/data ]] ||
    python -m runs.bbh.mentions --stories $dir/train.jsonl --tokenizer $out/cut --out $dir/data
for seed in ${SEEDS:-0}; do
    flags="--config=config/task.toml --data=$dir/data --seed=$seed --eval_rows=32"
    python train.py $flags --init_from=$out/cut --out_dir=$dir/loop-$seed --updates=1000
    flags+=" --init_from=$out/parent --out_dir=$dir/parent-$seed --optimizer=adamw --lr=3e-4"
    updates=$(python -m tools.plan $flags --flops_of=$dir/loop-$seed --quiet)
    python train.py $flags --updates="$updates"
    for run in loop-$seed parent-$seed; do
        for name in test long; do
            python eval_gsm8k.py --model $dir/$run --data $dir/$name.jsonl --template plain \
                --max_new_tokens 8 --steps 1,4,8,16,32
        done
    done
done
