#!/usr/bin/env bash
# Item 3: Muon, AdamW and AdamW* (Huginn's), each at the best of four learning rates on seed 0, then on all seeds: for the
# recurrent model and for its parent.
source "$(dirname "$0")/lib.sh"
parents
try() {  # try SEED MODEL OPTIMIZER LR
    local flags=(--curriculum_warmup=0.50)
    if [[ $2 == plain ]]; then flags=(--init_from=$out/"$1"/pretrain); fi
    task "$1" "$2_$3_$4" "${flags[@]}" --optimizer="${3/star/*}" --lr="$4" --updates="$(updates 120)" --log_every=1
}
declare -A rates=([muon]="0.005 0.01 0.02 0.04" [adamw]="0.001 0.002 0.004 0.008"
                  [adamwstar]="0.001 0.002 0.004 0.008")
for model in recurrent plain; do
    for optimizer in muon adamw adamwstar; do
        for lr in ${rates[$optimizer]}; do try 0 $model "$optimizer" $lr; done
    done
done
finish
for model in recurrent plain; do
    for optimizer in muon adamw adamwstar; do
        lr=$(python runs/study/study.py best "${model}_$optimizer" --runs $out)
        for seed in $seeds; do try $seed $model "$optimizer" $lr; done
    done
done
finish
arms=()
for model in recurrent plain; do
    for optimizer in muon adamw adamwstar; do
        for lr in ${rates[$optimizer]}; do arms+=("${model}_${optimizer}_$lr=$model, ${optimizer/star/*} $lr"); done
    done
done
report optimizers "${arms[@]}"
