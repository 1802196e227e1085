#!/usr/bin/env bash
# Item 1: the task from a pretrained parent's layers (cut, not healed: as many tokens) and from random weights of the same shape.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    task $seed unhealed --init_from=$out/$seed/cut --updates="$(updates 250)"
    task $seed random --init_from= --updates="$(updates 250)" "${wide[@]}" --n_prelude=$P --n_core=$R --n_coda=$C
done
finish
report curves unhealed="pretrained" random="random weights"
