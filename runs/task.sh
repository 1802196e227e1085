#!/usr/bin/env bash
# Your own task, from questions to a table: cut a parent, train the looped model, train the parent
# itself for as many FLOPs, and score both.
#
#   bash runs/task.sh FOLDER [flags] [-- --key=value ...]
#
# FOLDER/train.jsonl and FOLDER/test.jsonl have lines such as
#
#   {"question": "The ball is under B. B and D swap.", "answer": "D", "difficulty": "2"}
#
# An answer may be a text, a number, or a solution that ends with "#### 18"; the difficulty is
# optional. train.jsonl may have chats instead, {"messages": [{"role": "user", "content": ...}]},
# in which each turn of the assistant is an answer; or stories, with an answer after each step:
#
#   {"events": ["The ball is under B.", " B and D swap."], "answers": [" B", " D"]}
#
# Such an answer must be one token, here with its leading space. The model never reads it.
#
#   --parent SRC      whatever surgery.py reads: a folder, or the name of a model on the hub;
#                     default: SmolLM2-135M, downloaded with pip
#   --shape P,R,C     layers in the prelude, the recurrent block and the coda (2,2,2)
#   --loop RUN        start from this model, which was cut from SRC before, and perhaps healed
#   --arms LIST       what to train: loop, parent, random (the loop from random weights);
#                     default: loop,parent
#   --seeds "0 1"     train each of them with each of these seeds (0)
#   --parent_lr LR    the parent's learning rate, with AdamW (3e-4)
#   --row_length T    tokens in a row of training data; default: at least two questions, or 512
#                     for stories
#   --key=value       after --, flags of train.py for the looped model; config/task.toml has the
#                     defaults. The parent takes the batch size and the like from them.
#
# Everything is written to FOLDER. The same command resumes what was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
die() { echo "task.sh: error: $*" >&2; exit 2; }

task='' parent='' shape=2,2,2 loop='' arms=loop,parent seeds=0 parent_lr=3e-4 row_length=''
while (($#)); do
    case $1 in
    --parent | --shape | --loop | --arms | --seeds | --parent_lr | --row_length)
        declare "${1#--}=${2:?$1 needs a value}"; shift 2 ;;
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' runs/task.sh; exit ;;
    --) shift; break ;;
    -*) die "unknown flag $1 (--help lists them; those of train.py follow after --)" ;;
    *) [[ ! $task ]] || die "two folders, $task and $1"; task=${1%/}; shift ;;
    esac
done
[[ $task ]] || die "name the folder of your questions (see --help)"
for arm in ${arms//,/ }; do [[ $arm =~ ^(loop|parent|random)$ ]] || die "unknown arm $arm"; done
own=("$@") shared=()  # flags of the looped model, and those of them that the parent takes, too
for flag; do
    [[ $flag == --*=* ]] || die "$flag: write the flags of train.py as --key=value"
    case ${flag%%=*} in
    --batch_size | --micro_batch | --context | --dtype | --compile | --activation_budget | \
        --eval_* | --save_every | --log_every | --keep | --wandb) shared+=("$flag") ;;
    esac
done

fields=$(python -m runs.task check "$task")  # how prepare reads these questions, or "stories"
settings="--parent '$parent' --shape $shape --loop '$loop' --row_length '$row_length'"
[[ -e $task/settings ]] || echo "$settings" > "$task"/settings
[[ $(<"$task"/settings) == "$settings" ]] ||
    die "$task was started with $(<"$task"/settings). Repeat these, or choose another folder"

if [[ ! $parent ]]; then
    [[ ! $loop || $arms != *parent* ]] || die "--loop needs its --parent, or --arms loop"
    bash runs/smollm2/run.sh model
    parent=out/smollm2/hf
fi
if [[ ! $loop ]]; then
    loop=$task/cut
    [[ -e $loop ]] || python surgery.py "$parent" "$loop" --shape "$shape" --verify
fi
if [[ $arms == *parent* && ! -e $task/parent ]]; then
    python surgery.py "$parent" "$task"/parent --feed_forward
fi
longest=()  # answer
if [[ $fields == stories ]]; then
    longest=(--max_new_tokens 1)
    python -m runs.smollm2.cups --stories "$task"/train.jsonl --tokenizer "$loop" \
        --out "$task"/data --row_length "${row_length:-512}"
else
    python data.py prepare --input "$task"/train.jsonl $fields --tokenizer "$loop" \
        --out "$task"/data ${row_length:+--row_length="$row_length"}
fi

ordered=()
for arm in loop random parent; do  # the parent trains for as many FLOPs as the loop did
    if [[ ,$arms, == *,$arm,* ]]; then ordered+=($arm); fi
done
set_flags() {  # set_flags ARM SEED: those of train.py
    flags=(--config=config/task.toml --data="$task"/data --seed="$2" --out_dir="$task/$1-$2")
    case $1 in
    loop) flags+=("${own[@]}" --init_from="$loop") ;;
    random) flags+=("${own[@]}" --init_from="$loop" --reinit) ;;
    parent)
        flags+=("${shared[@]}" --init_from="$task"/parent --optimizer=adamw --lr="$parent_lr") ;;
    esac
}
for arm in "${ordered[@]}"; do
    set_flags $arm "${seeds%% *}"
    python -m runs.task fits "${flags[@]}"
done

summaries=() names=()
for seed in $seeds; do
    for arm in "${ordered[@]}"; do
        set_flags $arm "$seed"
        if [[ $arm == parent ]]; then
            updates=$(python -m tools.plan "${flags[@]}" --flops_of="$task/loop-$seed" --quiet)
            flags+=(--updates="$updates")
        fi
        python train.py "${flags[@]}"
        python eval_gsm8k.py --model "$task/$arm-$seed" --data "$task"/test.jsonl --template plain \
            --steps 1,4,8,16,32 "${longest[@]}"
        summaries+=("$task/$arm-$seed"/eval_test.json) names+=("$arm")
    done
done

x=difficulty
! grep -q '"by_difficulty": {}' "${summaries[0]}" || x=steps
python -m tools.plot "${summaries[@]}" --labels "$(IFS=,; echo "${names[*]}")" --x $x \
    --out "$task"/accuracy.png
model=$task/loop-${seeds%% *}
cat <<END

Ask it:     python sample.py --model $model --steps 1,8,32
Export it:  python -m tools.export $model $task/export --mean_recurrence 32
Serve it:   vllm serve $task/export --trust-remote-code      (pip install vllm)
END
