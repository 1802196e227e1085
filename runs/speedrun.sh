#!/usr/bin/env bash
# The loop's speedrun: from a fixed parent to 95% of unseen products in S5 with the fewest training
# FLOPs. runs/speedrun/README.md has the rules, the records and what failed.
#
#   bash runs/speedrun.sh                          play the record
#   bash runs/speedrun.sh NAME [--key=value ...]   with other settings of train.py, in out/speedrun/NAME
#
# It takes about 10 minutes on one core. The same command continues a run that was stopped. SHAPE,
# HEAL and SEEDS in the environment change the surgery, the updates of healing, and which seeds run.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
name=${1:-record}
shift || true
out=out/speedrun/$name data=out/speedrun/data
seeds=${SEEDS:-0 1 2} heal=${HEAL:-100}
parent=runs/speedrun/parent
digest=3ddd6d11bebb51c357e3bde80a2f28a779a00dab1e7c44127ce25897c4860751
sha256sum --quiet --check <<<"$digest  $parent/model.safetensors"
python runs/tiny_corpus.py --task s5 --out $data

stage() {  # stage SEED CONFIG FROM DATA [--key=value ...]: training by config/tiny_CONFIG.toml
    local seed=$1 config=$2 from=$3 rows=$4
    shift 4
    python train.py --config=config/tiny_"$config".toml --seed="$seed" --out_dir=$out/"$seed"/"$config" \
        --init_from="$from" --data=$data/"$rows" --eval_rows=1024 --eval_every=100000 "$@"
}
for seed in $seeds; do
    from=$out/$seed/cut
    [[ -e $from ]] || python surgery.py $parent "$from" --shape "${SHAPE:-1,2,1}"
    if ((heal)); then
        stage "$seed" heal "$from" pretrain --context=41 --updates="$heal"
        from=$out/$seed/heal
    fi
    stage "$seed" task "$from" unseen --context=15 --eval_steps=2,4,8,16,32 --updates=1300 "$@"
done
python runs/speedrun/score.py $out
