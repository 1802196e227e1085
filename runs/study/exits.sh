#!/usr/bin/env bash
# Item 8: `sample.py --exit kl` on the model of recurrence.sh that was trained with r = 8, as its threshold moves.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do long $seed r8 --mean_recurrence=8; done
finish
arms=()
for seed in $seeds; do score $seed r8; done
for threshold in 0.3 0.1 0.01 0.001; do
    arm=exit_kl_$threshold
    arms+=("$arm=kl $threshold")
    for seed in $seeds; do
        job $out/$seed/eval_$arm.log evaluate $seed r8 test eval_${arm}_test --steps 32 --exit kl --exit_threshold $threshold
    done
done
for r in 2 4 8 16; do  # what the rule must beat: the last token stops at r, whatever it does
    arm=exit_fixed_$r
    arms+=("$arm=fixed $r")
    for seed in $seeds; do
        job $out/$seed/eval_$arm.log evaluate $seed r8 test eval_${arm}_test --steps 32 --exit kl --exit_threshold 1e9 --min_steps $r
    done
done
finish
report exits "${arms[@]}"
