#!/usr/bin/env bash
# Item 10: s_0 is noise (the paper), zero, or the prelude's output, and how much the noise decides.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    task $seed linear50 --curriculum_warmup=0.50
    for start in zero prelude; do
        job $out/$seed/heal_$start.log heal $seed cut heal_$start --start=$start
    done
done
finish
for seed in $seeds; do
    for start in zero prelude; do
        task $seed start_$start --curriculum_warmup=0.50 --start=$start --init_from=$out/$seed/heal_$start
    done
done
finish
report start linear50=noise start_zero=zero start_prelude="the prelude's output"
