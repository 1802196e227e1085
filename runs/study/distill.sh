#!/usr/bin/env bash
# Item 11: healing with the parent's distribution as half of the loss, or as all of it.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    for weight in 0.5 1; do
        job $out/$seed/distill_$weight.log heal $seed cut distill_$weight --distill_from=$out/$seed/pretrain --distill_weight=$weight
    done
done
finish
for seed in $seeds; do
    task $seed linear50 --curriculum_warmup=0.50
    for weight in 0.5 1; do
        task $seed after_$weight --curriculum_warmup=0.50 --init_from=$out/$seed/distill_$weight
    done
done
finish
report distill heal="labels" distill_0.5="half of each" distill_1="the parent" \
    linear50="labels" after_0.5="half of each" after_1="the parent"
