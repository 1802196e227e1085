"""
Try an export with the installed transformers in more ways than test_all.py does, and print a line
for each. Takes a minute on a CPU.

    pip install transformers accelerate peft optimum-quanto hqq
    python surgery.py out/tiny/task out/export --export hf
    python runs/export_check.py out/export

Generated tokens are compared with those of generation without a cache.
"""
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Parser, UserError, cli, opening


def load(folder):
    """Load an export as transformers users do."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def generate(model, ids, **options):
    """
    Generate 8 tokens after ids (B, T) at r = 9, by default greedily. Returns the new tokens (B, 8).
    options: further arguments of model.generate().
    """
    new = model.generate(
        ids,
        num_steps=9,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return new[:, ids.shape[1]:]


def generation_options():
    """Return {name: options of generate()}, the ways to generate that are tried."""
    from transformers import CompileConfig

    compile_config = CompileConfig(backend="eager")
    compile_config._compile_all_devices = True  # by default transformers compiles on GPUs only
    static = {"cache_implementation": "static"}
    ways = {
        "dynamic": {},
        "beams": {"num_beams": 3},
        "static": static,
        "static, compiled": static | {"compile_config": compile_config},
    }
    for backend in ("quanto", "hqq"):
        ways[f"4 bits by {backend}"] = {
            "cache_implementation": "quantized",
            "cache_config": {
                "backend": backend,
                "nbits": 4,
                "q_group_size": 4,
                "residual_length": 4,  # all columns but the last 4 are quantized
            },
        }
    return ways


def train(model, ids):
    """
    Make 3 updates on ids (B, T) with Trainer and gradient checkpointing. Returns the mean loss.
    """
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    return trainer.train().training_loss


def main():
    parser = Parser(description=opening(__doc__))
    parser.add_argument("export", metavar="EXPORT", help="a folder that surgery.py --export wrote")
    args = parser.parse_args()

    try:
        import peft
        import transformers
    except ImportError as e:
        raise UserError(f"{e}. Run `pip install transformers accelerate peft optimum-quanto hqq`")

    print(f"transformers {transformers.__version__}, peft {peft.__version__}")
    model = load(args.export)
    generator = torch.manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (4, 12), generator=generator)
    for name, options in generation_options().items():
        num_beams = options.get("num_beams", 1)
        wanted = generate(model, ids, use_cache=False, num_beams=num_beams)
        found = generate(model, ids, **options)
        print(f"{name}: {(found == wanted).sum()} of {wanted.numel()} tokens are equal")

    print(f"Trainer: loss {train(model, ids):.3f}")
    lora = peft.LoraConfig(target_modules=["Wqkv", "fc", "proj", "adapter"])
    tuned = peft.get_peft_model(load(args.export), lora)
    print(f"LoRA: loss {train(tuned, ids):.3f}")

    folder = tempfile.mkdtemp()
    tuned.save_pretrained(folder)
    tuned.eval()
    loaded = peft.PeftModel.from_pretrained(load(args.export), folder)
    with torch.no_grad():
        difference = loaded(ids).logits - tuned(ids).logits
    print(f"LoRA, saved and loaded: logits differ by at most {difference.abs().max().item()}")


if __name__ == "__main__":
    cli(main)
