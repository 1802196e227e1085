#!/usr/bin/env bash
# Item 1: the task from a pretrained parent's layers (cut, not healed: as many tokens) and from random weights of the same shape.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    task $seed unhealed --init_from=$out/$seed/cut --updates="$(updates 350)"
    size=(--n_embd=96 --n_head=2 --n_kv_head=2 --n_ffn=240 --n_prelude=1 --n_core=2 --n_coda=1)
    if [[ $mode == scale ]]; then size=(--n_embd=512 --n_head=8 --n_kv_head=8 --n_ffn=1376 --n_prelude=2 --n_core=3 --n_coda=2); fi
    task $seed random --init_from= --updates="$(updates 350)" "${size[@]}"
done
finish
report curves unhealed="pretrained" random="random weights"
