#!/usr/bin/env bash
# The pipeline of tiny.sh with a real pretrained checkpoint: a Llama of 260K parameters that writes
# children's stories (stories260K of karpathy/tinyllamas), retrofitted on the text of GSM8K.
#
#   bash runs/stories260K.sh FOLDER [GSM8K]
#
# FOLDER holds the model, converted to Hugging Face layout: config.json, model.safetensors and
# tokenizer.model. GSM8K (default: FOLDER/../gsm8k) holds train.jsonl and test.jsonl, which are in
# github.com/openai/grade-school-math. Neither is part of this repository.
#
# It takes about 13 minutes on one core of a CPU. The model is tiny and will score about zero; the
# script shows that every part works on a real checkpoint with its own tokenizer.
set -euo pipefail
if [[ ${1:-} == --help ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; fi
[[ $# -ge 1 ]] || { echo "usage: bash runs/stories260K.sh FOLDER [GSM8K]" >&2; exit 2; }
folder=$(realpath "$1") gsm8k=$(realpath "${2:-$1/../gsm8k}")
cd "$(dirname "$0")/.."
out=out/stories260K

[[ -e $out/stories260K-2-2-1 ]] ||
    python surgery.py "$folder" $out/stories260K-2-2-1 --prelude 0-1 --core 2-3 --coda 4
python data.py prepare --input "$gsm8k/train.jsonl" --field question,answer \
    --tokenizer "$folder" --out $out/data
python train.py --config=config/stories260K.toml
python eval_gsm8k.py --model $out/recurrent --data "$gsm8k/test.jsonl" --limit 50 --shots 0 \
    --max_new_tokens 128 --steps 1,4,8
python sample.py --model $out/recurrent --steps 8 --tokens 100 \
    --prompt "Once upon a time, there was a little girl named Lily. She liked to play"
