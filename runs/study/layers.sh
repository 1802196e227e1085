#!/usr/bin/env bash
# Item 6: which layers (the paper's rule, block influence, a random choice of equal shape)
# and which adapter (linear from the identity or from torch's own init, or adding).
source "$(dirname "$0")/lib.sh"
parents
python -c 'import json, sys; print(*(json.loads(x)["question"] for x in sys.stdin))' < $out/data/test.jsonl > $out/text.txt
parts() {  # parts LAYER ...: surgery's flags for these layers in the usual shape
    local IFS=,
    echo --prelude "${*:1:P}" --core "${*:P+1:R}" --coda "${*:P+R+1}"
}
for seed in $seeds; do
    cut $seed cut_influence --shape $shape --select block-influence --text $out/text.txt --window 52
    cut $seed cut_random $(parts $(python -c "import random; print(*sorted(random.Random($seed).sample(range($layers), $P + $R + $C)))"))
    cut $seed cut_default --shape $shape --adapter_init default
    cut $seed cut_add --shape $shape --adapter add
    for choice in influence random default add; do
        job $out/$seed/heal_$choice.log heal $seed cut_$choice heal_$choice
    done
done
finish
for seed in $seeds; do
    task $seed linear50 --curriculum_warmup=0.50
    for choice in influence random default add; do
        task $seed layers_$choice --curriculum_warmup=0.50 --init_from=$out/$seed/heal_$choice
    done
done
finish
report curves linear50="the paper's rule" layers_influence="block influence" layers_random="random" \
    layers_default="torch's adapter init" layers_add="adding adapter"
