#!/usr/bin/env bash
# Item 7: deeper than trained. Accuracy and the states of the models of recurrence.sh up to r = 256.
source "$(dirname "$0")/lib.sh"
parents
for seed in $seeds; do
    for r in 32 16 8 4; do long $seed r$r --mean_recurrence=$r; done
done
finish
report deeper r4="trained with r = 4" r8="r = 8" r16="r = 16" r32="r = 32"
