"""Blocks of recent sequence models: transformers and what takes the place of attention."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from submodels.gallery.case import Case, numbers, words


class RMS(nn.Module):
    """An RMS norm by hand."""

    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w


class SwiGLU(nn.Module):
    """A gated layer whose two halves are one matrix."""

    def __init__(self, d, h):
        super().__init__()
        self.w12 = nn.Linear(d, 2 * h, bias=False)
        self.w3 = nn.Linear(h, d, bias=False)

    def forward(self, x):
        a, b = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(a) * b)


class ComplexRotary(nn.Module):
    """Llama's attention: positions as rotations of complex numbers."""

    def __init__(self, d=32, h=4, L=16):
        super().__init__()
        self.h, self.hd = h, d // h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        f = 1.0 / (10000 ** (torch.arange(0, self.hd, 2).float() / self.hd))
        self.register_buffer(
            "fc", torch.polar(torch.ones(L, self.hd // 2), torch.outer(torch.arange(L).float(), f)), persistent=False
        )

    def rot(self, x):
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * self.fc[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.rot(self.q(x).view(b, t, self.h, self.hd)).transpose(1, 2)
        k = self.rot(self.k(x).view(b, t, self.h, self.hd)).transpose(1, 2)
        v = self.v(x).view(b, t, self.h, self.hd).transpose(1, 2)
        sc = (q @ k.transpose(2, 3)) / math.sqrt(self.hd)
        m = torch.full((t, t), float("-inf")).triu(1)
        sc = F.softmax((sc + m).float(), -1).type_as(q)
        return self.o((sc @ v).transpose(1, 2).contiguous().view(b, t, -1))


class Llama(nn.Module):
    """A block of Llama."""

    def __init__(self, d=32):
        super().__init__()
        self.e = nn.Embedding(60, d)
        self.n1 = RMS(d)
        self.a = ComplexRotary(d)
        self.n2 = RMS(d)
        self.f = SwiGLU(d, 48)
        self.n = RMS(d)
        self.o = nn.Linear(d, 60, bias=False)

    def forward(self, x):
        x = self.e(x)
        x = x + self.a(self.n1(x))
        x = x + self.f(self.n2(x))
        return self.o(self.n(x))


class ALiBi(nn.Module):
    """Attention with a slope for every head."""

    def __init__(self, d=32, h=4):
        super().__init__()
        self.h = h
        self.e = nn.Embedding(60, d)
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)
        self.n = nn.LayerNorm(d)
        self.w = nn.Linear(d, 60)
        sl = torch.tensor([2 ** (-8 * (i + 1) / h) for i in range(h)])
        self.register_buffer("slopes", sl)

    def forward(self, x):
        x = self.e(x)
        b, t, d = x.shape
        q, k, v = self.qkv(self.n(x)).reshape(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        pos = torch.arange(t)
        bias = -(pos[:, None] - pos[None]).abs() * self.slopes[:, None, None]
        a = (q @ k.mT * (d // self.h) ** -0.5 + bias).softmax(-1)
        return self.w(x + self.o((a @ v).transpose(1, 2).reshape(b, t, d)))


class RelativeTable(nn.Module):
    """Attention with a learned table of relative positions."""

    def __init__(self, d=32, h=4, m=8):
        super().__init__()
        self.h, self.m = h, m
        self.e = nn.Linear(6, d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.rel = nn.Embedding(2 * m + 1, h)
        self.n = nn.LayerNorm(d)
        self.w = nn.Linear(d, 5)

    def forward(self, x):
        x = self.e(x)
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        r = (torch.arange(t)[None] - torch.arange(t)[:, None]).clamp(-self.m, self.m) + self.m
        bias = self.rel(r).permute(2, 0, 1).unsqueeze(0)
        a = torch.softmax(q @ k.transpose(-1, -2) + bias, -1)
        y = (a @ v).transpose(1, 2).reshape(b, t, -1)
        return self.w(self.n(x + self.o(y)).mean(1))


class ShiftedWindows(nn.Module):
    """Swin: attention in shifted windows, and patches merged."""

    def __init__(self, d=24, h=3, w=4):
        super().__init__()
        self.h, self.ws = h, w
        self.p = nn.Conv2d(3, d, 2, 2)
        self.n = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.pr = nn.Linear(d, d)
        self.tab = nn.Parameter(torch.randn((2 * w - 1) ** 2, h) * 0.02)
        c = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        r = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + w - 1
        self.register_buffer("ri", r[..., 0] * (2 * w - 1) + r[..., 1])
        self.red = nn.Linear(4 * d, 2 * d, bias=False)
        self.o = nn.Linear(2 * d, 5)

    def forward(self, x):
        x = self.p(x).permute(0, 2, 3, 1)
        B, H, W_, C = x.shape
        sc = x
        x = torch.roll(self.n(x), (-2, -2), (1, 2))
        w = self.ws
        x = x.view(B, H // w, w, W_ // w, w, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, C)
        q, k, v = self.qkv(x).reshape(x.shape[0], w * w, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        a = (q * (C // self.h) ** -0.5) @ k.transpose(-2, -1) + self.tab[self.ri.view(-1)].view(
            w * w, w * w, -1
        ).permute(2, 0, 1).contiguous().unsqueeze(0)
        x = (
            self.pr((a.softmax(-1) @ v).transpose(1, 2).reshape(-1, w * w, C))
            .view(B, H // w, W_ // w, w, w, C)
            .permute(0, 1, 3, 2, 4, 5)
            .contiguous()
            .view(B, H, W_, C)
        )
        x = sc + torch.roll(x, (2, 2), (1, 2))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.o(self.red(x).mean((1, 2)))


class TopExperts(nn.Module):
    """Two experts for every word, chosen by topk and added by index_add."""

    def __init__(self, d=24, e=4, k=2):
        super().__init__()
        self.k, self.e = k, e
        self.i = nn.Linear(8, d)
        self.gate = nn.Linear(d, e, bias=False)
        self.ex = nn.ModuleList([SwiGLU(d, 32) for _ in range(e)])
        self.o = nn.Linear(d, 5)

    def forward(self, x):
        x = self.i(x)
        p = F.softmax(self.gate(x), 1)
        w, idx = torch.topk(p, self.k, -1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = F.one_hot(idx, self.e).permute(2, 1, 0)
        for e in range(self.e):
            j, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.ex[e](x[tok]) * w[tok, j, None])
        return self.o(out)


class Perceiver(nn.Module):
    """Latents that attend to inputs of another width."""

    def __init__(self, d=32, l=6):
        super().__init__()
        self.lat = nn.Parameter(torch.randn(l, d))
        self.i = nn.Linear(7, 20)
        self.ca = nn.MultiheadAttention(d, 4, kdim=20, vdim=20, batch_first=True)
        self.sa = nn.TransformerEncoderLayer(d, 4, 48, batch_first=True, norm_first=True)
        self.n = nn.LayerNorm(20)
        self.o = nn.Linear(d, 5)

    def forward(self, x):
        x = self.n(self.i(x))
        z = self.lat.expand(x.size(0), -1, -1)
        y, _ = self.ca(z, x, x, need_weights=False)
        return self.o(self.sa(z + y).mean(1))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, d=32, t=16):
        super().__init__()
        self.p = nn.Conv2d(3, d, 4, 4)
        self.b = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.LayerNorm(d),
                        nn.Sequential(nn.Linear(t, 24), nn.GELU(), nn.Linear(24, t)),
                        nn.LayerNorm(d),
                        nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, d)),
                    ]
                )
                for _ in range(2)
            ]
        )
        self.o = nn.Linear(d, 5)

    def forward(self, x):
        x = self.p(x).flatten(2).transpose(1, 2)
        for n1, m1, n2, m2 in self.b:
            x = x + m1(n1(x).transpose(1, 2)).transpose(1, 2)
            x = x + m2(n2(x))
        return self.o(x.mean(1))


class LinearAttention(nn.Module):
    """Attention without a softmax."""

    def __init__(self, d=32, h=4):
        super().__init__()
        self.h = h
        self.i = nn.Linear(6, d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.w = nn.Linear(d, 5)

    def forward(self, x):
        x = self.i(x)
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.h, d // self.h).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhnd,bhne->bhde", k, v)
        z = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(2)) + 1e-6)
        y = torch.einsum("bhnd,bhde,bhn->bhne", q, kv, z)
        return self.w(self.o(y.transpose(1, 2).reshape(b, t, d)).mean(1))


class Conformer(nn.Module):
    """Attention and gated depthwise convolutions."""

    def __init__(self, d=32):
        super().__init__()
        self.i = nn.Linear(10, d)
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 64), nn.SiLU(), nn.Linear(64, d))
        self.n = nn.LayerNorm(d)
        self.a = nn.MultiheadAttention(d, 4, batch_first=True)
        self.pw = nn.Conv1d(d, 2 * d, 1)
        self.dw = nn.Conv1d(d, d, 7, padding=3, groups=d)
        self.bn = nn.BatchNorm1d(d)
        self.pw2 = nn.Conv1d(d, d, 1)
        self.o = nn.Linear(d, 5)

    def forward(self, x):
        x = self.i(x)
        x = x + 0.5 * self.f(x)
        y = self.n(x)
        x = x + self.a(y, y, y)[0]
        y = F.glu(self.pw(x.transpose(1, 2)), 1)
        x = x + self.pw2(F.silu(self.bn(self.dw(y)))).transpose(1, 2)
        return self.o(x)


class DiT(nn.Module):
    """A diffusion transformer's block: norms modulated by time and class."""

    def __init__(self, d=32):
        super().__init__()
        self.p = nn.Conv2d(3, d, 4, 4)
        self.t = nn.Sequential(nn.Linear(16, d), nn.SiLU(), nn.Linear(d, d))
        self.y = nn.Embedding(6, d)
        self.n1 = nn.LayerNorm(d, elementwise_affine=False)
        self.n2 = nn.LayerNorm(d, elementwise_affine=False)
        self.a = nn.MultiheadAttention(d, 4, batch_first=True)
        self.m = nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, d))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        self.o = nn.Linear(d, 48)

    @staticmethod
    def _modulated(x, shift, scale):
        return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    def forward(self, x, t, y):
        x = self.p(x).flatten(2).transpose(1, 2)
        f = torch.exp(-math.log(10000) * torch.arange(8).float() / 8)
        e = t[:, None].float() * f
        c = self.t(torch.cat([e.cos(), e.sin()], -1)) + self.y(y)
        sh, sc, g, sh2, sc2, g2 = self.ada(c).chunk(6, 1)
        z = self._modulated(self.n1(x), sh, sc)
        x = x + g.unsqueeze(1) * self.a(z, z, z)[0]
        x = x + g2.unsqueeze(1) * self.m(self._modulated(self.n2(x), sh2, sc2))
        x = self.o(x).reshape(x.size(0), 4, 4, 4, 4, 3)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.size(0), 3, 16, 16)


class TransformerXL(nn.Module):
    """Relative positions by a shifted view."""

    def __init__(self, d=32, h=4):
        super().__init__()
        self.h, self.dh = h, d // h
        self.e = nn.Embedding(50, d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.r = nn.Linear(d, d, bias=False)
        self.u = nn.Parameter(torch.randn(h, d // h))
        self.v = nn.Parameter(torch.randn(h, d // h))
        self.o = nn.Linear(d, d, bias=False)
        self.n = nn.LayerNorm(d)
        self.w = nn.Linear(d, 50)
        self.register_buffer("f", 1 / 10000 ** (torch.arange(0.0, d, 2.0) / d))

    def shift(self, x):
        z = torch.zeros((*x.shape[:3], 1))
        p = torch.cat([z, x], 3).view(*x.shape[:2], x.size(3) + 1, x.size(2))
        return p[:, :, 1:].view_as(x)

    def forward(self, x):
        x = self.e(x)
        b, t, _ = x.shape
        p = torch.outer(torch.arange(t - 1, -1, -1.0), self.f)
        r = self.r(torch.cat([p.sin(), p.cos()], -1)).view(t, self.h, self.dh)
        q, k, v = (z.view(b, t, self.h, self.dh) for z in self.qkv(x).chunk(3, -1))
        ac = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        bd = self.shift(torch.einsum("bihd,jhd->bhij", q + self.v, r))
        a = ((ac + bd) / self.dh**0.5).softmax(-1)
        return self.w(self.n(x + self.o(torch.einsum("bhij,bjhd->bihd", a, v).reshape(b, t, self.h * self.dh))))


class RWKV(nn.Module):
    """Time mixing with exponential decay."""

    def __init__(self, d=24):
        super().__init__()
        self.e = nn.Embedding(50, d)
        self.ln = nn.LayerNorm(d)
        self.sh = nn.ZeroPad2d((0, 0, 1, -1))
        self.mk, self.mv, self.mr = (nn.Parameter(torch.rand(1, 1, d)) for _ in range(3))
        self.k, self.v, self.r, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.td = nn.Parameter(torch.randn(d))
        self.tf = nn.Parameter(torch.randn(d))
        self.w = nn.Linear(d, 50)

    def forward(self, x):
        x = self.e(x)
        y = self.ln(x)
        yy = self.sh(y)
        k, v, r = (
            self.k(y * self.mk + yy * (1 - self.mk)),
            self.v(y * self.mv + yy * (1 - self.mv)),
            torch.sigmoid(self.r(y * self.mr + yy * (1 - self.mr))),
        )
        a = b = torch.zeros_like(k[:, 0])
        out = []
        w = -torch.exp(self.td)
        for t in range(x.size(1)):
            e = torch.exp(self.tf + k[:, t])
            out.append((a + e * v[:, t]) / (b + e))
            e = torch.exp(k[:, t])
            a = torch.exp(w) * a + e * v[:, t]
            b = torch.exp(w) * b + e
        return self.w(x + self.o(r * torch.stack(out, 1)))


class StateSpace(nn.Module):
    """A diagonal state space model, by Fourier transform."""

    def __init__(self, d=16, n=8):
        super().__init__()
        self.i = nn.Linear(3, d)
        self.C = nn.Parameter(torch.randn(d, n, dtype=torch.cfloat))
        self.ld = nn.Parameter(torch.rand(d))
        self.la = nn.Parameter(torch.rand(d, n))
        self.ai = nn.Parameter(torch.rand(d, n))
        self.D = nn.Parameter(torch.randn(d))
        self.o = nn.Sequential(nn.Conv1d(d, 2 * d, 1), nn.GLU(1))
        self.w = nn.Linear(d, 4)

    def forward(self, x):
        u = self.i(x).transpose(1, 2)
        L = u.size(-1)
        dt = self.ld.exp()
        A = -self.la.exp() + 1j * self.ai
        dA = A * dt.unsqueeze(-1)
        K = dA.unsqueeze(-1) * torch.arange(L)
        C = self.C * (dA.exp() - 1) / A
        k = 2 * torch.einsum("hn,hnl->hl", C, K.exp()).real
        kf = torch.fft.rfft(k, n=2 * L)
        uf = torch.fft.rfft(u, n=2 * L)
        y = torch.fft.irfft(uf * kf, n=2 * L)[..., :L] + u * self.D.unsqueeze(-1)
        return self.w(self.o(F.gelu(y)).mean(-1))


MODELS = {
    "llama-complex-rotary": Case(Llama, words(2, 8)),
    "alibi": Case(ALiBi, words(2, 8)),
    "relative-table": Case(RelativeTable, numbers(2, 8, 6)),
    "shifted-windows": Case(ShiftedWindows, numbers(2, 3, 16, 16)),
    "top-experts": Case(TopExperts, numbers(6, 8)),
    "perceiver": Case(Perceiver, numbers(2, 9, 7)),
    "mixer": Case(Mixer, numbers(2, 3, 16, 16)),
    "linear-attention": Case(LinearAttention, numbers(2, 8, 6)),
    "conformer": Case(Conformer, numbers(2, 9, 10)),
    "diffusion": Case(DiT, lambda: (torch.randn(2, 3, 16, 16), torch.tensor([3, 70]), torch.tensor([1, 5]))),
    "transformer-xl": Case(TransformerXL, words(2, 6)),
    "rwkv": Case(RWKV, words(2, 5)),
    "state-space": Case(StateSpace, numbers(2, 12, 3)),
}
