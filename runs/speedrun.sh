#!/usr/bin/env bash
# The speedrun: teach a looped model to answer long stories with the fewest training FLOPs.
# runs/speedrun/README.md has the rules and the records.
#
#   bash runs/speedrun.sh N [--key=value ...]     attempt number N
#
# N decides everything that is random: the corpus, the parent and the five seeds. The flags are
# settings of train.py for learning the task; to change the surgery or healing, edit this script. The
# attempt goes to out/speedrun/N and takes about 15 minutes on one core. If it was stopped, the same
# command resumes it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' runs/speedrun.sh; exit; fi
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    echo "speedrun.sh: error: give a number from 1 on, see --help" >&2
    exit 2
fi
export OMP_NUM_THREADS=1
number=$1
shift
out=out/speedrun/$number

# train CONFIG SEED FROM DATA OUT [--key=value ...]: a training with config/tiny_CONFIG.toml. If a flag
# is given twice, the last one counts, so an attempt's own flags cannot override those behind them.
train() {
    python train.py --config=config/tiny_"$1".toml "${@:6}" --seed="$2" --init_from="$3" \
        --data=$out/data/"$4" --out_dir="$5" --eval_rows=1024 --eval_every=100000
}
python runs/tiny_corpus.py --seed "$number" --out $out/data
train pretrain "$number" "" pretrain $out/parent
[[ -e $out/cut ]] || python surgery.py $out/parent $out/cut --shape 1,2,1
for i in 0 1 2 3 4; do
    seed=$((1000 * number + i))
    train heal $seed $out/cut pretrain $out/healed-$seed --updates=100
    train task $seed $out/healed-$seed task $out/seed-$seed "$@" --eval_steps=8,16,32
done
python runs/speedrun/score.py $out
