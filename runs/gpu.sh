#!/usr/bin/env bash
# How does loopgraft do on your GPU, NVIDIA's or AMD's? Needs a clone and requirements.txt, and
# downloads nothing. It ends with the results of all parts: please paste them into an issue.
#
#   bash runs/gpu.sh [--small | --cpu] [PART ...]
#
#   --tests      the GPU tests
#   --train      speed and memory of training TinyLlama's (4,8,4), random, in bfloat16
#   --decode     speed of decoding with it at r = 1, 4 and 16, for 1, 8 and 64 rows
#   --hunt       nine small runs at once, which have crashed on an H200: two minutes, only if asked
#                for
#
# The first three take up to 8 minutes, beside what compiles in them (first_s, in seconds), and
# 24 GB of GPU memory. --small: SmolLM2's size, for less memory. --cpu: toy sizes, on a CPU.
# A part that fails does not stop the others. Logs, models and runs go to out/gpu.
[ "${BASH_VERSION-}" ] || { echo "error: this needs bash: bash $0" >&2; exit 2; }
set -euo pipefail
cd "$(dirname "$0")/.."
preset=tinyllama-4-8-4 cpu='' parts=''
for flag in "$@"; do
    case $flag in
    --small) preset=smollm2-135m-13-4-13 ;;
    --cpu) cpu=1 ;;
    --tests | --train | --decode | --hunt) parts+=" $flag " ;;
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' runs/gpu.sh; exit ;;
    *) echo "gpu.sh: error: unknown flag $flag (see --help)" >&2; exit 2 ;;
    esac
done
parts=${parts:- --tests --train --decode }
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT  # Ctrl-C
out=out/gpu failed=0
mkdir -p $out
rm -f $out/*.log

part() {  # part NAME COMMAND ...: its output goes to $out/NAME.log, too
    local log=$out/$1.log code=0
    printf '\n== %s (%d s so far)\n' "$1" $SECONDS
    timeout --foreground -k 30 900 "${@:2}" 2>&1 | tee "$log" || code=$?
    ((code)) || return 0
    echo "failed ($code): $(tail -n 1 "$log")" | tee -a "$log"
    failed=1
}
asked() { [[ $parts == *" --$1 "* ]]; }

# What the parts measure with: a shape without weights, and how much of it.
if [[ $cpu ]]; then
    export LOOPGRAFT_GPU=cpu CUDA_VISIBLE_DEVICES='' HIP_VISIBLE_DEVICES=''
    shape=assets/tiny gigabytes=0
    train=(--context 32 --micro_batches 2 --repeat 2 --compile=false)
    decode=(--tokens 4 --repeat 2 --compile=false)
    hunt=(--updates=2 --batch_size=8 --eval_rows=8) runs=2
else
    export LOOPGRAFT_GPU=1
    shape=$out/shape gigabytes=$(python -m runs.gpu $preset $out/shape)
    train=(--context 1024 --micro_batches 8 --repeat 3)
    decode=(--repeat 3)
    hunt=(--updates=500) runs=9
fi

if asked tests; then
    processes=$(python -c "import xdist; print('-n 4')" 2>/dev/null || true)  # pytest-xdist
    part tests python -m pytest -q test_all.py -k gpu $processes
fi
if asked train; then
    for rows in 4-0.5 2-1 16-1; do  # of a micro-batch, and the activation budget
        [[ $rows == 16-1 && $preset == tinyllama* ]] && ((gigabytes < 66)) && continue
        part train-$rows python bench.py train --model $shape --steps 4+4 \
            --batch_size ${rows%-*} --activation_budget ${rows#*-} "${train[@]}"
    done
fi
if asked decode; then
    for rows in 1 8 64; do
        part decode-$rows python bench.py decode --model $shape --steps 1,4,16 \
            --batch_size $rows "${decode[@]}"
    done
fi
if asked hunt; then
    printf '\n== hunt (%d s so far)\n' $SECONDS
    python -m runs.tiny_corpus --out $out/corpus --rows 2000 || failed=1
    rm -rf $out/hunt
    mkdir $out/hunt
    small=$shape
    if [[ ! $cpu ]]; then
        small=$out/hunt/shape
        python -m runs.gpu smollm2-135m-2-2-2 $small > $out/hunt/shape.txt || failed=1
    fi
    # After a crash, the driver writes a small core file, which names the kernel.
    export CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_FILE=$PWD/$out/hunt/core.%p
    export CUDA_COREDUMP_GENERATION_FLAGS=skip_global_memory,skip_shared_memory,skip_local_memory
    pids=() crashed=0
    for i in $(seq $runs); do
        timeout -k 30 100 python train.py --config=config/smollm2.toml --init_from=$small \
            --reinit --seed=$i --data=$out/corpus/task --context=54 --save_every=500 \
            --out_dir=$out/hunt/$i "${hunt[@]}" > $out/hunt/$i.txt 2>&1 &
        pids+=($!)
    done
    for i in $(seq $runs); do
        code=0
        wait ${pids[i - 1]} || code=$?
        ((code == 0 || code == 124)) && continue  # at its end, or stopped by the timeout
        crashed=$((crashed + 1)) failed=1
        echo "run $i: $(tail -n 1 $out/hunt/$i.txt)"
    done
    for core in $(ls $out/hunt/core.* 2>/dev/null); do
        cuda-gdb -batch -ex "target cudacore $core" || true
    done
    rm -rf $out/hunt/*/step_*
    echo "$((runs - crashed)) of $runs runs did not crash" | tee $out/hunt.log
fi

gpus=$(python -c "import torch
gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
print(*gpus, 'torch', torch.__version__)")
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) ||
    driver=unknown
commit=$(git rev-parse --short HEAD 2>/dev/null) || commit=unknown
printf '\n== %s, driver %s, commit %s, %s, %d s\n' "$gpus" "$driver" "$commit" "$(date -u +%F)" \
    $SECONDS
for log in $(ls -tr $out/*.log); do
    printf '\n%s\n' "$(basename "$log" .log)"
    grep -E '^([nr] [0-9]|failed)' "$log" || tail -n 1 "$log"  # bench.py's rows, or the last line
done
exit $failed
