#!/usr/bin/env bash
# Item 9: backprop depth 1 to 16 and full, at equal training FLOPs by the paper's rule: mean r 16 from the start, and as many
# updates for each as the FLOPs of 100 at k = 4 allow, with the very recurrences that are drawn.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    for k in 1 2 4 8 16 0; do
        n=$(python - $seed $k $out/$seed/heal "$(updates 100)" <<'PYTHON'
import itertools, sys
from model import RecurrentLM
from train import Settings, draw_steps
seed, k, model, updates = int(sys.argv[1]), int(sys.argv[2]), RecurrentLM.load(sys.argv[3]), int(sys.argv[4])
def spent(k):  # FLOPs a token after 1, 2, ... updates
    s = Settings(seed=seed, curriculum="none", mean_recurrence=16, backprop_depth=k)
    return itertools.accumulate(model.flops_per_token(draw_steps(s, u, u + 1)) for u in range(4 * updates))
budget = list(spent(4))[updates - 1]
print(min(enumerate(spent(k), 1), key=lambda pair: abs(pair[1] - budget))[0])
PYTHON
)
        task $seed depth_$k --curriculum=none --mean_recurrence=16 --backprop_depth=$k --updates=$n --eval_steps=1,4,8,16,32
    done
done
finish
report curves --at 16 depth_1="k = 1" depth_2="k = 2" depth_4="k = 4" depth_8="k = 8" depth_16="k = 16" depth_0="all"
