"""Huginn-0125 (arXiv 2502.05171, and the code it was released with) in literal formulas."""
import torch
import torch.nn.functional as F


def huginn(w, c, ids, s, steps):
    """
    Logits (B, T, V) in float64 of ids (B, T) after `steps` recurrences of the state s (B, T, C), of
    a model of (1,2,1) layers: w, the tensors of model.safetensors; c, the dict of config.json. The
    pairs that RoPE turns are complex numbers here.
    """
    w = {name.removeprefix("transformer."): t.double() for name, t in w.items()}
    C, H = c["n_embd"], c["n_heads"]
    D, T = C // H, ids.shape[1]
    frequency = c["rope_base"] ** -(torch.arange(0, D, 2).double() / D)
    angle = torch.arange(T).double()[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T

    def norm(x, name):
        return F.rms_norm(x, (C,), w[f"{name}.weight"], c["norm_eps"])

    def rotate(x, bias):
        pairs = (x + bias).transpose(1, 2).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)

    def block(x, name):
        qkv = linear(norm(x, f"{name}.norm_1"), f"{name}.attn.Wqkv")
        q, k, v = qkv.unflatten(-1, (3, H, D)).unbind(2)
        bias = w[f"{name}.attn.qk_bias"]
        q, k, v = rotate(q, bias[0]), rotate(k, bias[1]), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = norm(x + linear(y.flatten(2), f"{name}.attn.proj"), f"{name}.norm_2")
        gate, up = linear(norm(x, f"{name}.norm_3"), f"{name}.mlp.fc").chunk(2, -1)
        return norm(x + linear(F.silu(gate) * up, f"{name}.mlp.proj"), f"{name}.norm_4")

    e = block(w["wte.weight"][ids] * c["init_values"]["embed_scale"], "prelude.0")
    for _ in range(steps):
        s = linear(torch.cat((s, e), -1), "adapter")
        s = block(block(s, "core_block.0"), "core_block.1")
    return linear(norm(block(norm(s, "ln_f"), "coda.0"), "ln_f"), "wte")
