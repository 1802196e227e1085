"""
Convert a .gguf file to a folder in Hugging Face layout, for surgery.py. transformers reads the file
and dequantizes its weights, which does not restore what quantization lost.

    pip install transformers accelerate gguf
    python -m tools.from_gguf FILE.gguf OUT
    python surgery.py OUT LOOP --shape 13,4,13

The weights are float32; or bfloat16, if the file has bfloat16 and that holds every weight exactly.
"""
import tempfile
from pathlib import Path

from common import Parser, UserError, cli, creating, new_folder, read_json, reading, write_json

import torch

from model import save_tensors

ARCHITECTURES = "llama", "mistral", "qwen2", "qwen3"  # the ones surgery.py can read

# The values of tokenizer.ggml.pre for which transformers splits text into words as llama.cpp does;
# for "smollm" and "qwen2", convert() sees to it. With Llama 3's, BOS comes first unless a file says
# otherwise.
LLAMA_3 = "llama-bpe", "llama3", "llama-v3"
KNOWN = "gpt-2", "olmo", "smollm", *LLAMA_3, "dbrx", "qwen2"


def check_file(path, file):
    """
    Raise UserError if surgery.py does not support the model in a GGUFReader's file, or transformers
    would read something else from it than llama.cpp does. Returns its tokenizer.ggml.pre.
    """
    def said(key, otherwise=None):
        with reading(path):
            return file.fields[key].contents() if key in file.fields else otherwise

    architecture = said("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path}: the architecture {architecture!r} is not supported, only "
                        f"{', '.join(ARCHITECTURES)}")
    if said("split.count", 1) > 1:
        raise UserError(f"{path}: one of several parts. Join them with llama.cpp's "
                        "llama-gguf-split --merge")
    keys = ".rope.scaling.type", ".rope.scaling.factor", ".rope.scale_linear"
    scaled = [key for key in file.fields if key.endswith(keys) and said(key) not in (1, "none")]
    scaled += [tensor.name for tensor in file.tensors if tensor.name == "rope_freqs.weight"]
    if scaled:
        raise UserError(f"{path}: {scaled[0]} scales RoPE, which transformers does not read from "
                        ".gguf files. Use the model's safetensors")
    kind, pre = said("tokenizer.ggml.model"), said("tokenizer.ggml.pre")
    if kind == "llama" and not said("tokenizer.ggml.add_space_prefix", True):
        raise UserError(f"{path}: has no blank before a text, which transformers does not read. "
                        "Use the model's safetensors")
    if kind == "gpt2" and pre not in KNOWN:
        raise UserError(f"{path}: text would be tokenized differently from llama.cpp, because "
                        f"its tokenizer.ggml.pre is {pre}. Use the model's safetensors")
    return pre


def convert(path, out):
    """Convert a .gguf file to a new folder. Raises UserError if it is corrupt or not supported."""
    import accelerate  # noqa: F401, which transformers needs for such a file
    import gguf
    import transformers
    from tokenizers import normalizers, pre_tokenizers
    transformers.logging.set_verbosity_error()
    with reading(path):
        file = gguf.GGUFReader(path)
    pre = check_file(path, file)
    with tempfile.TemporaryDirectory() as alone:
        # In a folder of its own, or transformers would read a tokenizer.json beside it instead.
        Path(alone, path.name).symlink_to(path.resolve())
        where = {"pretrained_model_name_or_path": alone, "gguf_file": path.name}
        with reading(path):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.float32, output_loading_info=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[kind]:
                raise UserError(f"{path}: {kind.replace('_', ' ')}: {sorted(report[kind])[0]}")
        read = len([*model.parameters()])
        if read < len(file.tensors):  # such as biases of a Llama, which the report leaves out
            raise UserError(f"{path}: transformers reads only {read} of its {len(file.tensors)} "
                            "tensors. Use the model's safetensors")
    for name in "bos", "eos":  # transformers 5.17.0 takes SmolLM2's BOS for its EOS
        if field := file.fields.get(f"tokenizer.ggml.{name}_token_id"):
            token = tokenizer.convert_ids_to_tokens(field.contents())
            setattr(tokenizer, f"{name}_token", token)
    if pre in LLAMA_3 and "tokenizer.ggml.add_bos_token" not in file.fields:
        tokenizer.add_bos_token = True
    coder = tokenizer.backend_tokenizer
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        coder.pre_tokenizer = pre_tokenizers.Sequence([digits, coder.pre_tokenizer])
    elif pre == "qwen2":  # which transformers 5.24.0 reads without it
        coder.normalizer = normalizers.NFC()
    elif pre not in KNOWN:  # SentencePiece, which puts a blank even before a blank
        blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        coder.normalizer = normalizers.Sequence(blanks)
        coder.pre_tokenizer = None
    stored = {tensor.tensor_type.name for tensor in file.tensors}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if "BF16" in stored and all(t.equal(t.bfloat16().float()) for t in weights.values()):
        weights = {name: t.bfloat16() for name, t in weights.items()}
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):  # of the file, not of the folder
        config.pop(key, None)
    with creating(out):
        tokenizer.save_pretrained(out)
        path = out / "tokenizer.json"
        spec = read_json(path)
        # transformers has added GPT-2's <|endoftext|>, as a new token if the file lacks it.
        size = len(file.fields["tokenizer.ggml.tokens"].data)
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < size]
        write_json(path, spec)
        save_tensors(out / "model.safetensors", weights)
        write_json(out / "config.json", config)
    print(f"wrote {out}")


def main():
    parser = Parser(__doc__, usage="python -m tools.from_gguf FILE.gguf OUT")
    flag = parser.add_argument
    flag("file", metavar="FILE.gguf")
    flag("out", metavar="OUT", type=new_folder, help="a new folder")
    args = parser.parse_args()
    convert(Path(args.file), args.out)


if __name__ == "__main__":
    cli(main)
