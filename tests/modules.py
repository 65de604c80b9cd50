"""Hand-written modules that users write: the odd idioms of the field, one each. Every one takes 3 x 16 x 16 images."""

import functools

import torch
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import Rearrange
from reference import slicing_loops as loops
from torch import Tensor, nn

from submodels import ScalableModel

IMAGE = (2, 3, 16, 16)


class ConvFlattenLinear(nn.Module):
    """The 2-layer CNN of the papers: convolutions, flatten, linear."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(24 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.view(x.size(0), -1))))


class EinopsAttention(nn.Module):
    """Attention written with einops and einsum, twice: the second layer must not inherit the sizes of the first."""

    def __init__(self, dim: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.embed = nn.Sequential(nn.Conv2d(3, dim, 4, 4), Rearrange("b c h w -> b (h w) c"))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = rearrange(qkv(x), "b n (t h d) -> t b h n d", t=3, h=self.heads)
            attention = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.3).softmax(-1)
            x = x + out(rearrange(torch.einsum("bhij,bhjd->bhid", attention, v), "b h n d -> b n (h d)"))
        return self.head(x.mean(1))


class ChunkedGLU(nn.Module):
    """A gated unit cut by chunk, a PReLU per channel, and layer scale."""

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 24, 4, 4), nn.PReLU(24)
        self.up, self.down = nn.Linear(24, 64), nn.Linear(32, 24)
        self.gamma = nn.Parameter(torch.ones(24))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x)).flatten(2).transpose(1, 2)
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.head((x + self.gamma * self.down(F.silu(gate) * value)).mean(1))


class LayerScale(nn.Module):
    """ConvNeXt's block: depthwise convolution, a norm over channels last, a (C, 1, 1) scale."""

    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 20, 4, 4), nn.Conv2d(20, 20, 3, padding=1, groups=20)
        self.norm, self.up, self.down = nn.LayerNorm(20), nn.Linear(20, 40), nn.Linear(40, 20)
        self.scale = nn.Parameter(torch.full((20, 1, 1), 0.5))
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return self.head((x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)).mean((2, 3)))


class TiedWeights(nn.Module):
    """One weight used as encoder and decoder, and one layer used three times."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(768, 24, bias=False)
        self.loop = nn.Linear(24, 24)
        self.decoder = nn.Linear(24, 768, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().T.clone())
        self.shared = self.loop
        self.head = nn.Linear(768, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x.flatten(1))
        for _ in range(2):
            h = h + torch.tanh(self.loop(h))
        h = self.shared(h)
        return self.head(torch.tanh(h @ self.encoder.weight) + self.decoder(h))


class MultiheadAttention(nn.Module):
    """nn.MultiheadAttention with a class token and learned positions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 4, 4)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 24)), nn.Parameter(torch.randn(1, 17, 24))
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head((x + self.attention(x, x, x, need_weights=False)[0])[:, 0])


class TransformerEncoder(nn.Module):
    """torch's own encoder, two layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
        self.stem = nn.Conv2d(3, 24, 4, 4)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


class GroupNorms(nn.Module):
    """Group norm, grouped, transposed and transposed grouped convolutions, pixel shuffle."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.grouped = nn.Conv2d(32, 64, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.up_grouped = nn.ConvTranspose2d(32, 48, 2, 2, groups=4)
        self.shuffle = nn.PixelShuffle(2)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(self.shuffle(self.up_grouped(F.relu(self.up(self.grouped(x))))).mean((2, 3)))


class StackedBranches(nn.Module):
    """Selective kernels: branches joined by stack, weighed by a softmax over the branches, and summed."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(16, 16, k, padding=k // 2) for k in (1, 3, 5))
        self.squeeze, self.choose = nn.Linear(16, 8), nn.Linear(8, 48)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        stacked = torch.stack([branch(x) for branch in self.branches], dim=1)
        weight = self.choose(F.relu(self.squeeze(stacked.sum(1).mean((2, 3)))))
        weight = weight.view(len(x), 3, -1, 1, 1).softmax(1)
        return self.head((stacked * weight).sum(1).mean((2, 3)))


class SplitByStoredSize(nn.Module):
    """A module that splits by sizes it stored, and slices by one."""

    def __init__(self):
        super().__init__()
        self.sizes, self.front = [8, 16], 8
        self.stem, self.mix = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        small, rest = torch.split(self.stem(x), self.sizes, dim=1)
        x = torch.cat([F.relu(self.mix(small)), self.last(rest)], dim=1)
        return self.head(torch.cat([x[:, : self.front].tanh(), x[:, self.front :]], dim=1).mean((2, 3)))


class DenselyConnected(nn.Module):
    """Concatenation of everything so far, with batch norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], dim=1)
        return self.head(x.mean((2, 3)))


class ChannelShuffle(nn.Module):
    """ShuffleNet's unit: half the channels pass, half are worked on, then they are interleaved."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, dim=1)
        x = torch.cat([left, F.relu(self.conv(right))], dim=1)
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM over four image rows; it checks the size of its input against the one it stored."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 24)
        self.rnn = nn.LSTM(24, 20, batch_first=True)
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x[:, :, ::4].permute(0, 2, 1, 3).flatten(2)))[0][:, -1])


class SqueezeExcite(nn.Module):
    """A bottleneck with batch norm, squeeze and excitation, and an identity shortcut."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv1, self.conv2 = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        y = F.relu(self.conv1(x))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return self.head((x + self.conv2(y)).mean((2, 3)))


class AuxiliaryHead(nn.Module):
    """GoogLeNet's way: an extra output, computed in training only."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.aux, self.head = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: Tensor):
        x = F.relu(self.stem(x))
        out = self.head(F.relu(self.conv(x)).mean((2, 3)))
        return (out, self.aux(x.mean((2, 3)))) if self.training else out


class TwoInputs(nn.Module):
    """Two inputs (one an index), a keyword, and a dictionary with a tuple in it as output."""

    def __init__(self):
        super().__init__()
        self.stem, self.embed = nn.Conv2d(3, 16, 3, padding=1), nn.Embedding(5, 16)
        self.head, self.other = nn.Linear(16, 10), nn.Linear(16, 3)

    def forward(self, x: Tensor, group: Tensor, *, gain: float = 1.0) -> dict:
        h = torch.relu(self.stem(x).mean((2, 3)) + gain * self.embed(group))
        return {"logits": self.head(h), "extra": (self.other(h),)}


class LiteralSplit(nn.Module):
    """A forward with numbers of channels typed in: cannot be cut before the split."""

    def __init__(self):
        super().__init__()
        self.conv, self.hidden, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16 * 16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(torch.cat(F.relu(self.conv(x)).split([3, 5], 1)[::-1], 1).flatten(1))))


class NothingToCut(nn.Module):
    """Logistic regression behind a literal split: input and output are all there is."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat(F.relu(self.conv(x)).split([3, 5], 1)[::-1], 1).flatten(1))


CUTTABLE = [
    ConvFlattenLinear,
    EinopsAttention,
    ChunkedGLU,
    LayerScale,
    TiedWeights,
    MultiheadAttention,
    TransformerEncoder,
    GroupNorms,
    StackedBranches,
    SplitByStoredSize,
    DenselyConnected,
    ChannelShuffle,
    Recurrent,
    SqueezeExcite,
    AuxiliaryHead,
]

# One module for each way a tensor is made of channels, for laws that do not depend on the module: a product (flatten),
# heads, tied weights, a concatenation with batch norms, and weights that a layer keeps in a list of its own.
VARIED = [ConvFlattenLinear, EinopsAttention, TiedWeights, DenselyConnected, Recurrent]


@functools.cache
def traced(build: type[nn.Module]) -> ScalableModel:
    """A model in float64, scalable, with random weights everywhere; tests leave it as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = loops.enliven(build().double())
    return ScalableModel(model, torch.zeros(IMAGE, dtype=torch.float64))
