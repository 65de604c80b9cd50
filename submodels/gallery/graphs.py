"""Graph networks: messages by index_add, scatter_add and scatter_reduce, and torch_geometric's own if installed."""

import importlib
import importlib.util

import torch
import torch.nn.functional as F
from torch import nn

from submodels.gallery.case import Case, numbers


def graph():
    """(features of six nodes, edges)."""
    return torch.randn(6, 12), torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2, 4], [1, 2, 3, 4, 5, 0, 3, 5, 1]])


class DenseGCN(nn.Module):
    """Convolution by a dense adjacency matrix."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, x, adjacency):
        adjacency = adjacency / adjacency.sum(1, keepdim=True)
        return F.log_softmax(self.w2(adjacency @ F.relu(self.w1(adjacency @ x))), dim=1)


class IndexGCN(nn.Module):
    """Messages added to their targets."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, x, edges):
        source, target = edges
        for layer in (self.a, self.b):
            h = layer(x)
            degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target))).clamp(min=1)
            x = torch.zeros_like(h).index_add_(0, target, h[source]) / degree[:, None]
            x = x.relu() if layer is self.a else x
        return x


class SAGE(nn.Module):
    """The mean of neighbours by scatter_reduce, beside the node itself."""

    def __init__(self):
        super().__init__()
        self.own, self.other, self.out = nn.Linear(12, 32), nn.Linear(12, 32, bias=False), nn.Linear(32, 4)

    def forward(self, x, edges):
        messages = x[edges[0]]
        index = edges[1].unsqueeze(-1).expand_as(messages)
        mean = torch.zeros_like(x).scatter_reduce(0, index, messages, "mean", include_self=False)
        return self.out(F.normalize(self.own(x) + self.other(mean), dim=-1).relu())


class GAT(nn.Module):
    """Attention over neighbours, with heads, by scatter_add."""

    def __init__(self, heads=4, dim=8):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.w, self.out = nn.Linear(12, heads * dim, bias=False), nn.Linear(heads * dim, 4)
        self.left, self.right = nn.Parameter(torch.randn(1, heads, dim)), nn.Parameter(torch.randn(1, heads, dim))

    def forward(self, x, edges):
        source, target = edges
        h = self.w(x).view(-1, self.heads, self.dim)
        score = (h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target]
        weight = F.leaky_relu(score, 0.2).exp()
        total = torch.zeros(len(x), self.heads).index_add_(0, target, weight)
        weight = weight / (total[target] + 1e-9)
        y = torch.zeros_like(h).index_add_(0, target, h[source] * weight.unsqueeze(-1))
        return self.out(F.elu(y.flatten(1)))


class GIN(nn.Module):
    """Sums of neighbours through a perceptron, and a sum over the nodes of every graph of a batch."""

    def __init__(self):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            for n in (12, 32)
        )
        self.fc = nn.Linear(32, 3)

    def forward(self, x, edges, batch):
        for mlp in self.mlps:
            index = edges[1].view(-1, 1).expand(-1, x.size(1))
            x = mlp((1 + self.eps) * x + torch.zeros_like(x).scatter_add_(0, index, x[edges[0]]))
        pooled = x.new_zeros(2, x.size(1)).index_add_(0, batch, x)
        return self.fc(pooled)


class EdgeConv(nn.Module):
    """A maximum over the neighbours' differences."""

    def __init__(self):
        super().__init__()
        self.mlp, self.out = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32)), nn.Linear(32, 4)

    def forward(self, x, edges):
        messages = self.mlp(torch.cat([x[edges[1]], x[edges[0]] - x[edges[1]]], -1))
        index = edges[1][:, None].expand(-1, messages.shape[1])
        pooled = messages.new_zeros(x.shape[0], messages.shape[1]).scatter_reduce(0, index, messages, "amax")
        return self.out(pooled)


class PointNet(nn.Module):
    """Points through shared layers, and the maximum over points."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv1d(3, 24, 1), nn.BatchNorm1d(24), nn.Conv1d(24, 48, 1)
        self.transform, self.head = nn.Linear(48, 9), nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5))

    def _features(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return torch.max(self.conv2(x), 2, keepdim=True)[0].view(-1, 48)

    def forward(self, x):
        rotation = self.transform(self._features(x)).view(-1, 3, 3) + torch.eye(3).view(1, 9).view(-1, 3, 3)
        return self.head(self._features(torch.bmm(rotation, x)))


def _geometric(name, **options):
    """One of torch_geometric's ready models."""
    return lambda: getattr(importlib.import_module("torch_geometric.nn"), name)(12, 32, 2, 4, **options)


MODELS = {
    "gcn-dense": Case(DenseGCN, lambda: (torch.randn(6, 12), torch.rand(6, 6))),
    "gcn-index-add": Case(IndexGCN, graph),
    "sage-scatter-reduce": Case(SAGE, graph),
    "gat-by-hand": Case(GAT, graph),
    "gin-batched": Case(GIN, lambda: (*graph(), torch.tensor([0, 0, 0, 1, 1, 1]))),
    "edge-conv": Case(EdgeConv, graph),
    "point-net": Case(PointNet, numbers(2, 3, 20)),
}
if importlib.util.find_spec("torch_geometric") is not None:
    MODELS |= {
        "pyg-gcn": Case(_geometric("GCN"), graph),
        "pyg-gat": Case(_geometric("GAT", heads=2), graph),
        "pyg-sage": Case(_geometric("GraphSAGE"), graph),
        "pyg-gin": Case(_geometric("GIN"), graph),
    }
