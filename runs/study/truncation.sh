#!/usr/bin/env bash
# Item 9: backprop depth 1 to 16 and full, at equal training FLOPs by the paper's rule: mean r 16 from the start, and as many
# updates for each as the FLOPs of 100 at k = 4 allow.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    for k in 1 2 4 8 16 0; do
        n=$(python -c "
from model import RecurrentLM
m = RecurrentLM.load('$out/$seed/heal')
cost = lambda k: m.flops_per_token((17 - min(k or 17, 17), min(k or 17, 17)))  # the sampler's mean is R + 1
print(round($(updates 100) * cost(4) / cost($k)))")
        task $seed depth_$k --curriculum=none --mean_recurrence=16 --backprop_depth=$k --updates=$n --eval_steps=1,4,8,16,32
    done
done
finish
report curves --at 16 depth_1="k = 1" depth_2="k = 2" depth_4="k = 4" depth_8="k = 8" depth_16="k = 16" depth_0="all"
