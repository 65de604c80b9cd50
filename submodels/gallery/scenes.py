"""Images beyond classification: detection, generation, super-resolution, metric learning."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from submodels.gallery.case import Case, numbers


def _block(n_in, n_out, kernel=3, stride=1, groups=1, d=1):
    conv = nn.Conv2d(n_in, n_out, kernel, stride, d * (kernel // 2), dilation=d, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))


def _two(n_in, n_out):
    return nn.Sequential(_block(n_in, n_out), _block(n_out, n_out))


class UNetPlusPlus(nn.Module):
    """A nested U-Net with two outputs."""

    def __init__(self, f=(8, 16, 24)):
        super().__init__()
        self.pool = nn.MaxPool2d(2, 2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.c00, self.c10, self.c20 = _two(1, f[0]), _two(f[0], f[1]), _two(f[1], f[2])
        self.c01 = _two(f[0] + f[1], f[0])
        self.c11 = _two(f[1] + f[2], f[1])
        self.c02 = _two(f[0] * 2 + f[1], f[0])
        self.f1 = nn.Conv2d(f[0], 2, 1)
        self.f2 = nn.Conv2d(f[0], 2, 1)

    def forward(self, x):
        a = self.c00(x)
        b = self.c10(self.pool(a))
        a1 = self.c01(torch.cat([a, self.up(b)], 1))
        c = self.c20(self.pool(b))
        b1 = self.c11(torch.cat([b, self.up(c)], 1))
        a2 = self.c02(torch.cat([a, a1, self.up(b1)], 1))
        return [self.f1(a1), self.f2(a2)]


class Pyramid(nn.Module):
    """DeepLab's pyramid of dilated convolutions."""

    def __init__(self, i=24, o=16):
        super().__init__()
        self.st = _block(3, i, 3, 2)
        self.b = nn.ModuleList([_block(i, o, 1)] + [_block(i, o, 3, d=r) for r in (2, 4, 6)])
        self.p = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(i, o, 1), nn.ReLU())
        self.pr = _block(5 * o, o, 1)
        self.low = nn.Conv2d(i, 6, 1)
        self.cl = nn.Sequential(_block(o + 6, o), nn.Conv2d(o, 3, 1))

    def forward(self, x):
        y = self.st(x)
        z = [b(y) for b in self.b]
        z.append(F.interpolate(self.p(y), size=y.shape[-2:], mode="bilinear", align_corners=False))
        z = self.pr(torch.cat(z, 1))
        return F.interpolate(
            self.cl(torch.cat([z, self.low(y)], 1)), x.shape[-2:], mode="bilinear", align_corners=False
        )


class Denoising(nn.Module):
    """A diffusion U-Net: time added to features, attention in the middle."""

    def __init__(self, c=16):
        super().__init__()
        self.i = nn.Conv2d(3, c, 3, padding=1)
        self.te = nn.Linear(c, 4 * c)
        self.b1 = self.blk(c, 2 * c)
        self.e1 = nn.Linear(4 * c, 2 * c)
        self.n = nn.GroupNorm(4, 2 * c)
        self.qkv = nn.Conv2d(2 * c, 6 * c, 1)
        self.pr = nn.Conv2d(2 * c, 2 * c, 1)
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(2 * c, c, 3, padding=1))
        self.o = nn.Conv2d(2 * c, 3, 3, padding=1)
        self.c = c

    def blk(self, i, o):
        return nn.Sequential(nn.GroupNorm(4, i), nn.SiLU(), nn.Conv2d(i, o, 3, padding=1, stride=2))

    def forward(self, x, t):
        half = self.c // 2
        f = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        e = t[:, None].float() * f[None]
        e = F.silu(self.te(torch.cat([e.sin(), e.cos()], -1)))
        a = self.i(x)
        h = self.b1(a) + self.e1(e)[:, :, None, None]
        b, c, hh, ww = h.shape
        q, k, v = self.qkv(self.n(h)).reshape(b, 3, c, hh * ww).unbind(1)
        w = torch.softmax(torch.einsum("bct,bcs->bts", q, k) / math.sqrt(c), -1)
        h = h + self.pr(torch.einsum("bts,bcs->bct", w, v).reshape(b, c, hh, ww))
        return self.o(torch.cat([self.up(h), a], 1))


class SuperResolution(nn.Module):
    """Residual blocks and a pixel shuffle."""

    def __init__(self, c=16):
        super().__init__()
        self.h = nn.Conv2d(3, c, 3, padding=1)
        self.b = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(True), nn.Conv2d(c, c, 3, padding=1))
                for _ in range(2)
            ]
        )
        self.u = nn.Conv2d(c, 4 * c, 3, padding=1)
        self.t = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x):
        x = self.h(x)
        r = x
        for b in self.b:
            x = x + 0.1 * b(x)
        return self.t(F.pixel_shuffle(self.u(x + r), 2))


class Shuffled(nn.Module):
    """ShuffleNet's units: halves, group convolutions, shuffled channels."""

    def __init__(self):
        super().__init__()
        self.a = _block(3, 24)
        self.b1 = nn.Sequential(_block(12, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12), _block(12, 12, 1))
        self.g = nn.Conv2d(24, 36, 1, groups=3)
        self.o = nn.Linear(36, 5)

    def shuf(self, x, g):
        b, c, h, w = x.shape
        return x.view(b, g, c // g, h, w).transpose(1, 2).contiguous().view(b, -1, h, w)

    def forward(self, x):
        x = self.a(x)
        u, v = x.chunk(2, 1)
        x = self.shuf(torch.cat([u, self.b1(v)], 1), 2)
        return self.o(self.shuf(self.g(x), 3).mean((2, 3)))


class MixedKernels(nn.Module):
    """A kernel of its own for every sample, mixed from experts."""

    def __init__(self, i=16, o=24, k=3, e=4):
        super().__init__()
        self.i = nn.Conv2d(3, i, 3, padding=1)
        self.w = nn.Parameter(torch.randn(e, o, i, k, k) * 0.1)
        self.r = nn.Linear(i, e)
        self.o = nn.Linear(o, 5)

    def forward(self, x):
        x = F.relu(self.i(x))
        b, c, h, w = x.shape
        r = self.r(x.mean((2, 3))).sigmoid()
        k = torch.einsum("be,eoikl->boikl", r, self.w)
        y = F.conv2d(x.reshape(1, b * c, h, w), k.reshape(-1, c, 3, 3), padding=1, groups=b).reshape(b, -1, h, w)
        return self.o(F.relu(y).mean((2, 3)))


class ConditionalNorm(nn.Module):
    """A batch norm whose scale and shift depend on the class."""

    def __init__(self, c, k):
        super().__init__()
        self.c = c
        self.bn = nn.BatchNorm2d(c, affine=False)
        self.e = nn.Embedding(k, c * 2)

    def forward(self, x, y):
        g, b = self.e(y).chunk(2, 1)
        return g.view(-1, self.c, 1, 1) * self.bn(x) + b.view(-1, self.c, 1, 1)


class ConditionalGenerator(nn.Module):
    """A generator with such norms and a literal view."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(10, 4 * 4 * 24)
        self.n1 = ConditionalNorm(24, 5)
        self.c1 = nn.Conv2d(24, 16, 3, padding=1)
        self.n2 = ConditionalNorm(16, 5)
        self.o = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, z, y):
        x = self.f(z).view(-1, 24, 4, 4)
        x = self.c1(F.interpolate(F.relu(self.n1(x, y)), scale_factor=2))
        return torch.tanh(self.o(F.relu(self.n2(x, y))))


class FiLM(nn.Module):
    """Features scaled and shifted by a question."""

    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 24, 3, padding=1)
        self.b = nn.BatchNorm2d(24, affine=False)
        self.g = nn.GRU(12, 32, batch_first=True)
        self.e = nn.Embedding(20, 12)
        self.f = nn.Linear(32, 48)
        self.c2 = nn.Conv2d(24, 24, 3, padding=1)
        self.o = nn.Linear(24, 4)

    def forward(self, x, q):
        h = self.g(self.e(q))[1][-1]
        f = self.f(h).view(-1, 2, 24)
        g, b = f[:, 0], f[:, 1]
        y = self.c(x)
        z = self.b(self.c2(F.relu(y)))
        return self.o((y + F.relu(g[:, :, None, None] * z + b[:, :, None, None])).amax((2, 3)))


class ConvVAE(nn.Module):
    """A variational autoencoder with literal views."""

    def __init__(self, z=8):
        super().__init__()
        self.e = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU())
        self.mu = nn.Linear(32 * 16, z)
        self.lv = nn.Linear(32 * 16, z)
        self.f = nn.Linear(z, 32 * 16)
        self.d = nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def forward(self, x):
        h = self.e(x).view(x.size(0), -1)
        mu, lv = self.mu(h), self.lv(h)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.d(F.relu(self.f(z)).view(-1, 32, 4, 4)), mu, lv


class Glow(nn.Module):
    """A step of Glow: an invertible convolution and a coupling layer."""

    def __init__(self, c=8):
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.b = nn.Parameter(torch.zeros(1, c, 1, 1))
        self.w = nn.Parameter(torch.linalg.qr(torch.randn(c, c))[0])
        self.n = nn.Sequential(
            nn.Conv2d(c // 2, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 1),
            nn.ReLU(),
            nn.Conv2d(24, c, 3, padding=1),
        )

    def forward(self, x):
        x = F.pixel_unshuffle(x, 2)
        x = (x + self.b) * self.logs.exp()
        ld = self.logs.sum() + torch.slogdet(self.w)[1]
        x = F.conv2d(x, self.w.view(*self.w.shape, 1, 1))
        a, b = x.chunk(2, 1)
        sh, sc = self.n(a).chunk(2, 1)
        sc = torch.sigmoid(sc + 2)
        return torch.cat([a, (b + sh) * sc], 1), ld + sc.log().flatten(1).sum(1)


class FeaturePyramid(nn.Module):
    """A feature pyramid with one head for all levels."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.c3 = _block(3, 16, 3, 2), _block(16, 24, 3, 2), _block(24, 32, 3, 2)
        self.l = nn.ModuleList([nn.Conv2d(c, 16, 1) for c in (16, 24, 32)])
        self.cls = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3 * 4, 3, padding=1))

    def forward(self, x):
        a = self.c1(x)
        b = self.c2(a)
        c = self.c3(b)
        p = [self.l[2](c)]
        p.insert(0, self.l[1](b) + F.interpolate(p[0], size=b.shape[-2:], mode="nearest"))
        p.insert(0, self.l[0](a) + F.interpolate(p[0], size=a.shape[-2:], mode="nearest"))
        out = []
        for f in p:
            y = self.cls(f)
            n, _, h, w = y.shape
            out.append(y.view(n, -1, 4, h, w).permute(0, 3, 4, 1, 2).reshape(n, -1, 4))
        return torch.cat(out, 1)


class DETR(nn.Module):
    """Detection by queries."""

    def __init__(self, d=32):
        super().__init__()
        self.b = nn.Sequential(_block(3, 24, 3, 2), nn.Conv2d(24, d, 1))
        self.t = nn.Transformer(d, 4, 1, 1, 48)
        self.q = nn.Parameter(torch.rand(5, d))
        self.r = nn.Parameter(torch.rand(10, d // 2))
        self.c = nn.Parameter(torch.rand(10, d // 2))
        self.lc = nn.Linear(d, 4)
        self.lb = nn.Linear(d, 4)

    def forward(self, x):
        h = self.b(x)
        H, V = h.shape[-2:]
        pos = (
            torch.cat([self.c[:V].unsqueeze(0).repeat(H, 1, 1), self.r[:H].unsqueeze(1).repeat(1, V, 1)], -1)
            .flatten(0, 1)
            .unsqueeze(1)
        )
        h = self.t(pos + 0.1 * h.flatten(2).permute(2, 0, 1), self.q.unsqueeze(1).repeat(1, h.size(0), 1)).transpose(
            0, 1
        )
        return {"l": self.lc(h), "b": self.lb(h).sigmoid()}


class NetVLAD(nn.Module):
    """Differences from cluster centres."""

    def __init__(self, k=6, d=16):
        super().__init__()
        self.f = _block(3, d)
        self.c = nn.Conv2d(d, k, 1)
        self.cen = nn.Parameter(torch.randn(k, d))
        self.o = nn.Linear(k * d, 5)

    def forward(self, x):
        x = F.normalize(self.f(x), dim=1)
        n, c = x.shape[:2]
        a = F.softmax(self.c(x).view(n, self.cen.size(0), -1), 1)
        xf = x.view(n, c, -1)
        r = xf.expand(self.cen.size(0), -1, -1, -1).permute(1, 0, 2, 3) - self.cen.expand(xf.size(-1), -1, -1).permute(
            1, 2, 0
        ).unsqueeze(0)
        v = (r * a.unsqueeze(2)).sum(-1)
        return self.o(F.normalize(v, dim=2).view(n, -1))


class Triplet(nn.Module):
    """Distances of normalised embeddings."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(_block(1, 16), nn.MaxPool2d(2), _block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(32, 24)

    def one(self, x):
        return F.normalize(self.fc(self.cnn(x)), p=2, dim=1)

    def forward(self, a, p, n):
        a, p, n = self.one(a), self.one(p), self.one(n)
        return F.pairwise_distance(a, p), F.pairwise_distance(a, n)


class Prototypes(nn.Module):
    """Distances to the mean of a few examples, by cdist."""

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(_block(1, 16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 24))

    def forward(self, sup, q):
        z = self.f(sup.flatten(0, 1)).view(*sup.shape[:2], -1).mean(1)
        return -(torch.cdist(self.f(q), z) ** 2)


class ChannelConvolution(nn.Module):
    """ECA-Net: a convolution over the channels themselves, which fixes their order."""

    def __init__(self):
        super().__init__()
        self.a = _block(3, 24)
        self.c = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.b = _block(24, 32)
        self.o = nn.Linear(32, 5)

    def forward(self, x):
        x = self.a(x)
        y = F.adaptive_avg_pool2d(x, 1)
        y = self.c(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return self.o(self.b(x * y.sigmoid().expand_as(x)).mean((2, 3)))


SEGMENTATION = {
    "unet-plus-plus": Case(UNetPlusPlus, numbers(2, 1, 16, 16)),
    "dilated-pyramid": Case(Pyramid, numbers(2, 3, 24, 24)),
}
MODELS = {
    "denoising-unet": Case(Denoising, lambda: (torch.randn(2, 3, 8, 8), torch.tensor([3, 70]))),
    "super-resolution": Case(SuperResolution, numbers(2, 3, 8, 8)),
    "shuffled-channels": Case(Shuffled, numbers(2, 3, 8, 8)),
    "mixed-kernels": Case(MixedKernels, numbers(2, 3, 8, 8)),
    "conditional-generator": Case(ConditionalGenerator, lambda: (torch.randn(2, 10), torch.tensor([0, 3]))),
    "film": Case(FiLM, lambda: (torch.randn(2, 3, 8, 8), torch.randint(0, 20, (2, 5)))),
    "vae-literal-view": Case(ConvVAE, numbers(2, 1, 16, 16)),
    "glow": Case(Glow, numbers(2, 2, 8, 8)),
    "feature-pyramid": Case(FeaturePyramid, numbers(2, 3, 32, 32)),
    "detr": Case(DETR, numbers(2, 3, 12, 12)),
    "netvlad": Case(NetVLAD, numbers(2, 3, 8, 8)),
    "triplet": Case(Triplet, lambda: tuple(torch.randn(3, 2, 1, 8, 8))),
    "prototypes": Case(Prototypes, lambda: (torch.randn(3, 2, 1, 6, 6), torch.randn(4, 1, 6, 6))),
    "channel-convolution": Case(ChannelConvolution, numbers(2, 3, 8, 8)),
}
