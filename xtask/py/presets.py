"""The models that `cargo xtask model` can write: real layer shapes, few layers, no real weights.

Each preset is an architecture of llama.cpp, its GGUF keys and its tensors. Shapes are written the way GGUF
prints them, fastest dimension first: `(n_in, n_out, n_expert)`.
"""

from dataclasses import dataclass, field


@dataclass
class Tensor:
    """One tensor: `std` is the standard deviation of its values, `mean` their mean."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    f32: bool = False


@dataclass
class Model:
    arch: str
    n_layer: int
    n_vocab: int
    keys: dict[str, int | float | bool | str]  # without the "arch." prefix
    tensors: list[Tensor] = field(default_factory=list)


# How peaked the router is: logits with this standard deviation let a token's last expert weigh little against its
# first, as in trained models, so that a tie broken the other way by rounding does not show in the logits.
ROUTER_STD = 3.0
# Standard deviation of the output logits.
LOGIT_STD = 2.0


class Builder:
    def __init__(self, model: Model, n_embd: int):
        self.model, self.n_embd = model, n_embd
        self.block = ""

    def matrix(self, name: str, *shape: int, gain: float = 1.0):
        """A weight matrix that keeps the scale of its input, times `gain`."""
        self.model.tensors.append(Tensor(f"{self.block}{name}.weight", shape, gain / shape[0] ** 0.5))

    def norm(self, name: str, n: int):
        self.model.tensors.append(Tensor(f"{self.block}{name}.weight", (n,), 0.05, mean=1.0, f32=True))

    def bias(self, name: str, n: int, std: float = 0.1):
        self.model.tensors.append(Tensor(f"{self.block}{name}.bias", (n,), std, f32=True))

    def router(self, name: str, *shape: int, gain: float = ROUTER_STD):
        std = gain / shape[0] ** 0.5
        self.model.tensors.append(Tensor(f"{self.block}{name}.weight", shape, std, f32=True))

    def ends(self):
        self.model.tensors.append(Tensor("token_embd.weight", (self.n_embd, self.model.n_vocab), 1.0))
        self.norm("output_norm", self.n_embd)
        self.matrix("output", self.n_embd, self.model.n_vocab, gain=LOGIT_STD)

    def gqa(self, n_head: int, n_kv: int, d: int, qk_norm: bool = False, qkv_bias: bool = False):
        self.norm("attn_norm", self.n_embd)
        for name, heads in (("attn_q", n_head), ("attn_k", n_kv), ("attn_v", n_kv)):
            self.matrix(name, self.n_embd, heads * d)
            if qkv_bias:
                self.bias(name, heads * d)
        if qk_norm:
            self.norm("attn_q_norm", d)
            self.norm("attn_k_norm", d)
        self.matrix("attn_output", n_head * d, self.n_embd)

    def experts(self, n_ff: int, n_expert: int):
        self.norm("ffn_norm", self.n_embd)
        self.router("ffn_gate_inp", self.n_embd, n_expert)
        self.matrix("ffn_gate_exps", self.n_embd, n_ff, n_expert)
        self.matrix("ffn_up_exps", self.n_embd, n_ff, n_expert)
        self.matrix("ffn_down_exps", n_ff, self.n_embd, n_expert)

    def shared_expert(self, n_ff: int):
        self.matrix("ffn_gate_shexp", self.n_embd, n_ff)
        self.matrix("ffn_up_shexp", self.n_embd, n_ff)
        self.matrix("ffn_down_shexp", n_ff, self.n_embd)


def common_keys(n_embd: int, n_ff: int, n_expert: int, n_used: int, theta: float, eps: float, n_ctx: int):
    return {
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "expert_count": n_expert,
        "expert_used_count": n_used,
        "rope.freq_base": theta,
        "attention.layer_norm_rms_epsilon": eps,
    }


def gqa_keys(n_head: int, n_kv: int, d: int):
    return {
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.key_length": d,
        "attention.value_length": d,
        "rope.dimension_count": d,
    }


def qwen3moe(n_layer, n_vocab, n_expert, *, n_embd, n_head, n_kv, d, n_ff_exp, n_used):
    keys = common_keys(n_embd, 3 * n_embd, n_expert, n_used, 1e6, 1e-6, 40960) | gqa_keys(n_head, n_kv, d)
    keys["expert_feed_forward_length"] = n_ff_exp
    model = Model("qwen3moe", n_layer, n_vocab, keys)
    b = Builder(model, n_embd)
    b.ends()
    for i in range(n_layer):
        b.block = f"blk.{i}."
        b.gqa(n_head, n_kv, d, qk_norm=True)
        b.experts(n_ff_exp, n_expert)
    return model


def mixtral(n_layer, n_vocab, n_expert):
    n_embd, n_head, n_kv, d, n_ff = 4096, 32, 8, 128, 14336
    keys = common_keys(n_embd, n_ff, n_expert, 2, 1e6, 1e-5, 32768) | gqa_keys(n_head, n_kv, d)
    keys["vocab_size"] = n_vocab
    model = Model("llama", n_layer, n_vocab, keys)
    b = Builder(model, n_embd)
    b.ends()
    for i in range(n_layer):
        b.block = f"blk.{i}."
        b.gqa(n_head, n_kv, d)
        b.experts(n_ff, n_expert)
    return model


def qwen2moe(n_layer, n_vocab, n_expert):
    n_embd, n_head, n_kv, d, n_ff_exp, n_ff_shared = 3584, 28, 4, 128, 2560, 20480
    keys = common_keys(n_embd, 18944, n_expert, 8, 1e6, 1e-6, 32768) | gqa_keys(n_head, n_kv, d)
    keys["expert_feed_forward_length"] = n_ff_exp
    keys["expert_shared_feed_forward_length"] = n_ff_shared
    model = Model("qwen2moe", n_layer, n_vocab, keys)
    b = Builder(model, n_embd)
    b.ends()
    for i in range(n_layer):
        b.block = f"blk.{i}."
        b.gqa(n_head, n_kv, d, qkv_bias=True)
        b.experts(n_ff_exp, n_expert)
        b.router("ffn_gate_inp_shexp", n_embd, gain=1.0)
        b.shared_expert(n_ff_shared)
    return model


def deepseek_v3(n_layer, n_vocab, n_expert):
    """Multi-head latent attention as llama.cpp keeps it: one latent KV head, k_b and v_b apart. No dense lead."""
    n_embd, n_head, n_ff_exp, q_lora, kv_lora, d_nope, d_rope, d_v = 7168, 128, 2048, 1536, 512, 128, 64, 128
    n_group = 8 if n_expert % 8 == 0 and n_expert >= 16 else 1
    keys = common_keys(n_embd, 18432, n_expert, min(8, n_expert), 1e4, 1e-6, 163840) | {
        "vocab_size": n_vocab,
        "leading_dense_block_count": 0,
        "attention.head_count": n_head,
        "attention.head_count_kv": 1,
        "attention.key_length": kv_lora + d_rope,
        "attention.value_length": kv_lora,
        "attention.key_length_mla": d_nope + d_rope,
        "attention.value_length_mla": d_v,
        "attention.q_lora_rank": q_lora,
        "attention.kv_lora_rank": kv_lora,
        "rope.dimension_count": d_rope,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "expert_feed_forward_length": n_ff_exp,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,  # sigmoid
        "expert_group_count": n_group,
        "expert_group_used_count": min(4, n_group),
    }
    model = Model("deepseek2", n_layer, n_vocab, keys)
    b = Builder(model, n_embd)
    b.ends()
    for i in range(n_layer):
        b.block = f"blk.{i}."
        b.norm("attn_norm", n_embd)
        b.norm("attn_q_a_norm", q_lora)
        b.norm("attn_kv_a_norm", kv_lora)
        b.matrix("attn_q_a", n_embd, q_lora)
        b.matrix("attn_q_b", q_lora, n_head * (d_nope + d_rope))
        b.matrix("attn_kv_a_mqa", n_embd, kv_lora + d_rope)
        b.matrix("attn_k_b", d_nope, kv_lora, n_head)
        b.matrix("attn_v_b", kv_lora, d_v, n_head)
        b.matrix("attn_output", n_head * d_v, n_embd)
        b.experts(n_ff_exp, n_expert)
        b.bias("exp_probs_b", n_expert, std=0.01)
        b.shared_expert(n_ff_exp)
    return model


def tiny(n_layer, n_vocab, n_expert, whole_blocks):
    """Shapes that divide by nothing handy: K not a multiple of 32 (where the type allows it), 13 experts, 3 heads a group."""
    n_embd, n_ff_exp = (160, 96) if whole_blocks else (168, 104)
    return qwen3moe(
        n_layer, n_vocab, n_expert, n_embd=n_embd, n_head=6, n_kv=2, d=96, n_ff_exp=n_ff_exp, n_used=min(3, n_expert)
    )


def qwen3_30b_a3b(n_layer, n_vocab, n_expert):
    return qwen3moe(
        n_layer, n_vocab, n_expert, n_embd=2048, n_head=32, n_kv=4, d=128, n_ff_exp=768, n_used=min(8, n_expert)
    )


# preset: (builder, layers, experts, vocabulary)
PRESETS = {
    "tiny": (tiny, 2, 13, 601),
    "qwen3-30b-a3b": (qwen3_30b_a3b, 4, 128, 4096),
    "mixtral-8x7b": (mixtral, 2, 8, 4096),
    "qwen2-57b-a14b": (qwen2moe, 1, 64, 4096),
    "deepseek-v3": (deepseek_v3, 1, 64, 4096),
}


def build(preset, n_layer, n_expert, n_vocab, whole_blocks) -> Model:
    """The model of a preset; a count that is None gets the preset's own. `whole_blocks`: rows come in blocks of 32."""
    builder, layers, experts, vocab = PRESETS[preset]
    args = (n_layer or layers, n_vocab or vocab, n_expert or experts)
    return builder(*args, whole_blocks) if builder is tiny else builder(*args)
