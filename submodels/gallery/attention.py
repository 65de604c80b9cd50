"""Transformers written by hand or with torch's own layers."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from submodels.gallery.case import Case, numbers, words


@dataclass
class GPTConfig:
    """nanoGPT's config, small."""

    block_size: int = 16
    vocab_size: int = 50
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention; sizes are read off the config when it runs."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        b, t, c = x.size()
        n_head = self.config.n_head
        q, k, v = self.c_attn(x).split(self.config.n_embd, dim=2)
        q, k, v = (y.view(b, t, n_head, c // n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class NanoGPT(nn.Module):
    """nanoGPT with tied embeddings; it returns a loss if it is given targets."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config = config or GPTConfig()
        self.wte, self.wpe = (
            nn.Embedding(config.vocab_size, config.n_embd),
            nn.Embedding(config.block_size, config.n_embd),
        )
        self.attention = nn.ModuleList(CausalSelfAttention(config) for _ in range(config.n_layer))
        self.norms = nn.ModuleList(nn.LayerNorm(config.n_embd) for _ in range(2 * config.n_layer + 1))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
            )
            for _ in range(config.n_layer)
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        assert idx.size(1) <= self.config.block_size
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        logits = self.lm_head(self.norms[-1](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class TutorialLM(nn.Module):
    """PyTorch's tutorial: an encoder with a causal mask and sines for positions."""

    def __init__(self, d_model=24):
        super().__init__()
        position, div = (
            torch.arange(20).unsqueeze(1),
            torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model)),
        )
        pe = torch.zeros(20, 1, d_model)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = torch.sin(position * div), torch.cos(position * div)
        self.register_buffer("pe", pe)
        self.encoder, self.decoder, self.d_model = nn.Embedding(50, d_model), nn.Linear(d_model, 50), d_model
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(d_model, 4, 48), 2, enable_nested_tensor=False)

    def forward(self, src):
        x = self.encoder(src) * math.sqrt(self.d_model)
        mask = nn.Transformer.generate_square_subsequent_mask(len(src))
        return self.decoder(self.layers(x + self.pe[: x.size(0)], mask))


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.source, self.target, self.out = nn.Embedding(50, 24), nn.Embedding(50, 24), nn.Linear(24, 50)
        self.transformer = nn.Transformer(24, 4, 1, 1, 48, batch_first=True)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(y.size(1))
        return self.out(self.transformer(self.source(x), self.target(y), tgt_mask=mask))


class PaddedClassifier(nn.Module):
    """An encoder over padded sentences."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, activation="gelu", norm_first=True)
        self.embed, self.encoder = (
            nn.Embedding(50, 24, padding_idx=0),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        )
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        padding = x == 0
        h = self.encoder(self.embed(x), src_key_padding_mask=padding)
        return self.head(h.masked_fill(padding[..., None], 0.0).sum(1) / (~padding).sum(1, keepdim=True))


class GroupedQueries(nn.Module):
    """Rotary positions and fewer key heads than query heads."""

    def __init__(self, kv=2, repeat=False):
        super().__init__()
        self.head_dim, self.repeat, self.groups = 8, repeat, 4 // kv
        self.embed, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.q, self.k, self.v = (
            nn.Linear(32, 32, bias=False),
            nn.Linear(32, kv * 8, bias=False),
            nn.Linear(32, kv * 8, bias=False),
        )
        self.o, self.norm = nn.Linear(32, 32, bias=False), nn.RMSNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def _rotated(self, x):
        angle = torch.arange(x.shape[-2])[:, None] / 100.0 ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, x):
        x = self.embed(x)
        y = self.norm(x)
        q, k, v = (f(y).view(*y.shape[:2], -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self._rotated(q), self._rotated(k)
        if self.repeat:
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return self.out(x + self.down(F.silu(self.gate(x)) * self.up(x)))


class SmallViT(nn.Module):
    """A vision transformer in einops, as vit-pytorch writes it."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.patch, self.token = nn.Linear(48, dim), nn.Parameter(torch.randn(1, 1, dim))
        self.position, self.norm = nn.Parameter(torch.randn(1, 17, dim)), nn.LayerNorm(dim)
        self.qkv, self.out, self.head = nn.Linear(dim, dim * 3, bias=False), nn.Linear(dim, dim), nn.Linear(dim, 10)

    def forward(self, img):
        x = self.patch(rearrange(img, "b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=4, p2=4))
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.position
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attention = (torch.matmul(q, k.transpose(-1, -2)) * self.scale).softmax(dim=-1)
        x = x + self.out(rearrange(torch.matmul(attention, v), "b h n d -> b n (h d)"))
        return self.head(x[:, 0])


class SingleHead(nn.Module):
    """Attention with one head, scaled by the root of its own width."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 24), nn.Linear(24, 50)
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out((q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))).softmax(-1) @ v)


class Mixture(nn.Module):
    """Experts, of which a softmax over their scores weighs all."""

    def __init__(self):
        super().__init__()
        self.embed, self.gate, self.out = nn.Embedding(50, 24), nn.Linear(24, 4), nn.Linear(24, 50)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 24, 32)), nn.Parameter(torch.randn(4, 32, 24))

    def forward(self, x):
        x = self.embed(x)
        weight = self.gate(x).softmax(-1)
        h = torch.einsum("bsd,edf->bsef", x, self.w1).relu()
        return self.out(x + torch.einsum("bsef,efd,bse->bsd", h, self.w2, weight))


class LoRA(nn.Module):
    """A frozen layer and a trained one of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(12, 48),
            nn.Parameter(torch.randn(8, 12)),
            nn.Parameter(torch.zeros(48, 8)),
        )
        self.base.requires_grad_(False)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(F.gelu(self.base(x) + (x @ self.a.T) @ self.b.T * 2.0))


MODELS = {
    "nano-gpt": Case(NanoGPT, words(2, 8)),
    "nano-gpt-with-loss": Case(NanoGPT, lambda: (torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (2, 8)))),
    "tutorial-language": Case(TutorialLM, words(7, 2)),
    "translator": Case(Translator, lambda: (torch.randint(0, 50, (2, 6)), torch.randint(0, 50, (2, 5)))),
    "padded-classifier": Case(PaddedClassifier, words(2, 6)),
    "grouped-queries": Case(GroupedQueries, words(2, 6)),
    "grouped-queries-repeated": Case(lambda: GroupedQueries(repeat=True), words(2, 6)),
    "multi-query": Case(lambda: GroupedQueries(kv=1), words(2, 6)),
    "vit-einops": Case(SmallViT, numbers(2, 3, 16, 16)),
    "vit-einops-narrow-heads": Case(SmallViT, numbers(2, 3, 16, 16), {"heads": "dim"}),
    "encoder-narrow-heads": Case(PaddedClassifier, words(2, 6), {"heads": "dim"}),
    "single-head": Case(SingleHead, words(2, 6)),
    "soft-mixture": Case(Mixture, words(2, 6)),
    "lora": Case(LoRA, numbers(4, 12)),
}
