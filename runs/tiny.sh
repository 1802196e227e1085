#!/usr/bin/env bash
# The paper's pipeline on the shell game, on a CPU, with nothing to download: pretrain an
# ordinary Llama, cut it into prelude, recurrent block and coda, heal it, teach it a task, and
# compare it with its parent at equal training FLOPs.
#
#   bash runs/tiny.sh [--quick] [--seed N]
#
# It takes about 4 minutes on 2 idle cores. --quick runs every stage in about a minute, which is too
# short to learn anything. Output goes to out/tiny, to out/tiny-quick with --quick, or to
# out/tiny-seed5 with --seed 5. The same command resumes a run that was stopped, and starts over if
# code has changed since. On a busy machine two threads keep waiting for each other, so a single
# thread is many times faster: OMP_NUM_THREADS=1 bash runs/tiny.sh
[ "${BASH_VERSION-}" ] || { echo "error: this needs bash: bash $0" >&2; exit 2; }
set -euo pipefail
cd "$(dirname "$0")/.."
quick='' seed=''
while (($#)); do
    case $1 in
    --quick) quick=1; shift ;;
    --seed) seed=${2:?--seed needs a number}; shift 2 ;;
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' runs/tiny.sh; exit ;;
    *) echo "tiny.sh: error: unknown flag $1 (--quick, --seed N)" >&2; exit 2 ;;
    esac
done
[[ $seed =~ ^[0-9]*$ ]] || { echo "tiny.sh: error: --seed $seed is not a number" >&2; exit 2; }
out=out/tiny${quick:+-quick}${seed:+-seed$seed}

# On a fresh machine it makes an environment of its own, in .venv. It changes nobody else's.
own=${VIRTUAL_ENV-}${CONDA_PREFIX-}
[[ $own || ! -e .venv/complete ]] || . .venv/bin/activate
if [[ ! $own && ! -e .venv/complete ]] && ! python -c "import torch" 2> /dev/null; then
    echo "torch is missing: installing requirements.txt into .venv (a minute; 1 GB without a GPU)"
    python3 -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer, please')"
    python3 -m venv .venv
    . .venv/bin/activate
    cpu=https://download.pytorch.org/whl/cpu
    command -v nvidia-smi rocminfo > /dev/null || pip install -q --retries 1 torch --index-url $cpu ||
        echo "$cpu cannot be reached, so this takes PyPI's torch"
    pip install -q -r requirements.txt
    touch .venv/complete
fi

# An edit must take effect, and most stages find what they made before.
code=$(cksum $(ls *.py | grep -v test_all) tools/*.py runs/tiny.sh runs/tiny_corpus.py config/tiny*.toml)
if [[ -e $out && $(cat $out/code 2>/dev/null) != "$code" ]]; then
    changed=$(diff $out/code - <<< "$code" 2>&1 | sed -n 's/^[<>].* //p' | sort -u | xargs || true)
    echo "$out was made by other code (${changed:-an older version}), so this starts over"
    rm -rf $out/code $out/*
fi
mkdir -p $out
echo "$code" > $out/code

stage() {  # stage TITLE TIME PURPOSE
    local time=$2
    if [[ $quick ]]; then time="a few seconds"; fi
    printf '\n== %s (%s; %d s so far)\n%s\n\n' "$1" "$time" $SECONDS "$3"
}
train() {  # train CONFIG NAME [--key=value ...]: config/tiny_CONFIG.toml into $out/NAME
    local config=$1 name=$2
    shift 2
    # Compiling would take longer than it saves in so few updates.
    python train.py --config=config/tiny_"$config".toml --seed="${seed:-0}" --out_dir=$out/"$name" \
        --compile=false ${quick:+--eval_rows=64} "$@"
}
score() {  # score NAME: evaluate the model in $out/NAME at r = 1, 4 and 32
    python eval_gsm8k.py --model $out/"$1" --data $out/questions.jsonl \
        --out $out/eval_"$1".json --task "the shell game, answered in one token" \
        --template plain --max_new_tokens 1 --batch_size 200 --steps 1,4,32 \
        ${quick:+--limit 60}
}

if [[ ! $quick ]]; then
    echo "This takes about 4 minutes on 2 idle cores. If they are busy, stop it and run"
    echo "    OMP_NUM_THREADS=1 bash runs/tiny.sh${seed:+ --seed $seed}"
fi
python -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('matplotlib'))" ||
    echo "For a plot at the end: pip install matplotlib. Without it, you get only the numbers."

stage "1. Make the corpus" "10 s" \
"Stories such as 'The ball is under B. B and D swap. A and D swap.' Each full stop asks where the
ball is now, so each answer depends on the one before. No story in training has more than 5
sentences."
python -m runs.tiny_corpus --out $out/data ${quick:+--rows 8000}

stage "2. Pretrain an ordinary Llama of 6 layers" "40 s" \
"The parent stands in for a model that you would download. Half of its stories are worked: they give
the answer after each sentence. In the others, which are short, it has to predict the answers."
train pretrain pretrain --data=$out/data/pretrain ${quick:+--updates=4}

stage "3. Surgery" "5 s" \
"Layer 0 becomes the prelude, 3 and 4 the recurrent block, 5 the coda; 1 and 2 are dropped."
[[ -e $out/tiny-1-2-1/config.json ]] ||
    python surgery.py $out/pretrain $out/tiny-1-2-1 --prelude 0 --core 3-4 --coda 5

stage "4. Heal, then teach the task" "1 minute" \
"A little more pretraining makes up for the lost layers. Then the model learns to answer stories of
3, 4 and 5 sentences, while the mean number of recurrences, r, rises."
train heal heal --data=$out/data/pretrain --init_from=$out/tiny-1-2-1 ${quick:+--updates=2}
train task task --data=$out/data/task --init_from=$out/heal \
    ${quick:+--updates=3 --mean_recurrence=8}

stage "5. Teach the same task to the unmodified parent" "1 minute" \
"A baseline of fixed depth. It trains for as many FLOPs as the looped model has since its surgery."
updates=$(python -m tools.plan --config=config/tiny_parent.toml --data=$out/data/task \
    --init_from=$out/pretrain --flops_of=$out/task)
train parent parent --data=$out/data/task --init_from=$out/pretrain --updates=$updates

stage "6. Evaluate both" "20 s" \
"Questions of up to 12 sentences, and of 18."
cat $out/data/test.jsonl $out/data/test18.jsonl > $out/questions.jsonl
score task
score parent

outcome="Accuracy in % by number of sentences. No story in training has more than 5. Compare how far
beyond that the looped model gets at each r with how far its parent gets, whose depth is fixed."
if [[ $quick ]]; then
    outcome="Every stage works. The numbers below mean nothing: --quick is too short to learn."
fi
stage "Results" "5 s" "$outcome"
python -m tools.plot $out/eval_{task,parent}.json --x difficulty --out $out/lengths.png \
    --labels "looped,parent (equal FLOPs)"
echo
echo "Where the looped model takes the ball to be after each sentence. It ends under C:"
python sample.py --model $out/task --trace .
echo "Ask your own questions: python sample.py --model $out/task --tokens 1"
