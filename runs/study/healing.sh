#!/usr/bin/env bash
# Item 5: two phases (healing on general text, then the task) against one (the task at once), with as many updates of the task
# and with as many in all; and what is left of the general text.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    task $seed linear50 --curriculum_warmup=0.50
    task $seed single --curriculum_warmup=0.50 --init_from=$out/$seed/cut
    task $seed single_long --curriculum_warmup=0.50 --init_from=$out/$seed/cut --updates="$(updates 300)"
    task $seed plain --init_from=$out/$seed/pretrain
done
finish
for seed in $seeds; do
    for stage in pretrain cut heal linear50 single single_long plain; do
        job $out/$seed/general_$stage.log python train.py --eval_only --init_from=$out/$seed/$stage --data=$out/data/pretrain \
            --context=52 --eval_rows=512 --eval_steps=1,4,8 --compile=false
    done
done
finish
report healing linear50="two phases" single="one phase" single_long="one phase, equal updates" plain="the untouched parent"
