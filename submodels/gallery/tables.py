"""Tables, recommendations, molecules and points."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from submodels.gallery.case import Case, numbers


class DynamicEdges(nn.Module):
    """Edges to nearest neighbours in feature space."""

    def __init__(self):
        super().__init__()
        self.c1 = nn.Sequential(nn.Conv2d(6, 16, 1), nn.LeakyReLU(0.2))
        self.c2 = nn.Sequential(nn.Conv2d(32, 24, 1), nn.LeakyReLU(0.2))
        self.o = nn.Linear(80, 5)

    def feat(self, x, k=3):
        b, c, n = x.shape
        d = -(x.transpose(2, 1) ** 2).sum(-1, keepdim=True) - (x**2).sum(1, keepdim=True) + 2 * x.transpose(2, 1) @ x
        idx = d.topk(k, -1)[1]
        idx = (idx + torch.arange(b).view(-1, 1, 1) * n).view(-1)
        xt = x.transpose(2, 1).contiguous()
        f = xt.view(b * n, -1)[idx].view(b, n, k, c)
        xt = xt.view(b, n, 1, c).repeat(1, 1, k, 1)
        return torch.cat((f - xt, xt), 3).permute(0, 3, 1, 2).contiguous()

    def forward(self, x):
        a = self.c1(self.feat(x)).max(-1)[0]
        b = self.c2(self.feat(a)).max(-1)[0]
        y = torch.cat((a, b), 1)
        return self.o(torch.cat((F.adaptive_max_pool1d(y, 1).squeeze(-1), F.adaptive_avg_pool1d(y, 1).squeeze(-1)), 1))


class EdgeNetworks(nn.Module):
    """Messages by a matrix for every edge, and a GRU."""

    def __init__(self, d=16):
        super().__init__()
        self.d = d
        self.i = nn.Linear(6, d)
        self.en = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, d * d))
        self.g = nn.GRUCell(d, d)
        self.o = nn.Linear(d, 2)

    def forward(self, x, ei, ea):
        h = F.relu(self.i(x))
        w = self.en(ea).view(-1, self.d, self.d)
        for _ in range(2):
            m = torch.bmm(h[ei[0]].unsqueeze(1), w).squeeze(1)
            m = torch.zeros_like(h).index_add_(0, ei[1], m)
            h = self.g(F.relu(m), h)
        return self.o(h.sum(0))


class SchNet(nn.Module):
    """Continuous filters over distances."""

    def __init__(self, d=24, g=10):
        super().__init__()
        self.e = nn.Embedding(20, d)
        self.register_buffer("mu", torch.linspace(0, 5, g))
        self.f = nn.Sequential(nn.Linear(g, d), nn.Softplus(), nn.Linear(d, d))
        self.l1 = nn.Linear(d, d, bias=False)
        self.l2 = nn.Linear(d, d)
        self.o = nn.Sequential(nn.Linear(d, 12), nn.Softplus(), nn.Linear(12, 1))

    def forward(self, z, pos, ei):
        h = self.e(z)
        dist = (pos[ei[0]] - pos[ei[1]]).norm(dim=-1)
        w = self.f(torch.exp(-10 * (dist.unsqueeze(-1) - self.mu) ** 2)) * (
            0.5 * (torch.cos(dist * math.pi / 5) + 1)
        ).view(-1, 1)
        m = self.l1(h)[ei[0]] * w
        a = torch.zeros_like(h).scatter_add(0, ei[1][:, None].expand(-1, m.size(1)), m)
        return self.o(h + self.l2(a)).sum()


class PointSegmentation(nn.Module):
    """PointNet for parts: a global feature beside every point's."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(3, 24, 1)
        self.b = nn.Conv1d(24, 48, 1)
        self.c = nn.Conv1d(72, 32, 1)
        self.o = nn.Conv1d(32, 4, 1)

    def forward(self, x):
        n = x.size(2)
        l = F.relu(self.a(x))
        g = torch.max(F.relu(self.b(l)), 2, keepdim=True)[0]
        g = g.view(-1, 48, 1).repeat(1, 1, n)
        return self.o(F.relu(self.c(torch.cat([g, l], 1)))).transpose(2, 1).contiguous()


class Hypernetwork(nn.Module):
    """Weights that another network writes."""

    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.w1 = nn.Linear(32, 10 * 16)
        self.b1 = nn.Linear(32, 16)
        self.w2 = nn.Linear(32, 16 * 3)

    def forward(self, x, t):
        h = self.h(t)
        x = torch.relu(torch.bmm(x.unsqueeze(1), self.w1(h).view(-1, 10, 16)).squeeze(1) + self.b1(h))
        return torch.bmm(x.unsqueeze(1), self.w2(h).view(-1, 16, 3)).squeeze(1)


class Skipgram(nn.Module):
    """word2vec with negative samples and sparse embeddings."""

    def __init__(self):
        super().__init__()
        self.u = nn.Embedding(40, 16, sparse=True)
        self.v = nn.Embedding(40, 16, sparse=True)

    def forward(self, c, p, n):
        u, v, w = self.u(c), self.v(p), self.v(n)
        return F.logsigmoid((u * v).sum(1)) + F.logsigmoid(-torch.bmm(w, u.unsqueeze(2)).squeeze(2)).sum(1)


class DeepFM(nn.Module):
    """Factorisation machine and network on one table."""

    def __init__(self, f=4, k=8):
        super().__init__()
        self.e = nn.Embedding(100, k)
        self.lstm = nn.Embedding(100, 1)
        self.m = nn.Sequential(nn.Linear(f * k, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.f, self.k = f, k
        self.register_buffer("off", torch.tensor([0, 25, 50, 75]))

    def forward(self, x):
        x = x + self.off
        e = self.e(x)
        fm = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.lstm(x).sum(1) + fm + self.m(e.view(-1, self.f * self.k)))


class TabNet(nn.Module):
    """Features chosen by attention, step by step."""

    def __init__(self, d=12, nd=8):
        super().__init__()
        self.bn = nn.BatchNorm1d(d)
        self.sh = nn.Linear(d, 2 * (nd + nd))
        self.f = nn.ModuleList([nn.Linear(2 * nd, 4 * nd) for _ in range(2)])
        self.at = nn.ModuleList([nn.Linear(nd, d) for _ in range(2)])
        self.o = nn.Linear(nd, 3)
        self.nd = nd

    def forward(self, x):
        x = self.bn(x)
        pr = torch.ones_like(x)
        a = F.glu(self.sh(x))[:, self.nd :]
        out = 0
        for f, at in zip(self.f, self.at):
            m = F.softmax(at(a) * pr, -1)
            pr = pr * (1.3 - m)
            h = F.glu(self.sh(m * x))
            h = (h + F.glu(f(h))) * math.sqrt(0.5)
            out = out + F.relu(h[:, : self.nd])
            a = h[:, self.nd :]
        return self.o(out)


class FeatureTokens(nn.Module):
    """A transformer over the columns of a table."""

    def __init__(self, n=5, d=24):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n, d))
        self.b = nn.Parameter(torch.randn(n, d))
        self.cat = nn.ModuleList([nn.Embedding(k, d) for k in (3, 5)])
        self.cls = nn.Parameter(torch.randn(d))
        self.enc = nn.TransformerEncoderLayer(d, 4, 32, batch_first=True)
        self.o = nn.Linear(d, 2)

    def forward(self, x, c):
        t = x.unsqueeze(-1) * self.w + self.b
        k = torch.stack([e(c[:, i]) for i, e in enumerate(self.cat)], 1)
        return self.o(self.enc(torch.cat([self.cls.expand(len(x), 1, -1), t, k], 1))[:, 0])


class GRN(nn.Module):
    """A gated residual network."""

    def __init__(self, n_in, d):
        super().__init__()
        self.a, self.b, self.g, self.n = nn.Linear(n_in, d), nn.Linear(d, d), nn.Linear(d, 2 * d), nn.LayerNorm(d)
        self.skip = nn.Linear(n_in, d) if n_in != d else nn.Identity()

    def forward(self, x):
        return self.n(self.skip(x) + F.glu(self.g(self.b(F.elu(self.a(x))))))


class TemporalFusion(nn.Module):
    """Gated residual networks, variable selection, an LSTM and attention."""

    def __init__(self, d=16, v=4):
        super().__init__()
        self.e = nn.ModuleList([nn.Linear(1, d) for _ in range(v)])
        self.vs = GRN(v * d, d)
        self.w = nn.Linear(d, v)
        self.vg = nn.ModuleList([GRN(d, d) for _ in range(v)])
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.a = nn.MultiheadAttention(d, 2, batch_first=True)
        self.g = GRN(d, d)
        self.o = nn.Linear(d, 3)

    def forward(self, x):
        e = [m(x[..., i : i + 1]) for i, m in enumerate(self.e)]
        w = self.w(self.vs(torch.cat(e, -1))).softmax(-1).unsqueeze(-2)
        z = (torch.stack([g(k) for g, k in zip(self.vg, e)], -1) * w).sum(-1)
        h, _ = self.lstm(z)
        h = h + z
        return self.o(self.g(h + self.a(h, h, h)[0]))[:, -1]


class CrossNetwork(nn.Module):
    """Inputs multiplied with their own layers, which keeps those whole."""

    def __init__(self, d=20):
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(d, d) for _ in range(2)])
        self.m = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 16))
        self.o = nn.Linear(d + 16, 1)

    def forward(self, x0):
        x = x0
        for w in self.w:
            x = x0 * w(x) + x
        return self.o(torch.cat([x, self.m(x0)], 1))


class DecisionTransformer(nn.Module):
    """Returns, states and actions as one sequence."""

    def __init__(self, d=32):
        super().__init__()
        self.r, self.st, self.ac, self.t = nn.Linear(1, d), nn.Linear(5, d), nn.Linear(2, d), nn.Embedding(20, d)
        self.n = nn.LayerNorm(d)
        self.b = nn.TransformerEncoderLayer(d, 4, 64, batch_first=True)
        self.o = nn.Linear(d, 2)
        self.h = d

    def forward(self, r, x, a, t):
        b, T = x.shape[:2]
        e = self.t(t)
        z = (
            torch.stack((self.r(r) + e, self.st(x) + e, self.ac(a) + e), 1)
            .permute(0, 2, 1, 3)
            .reshape(b, 3 * T, self.h)
        )
        z = self.b(self.n(z)).reshape(b, T, 3, self.h).permute(0, 2, 1, 3)
        return self.o(z[:, 1])


def _ring():
    return torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])


GRAPHS = {
    "dynamic-edges": Case(DynamicEdges, numbers(2, 3, 12)),
    "edge-networks": Case(EdgeNetworks, lambda: (torch.randn(6, 6), _ring(), torch.randn(6, 4))),
    "schnet": Case(SchNet, lambda: (torch.randint(0, 20, (6,)), torch.randn(6, 3), _ring())),
    "point-segmentation": Case(PointSegmentation, numbers(2, 3, 20)),
}
MODELS = {
    "hypernetwork": Case(Hypernetwork, lambda: (torch.randn(4, 10), torch.randn(4, 6))),
    "skipgram-sparse": Case(
        Skipgram, lambda: (torch.randint(0, 40, (4,)), torch.randint(0, 40, (4,)), torch.randint(0, 40, (4, 5)))
    ),
    "deep-fm": Case(DeepFM, lambda: torch.randint(0, 25, (4, 4))),
    "tabnet": Case(TabNet, numbers(4, 12)),
    "feature-tokens": Case(FeatureTokens, lambda: (torch.randn(4, 5), torch.randint(0, 3, (4, 2)))),
    "temporal-fusion": Case(TemporalFusion, numbers(3, 6, 4)),
    "decision": Case(
        DecisionTransformer,
        lambda: (torch.randn(2, 4, 1), torch.randn(2, 4, 5), torch.randn(2, 4, 2), torch.randint(0, 20, (2, 4))),
    ),
    "cross-network": Case(CrossNetwork, numbers(4, 20)),
}
