#!/usr/bin/env bash
# Item 2: a mean recurrence that rises over 0 to 100% of the training (linear, and 1-sqrt), and a backprop depth that does.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    task $seed fixed --curriculum=none
    for percent in 25 50 75 100; do
        task $seed linear$percent --curriculum_warmup=$(printf "%d.%02d" $((percent / 100)) $((percent % 100)))
    done
    task $seed sqrt50 --curriculum=1-sqrt --curriculum_warmup=0.5
    task $seed depth50 --curriculum=none --backprop_warmup=0.5
done
finish
report curves fixed=none linear25="linear, 25%" linear50="linear, 50%" linear75="linear, 75%" linear100="linear, 100%" \
    sqrt50="1-sqrt, 50%" depth50="none; k over 50%"
