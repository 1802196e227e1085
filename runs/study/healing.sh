#!/usr/bin/env bash
# Item 5: two phases (healing on general text, then the task) against one (the task at once), with as many updates of the task
# and with as many in all; the same with a second phase that mixes general text and task, as the paper's does; and what each
# stage leaves of the general text.
source "$(dirname "$0")/lib.sh"
parents
if [[ ! -e $out/data/task52 ]]; then  # a mixture's rows are of one length: the task's stories, two to a row
    cp -r $out/data/task $out/data/task52.tmp
    sed -i 's/"row": 26/"row": 52/' $out/data/task52.tmp/meta.json
    mv $out/data/task52.tmp $out/data/task52
fi
mix="--data=$out/data/pretrain:1,$out/data/task52:1 --context=52 --batch_size=64 --micro_batch=64 --updates=$(updates 200)"
for seed in $seeds; do
    task $seed linear50 --curriculum_warmup=0.50
    task $seed single --curriculum_warmup=0.50 --init_from=$out/$seed/cut
    task $seed single_long --curriculum_warmup=0.50 --init_from=$out/$seed/cut --updates="$(updates 300)"
    task $seed plain --init_from=$out/$seed/pretrain
    task $seed mix $mix
    task $seed single_mix $mix --init_from=$out/$seed/cut
done
finish
losses() {  # losses FOLDER: on both texts
    for data in pretrain:52 task:26; do
        python train.py --eval_only --init_from="$1" --data=$out/data/${data%:*} --context=${data#*:} --eval_rows=512 \
            --eval_steps=1,4,8 --compile=false || return 1
    done
}
for seed in $seeds; do
    for stage in pretrain cut heal linear50 single single_long plain mix single_mix; do
        job $out/$seed/losses_$stage.log losses $out/$seed/$stage
    done
done
finish
report healing linear50="healed, then task" single="task at once" single_long="task at once, updates of both" \
    plain="parent, then task" mix="healed, then mixture" single_mix="mixture at once"
