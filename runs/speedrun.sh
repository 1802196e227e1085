#!/usr/bin/env bash
# The loop's speedrun: from a fixed parent to 95% of unseen products in S5 with the fewest training
# FLOPs. runs/speedrun/README.md has the rules, the records and what failed.
#
#   bash runs/speedrun.sh                          play the record
#   bash runs/speedrun.sh NAME [--key=value ...]   with other settings of train.py, in out/speedrun/NAME
#
# It takes about 6 minutes on one core. The same command continues a run that was stopped. SHAPE,
# HEAL and SEEDS in the environment change the surgery, the updates of healing, and which seeds run.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' runs/speedrun.sh; exit; fi
export OMP_NUM_THREADS=1
name=${1:-record}
shift || true
out=out/speedrun/$name
data=out/speedrun/data
shape=${SHAPE:-1,2,1}
heal=${HEAL:-0}
parent=runs/speedrun/parent
digest=3ddd6d11bebb51c357e3bde80a2f28a779a00dab1e7c44127ce25897c4860751
sha256sum --quiet --check <<<"$digest  $parent/model.safetensors"
[[ -e $data ]] || python runs/tiny_corpus.py --task s5 --out $data

stage() {  # stage CONFIG FROM DATA OUT [--key=value ...]: training by config/tiny_CONFIG.toml
    python train.py --config=config/tiny_"$1".toml --seed="$seed" --init_from="$2" \
        --data=$data/"$3" --out_dir="$4" --eval_rows=1024 --eval_every=100000 "${@:5}"
}
for seed in ${SEEDS:-0 1 2}; do
    from=out/speedrun/cut-$shape  # this and the healed ones are of all names
    [[ -e $from ]] || python surgery.py $parent "$from" --shape "$shape"
    if ((heal)); then
        stage heal "$from" pretrain "out/speedrun/healed-$shape-$heal-$seed" --context=40 \
            --updates="$heal"
        from=out/speedrun/healed-$shape-$heal-$seed
    fi
    stage task "$from" task "$out/$seed" --context=38 --eval_steps=2,4,8,16,32 \
        --updates=1800 --batch_size=16 --micro_batch=16 "$@"
done
python runs/speedrun/score.py "$out"
