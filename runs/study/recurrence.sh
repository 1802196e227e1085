#!/usr/bin/env bash
# Item 4, README's opening picture: models trained with a mean recurrence of 4, 8, 16 and 32 against their parent post-trained
# on the same task (on as many tokens, and on as many FLOPs as the most expensive of them took), and against an untied parent of the
# depth that r = 8 unrolls to.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    job $out/$seed/deep_pretrain.log pretrain $seed deep_pretrain $((P + 8 * R + C))
    for r in 32 16 8 4; do long $seed r$r --mean_recurrence=$r; done
    long $seed parent_tokens --init_from=$out/$seed/pretrain
done
finish
for seed in $seeds; do
    long $seed deep --init_from=$out/$seed/deep_pretrain
    long $seed parent_flops --init_from=$out/$seed/pretrain --updates="$(equal_flops $seed r32)"
done
finish
for seed in $seeds; do
    for arm in r4 r8 r16 r32 parent_tokens parent_flops deep; do score $seed $arm; done
done
finish
report accuracy r4="trained with r = 4" r8="r = 8" r16="r = 16" r32="r = 32" parent_tokens="parent, equal tokens" \
    parent_flops="parent, FLOPs of r = 32" deep="untied parent of $((P + 8 * R + C)) layers"
