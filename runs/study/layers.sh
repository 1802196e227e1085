#!/usr/bin/env bash
# Item 6: which layers (the paper's rule, block influence, angular distance, the first ones, a random choice of equal shape)
# and which adapter (linear from the identity or from torch's own init, or adding).
source "$(dirname "$0")/lib.sh"
parents
head -n 2000 $out/data/test.jsonl | python -c 'import json, sys; print("".join(json.loads(x)["question"] + " " for x in sys.stdin))' > $out/text.txt
for seed in $seeds; do
    cut $seed cut_influence $shape --select block-influence --text $out/text.txt --window 52
    cut $seed cut_angular $shape --select angular --text $out/text.txt --window 52
    cut $seed cut_first --prelude 0 --core 1-2 --coda 3
    cut $seed cut_random $(python -c "
import random
a = sorted(random.Random($seed).sample(range(6), 4))
print(f'--prelude {a[0]} --core {a[1]},{a[2]} --coda {a[3]}')")
    cut $seed cut_default $shape --adapter-init default
    cut $seed cut_add $shape --adapter add
    for choice in influence angular first random default add; do
        job $out/$seed/heal_$choice.log heal $seed cut_$choice heal_$choice
    done
done
finish
for seed in $seeds; do
    task $seed linear50 --curriculum_warmup=0.50
    for choice in influence angular first random default add; do
        task $seed layers_$choice --curriculum_warmup=0.50 --init_from=$out/$seed/heal_$choice
    done
done
finish
report curves linear50="the paper's rule" layers_influence="block influence" layers_angular="angular distance" \
    layers_first="the first four" layers_random="random" layers_default="torch's adapter init" layers_add="adding adapter"
