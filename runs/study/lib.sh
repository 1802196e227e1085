# What the scripts of the study share; each sources it with its own flags:
#
#   bash runs/study/NAME.sh [--quick | --scale]
#
# Three seeds of everything, two runs at a time with one thread each on a CPU (small matrices gain little from a
# second thread). --quick plays every run for a few updates, too short to learn;
# --scale is for one GPU: a parent of 29M parameters, longer runs, one at a time. Runs go to out/study, a script
# that was stopped goes on where it was, and runs that several scripts need are made once.
set -euo pipefail
((BASH_VERSINFO[0] >= 5)) || { echo "${0##*/}: error: bash $BASH_VERSION is too old: needs bash 5" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=$(basename "$0" .sh) mode= out=out/study rows=80000 seeds="0 1 2" width=2 extra=() dtype=float32
layers=6 shape=1,2,1 wide=()  # of the parent; of the cut by the paper's rule: layer 0, layers 3 and 4, layer 5; the rest
case $* in
"") ;;
--quick) mode=quick rows=8000 out=out/study-quick extra=(--compile=false) ;;
--scale)
    mode=scale rows=500000 out=out/study-scale width=1
    layers=9 shape=2,3,2 wide=(--n_embd=512 --n_head=8 --n_kv_head=8 --n_ffn=1376) ;;
*) echo "$name.sh: error: unknown flags $* (--quick or --scale)" >&2; exit 2 ;;
esac
if grep -qs bf16 /proc/cpuinfo || [[ $mode == scale ]]; then dtype=bfloat16; fi
if [[ $mode != scale ]]; then export OMP_NUM_THREADS=1; fi
failed=$(mktemp)
trap 'rm -f "$failed"' EXIT
set -m  # each job is a process group of its own, which a signal to this script ends whole
trap 'for job in $(jobs -p); do kill -- -$job 2>/dev/null || true; done; wait; exit 130' INT TERM

updates() {  # updates N: as many in this mode
    case $mode in quick) echo 4 ;; scale) echo $((10 * $1)) ;; *) echo "$1" ;; esac
}
job() {  # job LOG COMMAND ...: in the background, as many at a time as there is room for; finish() waits for all
    while (($(jobs -rp | wc -l) >= width)); do wait -n || true; done
    [[ ! -s $failed ]] || finish
    local log=$1
    shift
    mkdir -p "$(dirname "$log")"
    { "$@" > "$log" 2>&1 || echo "$log" >> "$failed"; } &
}
finish() {  # wait for all jobs; ends the script if one failed
    wait
    if [[ -s $failed ]]; then
        echo "$name.sh: error: a run failed; the end of $(head -1 "$failed"):" >&2
        tail -3 "$(head -1 "$failed")" >&2
        exit 1
    fi
}
run() {  # run CONFIG FOLDER [--key=value ...]: config/tiny_CONFIG.toml into FOLDER, unless it is there already
    local config=$1 folder=$2
    shift 2
    set -- --dtype=$dtype --save_every=100000 --log_every=5 --eval_every="$(updates 25)" "$@" "${extra[@]}"
    [[ ! -e $folder/done || $(< "$folder"/done) != "$*" ]] || return 0
    rm -f "$folder/done"
    python train.py --config=config/tiny_"$config".toml --out_dir="$folder" "$@" && echo "$*" > "$folder/done"
}
task() {  # task SEED ARM [--key=value ...]: task training into $out/SEED/ARM, from the healed model unless told otherwise
    local seed=$1 arm=$2
    shift 2
    job $out/"$seed"/"$arm".log run task $out/"$seed"/"$arm" --seed="$seed" --data=$out/data/task --updates="$(updates 200)" \
        --init_from=$out/"$seed"/heal "$@"
}
long() {  # long SEED ARM [--key=value ...]: the longer task training of items 4, 7 and 8
    task "$1" "$2" --updates="$(updates 350)" --curriculum_warmup=0.50 "${@:3}"
}
equal_flops() {  # equal_flops SEED RUN: task updates that cost the seed's parent what RUN has cost since surgery
    python bench.py equal $out/"$1"/"$2" $out/"$1"/pretrain
}
evaluate() {  # evaluate SEED ARM TEST NAME [flags]: answers of an arm to $out/data/TEST.jsonl, unless they are there
    [[ ! $out/$1/$4.json -nt $out/$1/$2/done ]] || return 0
    python eval_gsm8k.py --model $out/"$1"/"$2" --data $out/data/"$3".jsonl --out $out/"$1"/"$4".json \
        --template plain --max_new_tokens 1 --batch_size 200 "${@:5}"
}
score() {  # score SEED ARM: stories of 1 to 12 and of 18 sentences, at r of 1 to 64
    for test in test test18; do
        job $out/"$1"/eval_"$2"_$test.log evaluate "$1" "$2" $test eval_"$2"_$test --steps 1,2,4,8,16,32,64
    done
}
cut() {  # cut SEED NAME [surgery's flags]: $out/SEED/NAME from the seed's parent
    local seed=$1 name=$2
    shift 2
    [[ -e $out/$seed/$name ]] || python surgery.py $out/"$seed"/pretrain $out/"$seed"/"$name" "$@"
}
heal() {  # heal SEED CUT NAME [--key=value ...]: general text into $out/SEED/NAME
    local seed=$1 cut=$2 name=$3
    shift 3
    run heal $out/"$seed"/"$name" --seed="$seed" --data=$out/data/pretrain --updates="$(updates 100)" \
        --init_from=$out/"$seed"/"$cut" --eval_every="$(updates 10)" "$@"
}
pretrain() {  # pretrain SEED NAME LAYERS: an ordinary Llama
    run pretrain $out/"$1"/"$2" --seed="$1" --data=$out/data/pretrain --updates="$(updates 350)" "${wide[@]}" --n_prelude="$3"
}
parent() {  # one seed's pretrained Llama, its cut and the healed model
    pretrain "$1" pretrain $layers && cut "$1" cut --shape $shape && heal "$1" cut heal
}
parents() {
    for seed in $seeds; do job $out/"$seed"/parent.log parent "$seed"; done
    finish
}
report() {  # report KIND ARM=LABEL ...: the table, its JSON and its picture
    local json=runs/study/results/$name.json picture=assets/study_$name.png
    case $mode in quick) json=$out/$name.json picture=$out/$name.png ;;
                  scale) json=runs/study/results/${name}_scale.json picture=assets/study_${name}_scale.png ;; esac
    python runs/study/study.py "$1" $name "${@:2}" --runs $out --out $json
    python bench.py plot $json --out $picture
    echo "$name.sh: $json, $picture; $SECONDS s"
}

IFS=, read -r P R C <<< $shape
[[ -e $out/data/task/meta.json ]] || python data.py tiny --out $out/data --rows $rows
