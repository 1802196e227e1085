#!/usr/bin/env bash
# The whole paper on a procedural corpus, on a CPU, without a download: pretrain an ordinary Llama,
# cut it into prelude, recurrent block and coda, heal it, teach it to recur, and compare it with its
# parent at equal tokens and at equal training FLOPs.
#
#   bash runs/tiny.sh [--quick] [--seed N]
#
# It takes 10 to 16 minutes on 2 cores. --quick plays every stage in about a minute, too short to
# learn. Everything goes to out/tiny, with --quick to out/tiny-quick, with --seed 5 to
# out/tiny-seed5. A run that was stopped continues with the same command; `rm -rf out/tiny` starts
# over. On a machine that is busy with other work, two threads wait for each other, and one is
# many times faster: OMP_NUM_THREADS=1 bash runs/tiny.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
quick='' seed=''
while (($#)); do
    case $1 in
    --quick) quick=1; shift ;;
    --seed) seed=${2:?--seed needs a number}; shift 2 ;;
    *) echo "tiny.sh: error: unknown flag $1 (--quick, --seed N)" >&2; exit 2 ;;
    esac
done
[[ $seed =~ ^[0-9]*$ ]] || { echo "tiny.sh: error: --seed $seed is not a number" >&2; exit 2; }
out=out/tiny${quick:+-quick}${seed:+-seed$seed}

# Training is in bfloat16 where the processor has it (a third faster here), else in float32; the
# stage that teaches the task may differ. All scores are in float32.
dtype=float32
if grep -qs bf16 /proc/cpuinfo; then dtype=bfloat16; fi
task_dtype=$dtype

stage() {  # stage TITLE TIME PURPOSE
    local time=$2
    if [[ $quick ]]; then time="a few seconds"; fi
    printf '\n== %s (%s; %d s so far)\n%s\n\n' "$1" "$time" $SECONDS "$3"
}
train() {  # train CONFIG NAME [--key=value ...]: config/tiny_CONFIG.toml into $out/NAME
    local config=$1 name=$2
    shift 2
    python train.py --config=config/tiny_"$config".toml --seed="${seed:-0}" --out_dir=$out/"$name" \
        --dtype=$dtype ${quick:+--compile=false} "$@"
}
equal() {  # equal tokens|flops: updates that cost the parent what task has cost since surgery
    python -c "
from data import read_json
from model import RecurrentLM, find_checkpoint
cost = {'tokens': 1, 'flops': RecurrentLM.load('$out/pretrain').flops_per_token()}['$1']
spent = read_json(find_checkpoint('$out/task') + '/train.json')['$1']
print(round(spent / cost / (128 * 26)))"
}
score() {  # score NAME FOLDER FILE TASK: what the model in $out/FOLDER answers to FILE.jsonl
    python eval_gsm8k.py --model $out/"$2" --data $out/data/"$3".jsonl --out $out/eval_"$1".json \
        --task "$4" --difficulty sentences --template plain --max_new_tokens 1 --batch_size 200 \
        --steps 1,2,4,8,16,32 ${quick:+--limit 120}
}

if [[ ! $quick ]]; then
    echo "10 to 16 minutes on 2 idle cores. If others use them, stop this (ctrl-C) and type"
    echo "    OMP_NUM_THREADS=1 bash runs/tiny.sh${seed:+ --seed $seed}"
fi

stage "1. Make the corpus" "10 s" \
"Stories such as 'has 7 loses 4 times 3', in which a count goes up and down. What it ends with, its
last digit only, is the question. Each sentence needs the one before it."
python data.py tiny --out $out/data ${quick:+--rows 8000}

stage "2. Pretrain an ordinary Llama of 6 layers" "2 to 4 minutes" \
"The parent, which stands for a model that one would download. It reads stories that give the
answer after every sentence, and stories of which only the first few answers are asked."
train pretrain pretrain --data=$out/data/pretrain ${quick:+--updates=8}

stage "3. Surgery" "5 s" \
"Layer 0 becomes the prelude, 3 and 4 the recurrent block, 5 the coda; 1 and 2 are dropped."
[[ -e $out/tiny-1-2-1 ]] || python surgery.py $out/pretrain $out/tiny-1-2-1 --prelude 0 --core 3-4 --coda 5

stage "4. Heal, then teach the task" "3 to 4 minutes" \
"Pretraining goes on for a moment, to make up for the lost layers. Then the answers are asked without
a chain of thought, while the mean number of recurrences r rises from 1 to 8."
train heal heal --data=$out/data/pretrain --init_from=$out/tiny-1-2-1 ${quick:+--updates=4}
train task task --data=$out/data/task --init_from=$out/heal --dtype=$task_dtype ${quick:+--updates=6}

stage "5. Teach the same task to the untouched parent" "4 to 7 minutes" \
"Two baselines of fixed depth: one trains on as many tokens, the other on as many FLOPs."
train parent parent_tokens --data=$out/data/task --init_from=$out/pretrain --updates="$(equal tokens)"
train parent parent_flops --data=$out/data/task --init_from=$out/pretrain --updates="$(equal flops)"

stage "6. Ask all three" "1 to 2 minutes" \
"New stories, at r = 1 to 32: up to 12 sentences, as in training, and 18, more than ever in training."
near="stories of 1 to 12 sentences" far="18 sentences (trained on 12)"
labels="recurrent,parent at equal tokens,parent at equal FLOPs"
score recurrent task test "$near"
score parent_tokens parent_tokens test "$near"
score parent_flops parent_flops test "$near"
scores="$out/eval_recurrent.json $out/eval_parent_tokens.json $out/eval_parent_flops.json"
if [[ ! $quick ]]; then
    score recurrent_18 task test18 "$far"
    score parent_tokens_18 parent_tokens test18 "$far"
    score parent_flops_18 parent_flops test18 "$far"
    scores+=" ${scores//.json/_18.json}"
    labels+=",$labels"
fi
python bench.py plot $scores --labels "$labels" --out $out/accuracy.png > $out/accuracy.txt

stage "What came out" "5 s" \
"$(tail -1 $out/accuracy.txt) (the same numbers as text: $out/accuracy.txt)
It shows one and the same model answering longer stories the more often it recurs, while its parents,
of fixed depth, stop at a certain length, however long they train. With 18 sentences it is asked for
more steps than training ever showed; how far that goes differs from run to run."
if [[ $quick ]]; then echo "But --quick is too short to learn: its numbers mean nothing."; fi
echo "An example, of which the right answer is 2, at r = 1, 4 and 32:"
python sample.py --model $out/task --steps 1,4,32 --tokens 1 \
    --prompt "has 7 loses 4 times 3 gets 2 gets 1 loses 4 times 2 loses 3 gets 4 times 3 loses 1 gets 2"
echo "Your own: python sample.py --model $out/task --interactive"
