#!/usr/bin/env bash
# The whole paper on a procedural corpus, on a CPU, without a download: pretrain an ordinary Llama,
# cut it into prelude, recurrent block and coda, heal it, teach it to recur, and compare it with its
# parent at equal tokens and at equal training FLOPs.
#
#   bash runs/tiny.sh [--quick] [--seed N]
#
# --quick plays every stage in about a minute (too short to learn); --seed N writes to out/tiny-seedN.
# A run that was stopped goes on where it was; `rm -rf out/tiny` starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
out=out/tiny seed=0 quick=
while (($#)); do
    case $1 in
    --quick) quick=1 out=out/tiny-quick; shift ;;
    --seed) seed=${2:?--seed needs a number} out=out/tiny-seed$2; shift 2 ;;
    *) echo "tiny.sh: error: unknown flag $1 (--quick, --seed N)" >&2; exit 2 ;;
    esac
done
# bfloat16 products where the processor has them (a third faster here), float32 elsewhere.
dtype=float32
if grep -qs bf16 /proc/cpuinfo; then dtype=bfloat16; fi
stage() { printf '\n== %s ==  (%d s)\n' "$1" $SECONDS; }
train() {  # train CONFIG NAME [--key=value ...]: config/tiny_CONFIG.toml into $out/NAME
    local config=$1 name=$2
    shift 2
    python train.py --config=config/tiny_"$config".toml --seed="$seed" --out_dir="$out/$name" --dtype=$dtype "$@" ${quick:+--compile=false}
}

stage "1. the corpus, its word model and a test set"
python data.py tiny --out $out/data ${quick:+--rows 8000}
stage "2. pretrain an ordinary Llama"
train pretrain pretrain --data=$out/data/pretrain ${quick:+--updates=8}
stage "3. surgery: layer 0 is the prelude, 3 and 4 the recurrent block, 5 the coda"
[[ -e $out/tiny-1-2-1 ]] || python surgery.py $out/pretrain $out/tiny-1-2-1 --prelude 0 --core 3-4 --coda 5
stage "4. heal at one recurrence, then train with the curriculum"
train heal heal --data=$out/data/pretrain --init_from=$out/tiny-1-2-1 ${quick:+--updates=4}
train task task --data=$out/data/task --init_from=$out/heal ${quick:+--updates=6}
stage "5. post-train the untouched parent: on as many tokens, then on as many training FLOPs"
train parent parent_tokens --data=$out/data/task --init_from=$out/pretrain --match_tokens=$out/task
train parent parent_flops --data=$out/data/task --init_from=$out/pretrain --match_flops=$out/task
stage "6. score them all"
score() {  # score NAME FOLDER FILE
    python eval_gsm8k.py --model $out/"$2" --data $out/data/"$3".jsonl --template plain --max_new_tokens 1 --batch_size 200 \
        --steps 1,2,4,8,16,32 --overwrite --out $out/eval_"$1".json ${quick:+--limit 120}
}
score recurrent task test
score parent_tokens parent_tokens test
score parent_flops parent_flops test
if [[ ! $quick ]]; then  # stories longer than any in training
    score recurrent_18 task test18
    score parent_flops_18 parent_flops test18
fi
stage "accuracy over r, and by the number of sentences"
python bench.py plot $out/eval_recurrent.json $out/eval_parent_tokens.json $out/eval_parent_flops.json \
    --labels "recurrent,parent at equal tokens,parent at equal FLOPs" --out $out/accuracy.png
echo "done in $SECONDS s; next: python sample.py --steps 32"
