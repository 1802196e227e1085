"""
Try an export with the installed transformers, beyond what test_all.py does: a line for each trial.

    pip install transformers accelerate peft optimum-quanto hqq
    python surgery.py out/tiny/task out/export --export hf && python runs/export_check.py out/export

What is generated is compared, token by token, with generation without a cache. A minute on a CPU.
"""
import sys
import tempfile

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig, Trainer, TrainingArguments


def load():
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)


def generate(model, ids, **way):
    """The 8 tokens that follow ids (B, T) at r = 9."""
    new = model.generate(ids, num_steps=9, max_new_tokens=8, do_sample=False, eos_token_id=None,
                         pad_token_id=0, **way)
    return new[:, ids.shape[1]:]


def train(model, ids):
    """3 updates by Trainer with gradient checkpointing -> the mean loss."""
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=2,
                                  gradient_checkpointing=True, report_to=[])
    return Trainer(model, arguments, train_dataset=rows).train().training_loss


@torch.no_grad()
def main():
    model = load()
    ids = torch.randint(2, model.config.vocab_size, (4, 12), generator=torch.manual_seed(0))
    compiled = CompileConfig(backend="eager")
    compiled._compile_all_devices = True  # a CPU, too
    quantized = {"nbits": 4, "residual_length": 4, "q_group_size": 4}  # all columns but a few
    ways = {"dynamic": {}, "beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}}
    ways["static, compiled"] = ways["static"] | {"compile_config": compiled}
    for backend in ("quanto", "hqq"):
        ways[f"4 bits by {backend}"] = {"cache_implementation": "quantized",
                                        "cache_config": quantized | {"backend": backend}}
    print(f"transformers {transformers.__version__}, peft {peft.__version__}")
    for name, way in ways.items():
        wanted = generate(model, ids, use_cache=False, num_beams=way.get("num_beams", 1))
        found = generate(model, ids, **way)
        print(f"{name}: {(found == wanted).sum()} of {wanted.numel()} tokens")
    with torch.enable_grad():
        print(f"Trainer: loss {train(model, ids):.3f}")
        config = peft.LoraConfig(target_modules=["Wqkv", "fc", "proj", "adapter"])
        tuned = peft.get_peft_model(load(), config)
        print(f"LoRA: loss {train(tuned, ids):.3f}")
    folder = tempfile.mkdtemp()
    tuned.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(load(), folder)
    far = (again(ids).logits - tuned.eval()(ids).logits).abs().max().item()
    print(f"LoRA, saved and loaded: logits differ by at most {far}")


if __name__ == "__main__":
    main()
