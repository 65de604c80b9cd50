"""Ways of writing a forward that are hard to cut, one each."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from submodels.gallery.case import Case, numbers, words


class Femnist(nn.Module):
    """LEAF's network for FEMNIST: a flat size typed into a view."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.fc1, self.fc2 = nn.Linear(7 * 7 * 64, 512), nn.Linear(512, 62)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.view(-1, 7 * 7 * 64))))


class LeNet(nn.Module):
    """PyTorch's tutorial network."""

    def __init__(self):
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.reshape(-1, 16 * 5 * 5))))))


class Shortcut(nn.Module):
    """A shortcut where shapes agree."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 23), nn.Linear(23, 5)])

    def forward(self, x):
        for layer in self.layers:
            y = layer(x).tanh()
            x = y + x if y.shape == x.shape else y
        return x


class Tasks(nn.Module):
    """A trunk and a head for every task."""

    def __init__(self):
        super().__init__()
        self.trunk, self.heads = nn.Linear(12, 32), nn.ModuleDict({"a": nn.Linear(32, 3), "b": nn.Linear(32, 5)})

    def forward(self, x, task="a"):
        return self.heads[task](F.relu(self.trunk(x)))


class Siamese(nn.Module):
    """The distance of two inputs."""

    def __init__(self):
        super().__init__()
        self.f, self.out = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 24)), nn.Linear(24, 1)

    def forward(self, a, b):
        a, b = self.f(a), self.f(b)
        return torch.sigmoid(self.out(torch.abs(a - b))), F.cosine_similarity(a, b)


class VAE(nn.Module):
    """pytorch/examples: it samples, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(20, 40), nn.Linear(40, 16), nn.Linear(40, 16)
        self.fc3, self.fc4 = nn.Linear(16, 40), nn.Linear(40, 20)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 20)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


class VQVAE(nn.Module):
    """Nearest neighbours in a code book, with its losses inside the forward."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 16, 1))
        self.codes = nn.Embedding(20, 16)
        self.decoder = nn.Sequential(nn.Conv2d(16, 32, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        codes = self.codes.weight
        distance = flat.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * flat @ codes.t()
        q = self.codes(distance.argmin(1)).view(z.shape)
        loss = F.mse_loss(q.detach(), z) + 0.25 * F.mse_loss(q, z.detach())
        return self.decoder((z + (q - z).detach()).permute(0, 3, 1, 2)), loss


class FNO(nn.Module):
    """A Fourier neural operator: complex weights."""

    def __init__(self, width=16, modes=3):
        super().__init__()
        self.modes, self.lift, self.mix = modes, nn.Linear(3, width), nn.Conv2d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat))
        self.fc1, self.fc2 = nn.Linear(width, 32), nn.Linear(32, 1)

    def forward(self, x):
        x = self.lift(x).permute(0, 3, 1, 2)
        m, spectrum = self.modes, torch.fft.rfft2(x)
        out = torch.zeros(x.shape[0], x.shape[1], x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weight)
        x = F.gelu(torch.fft.irfft2(out, s=(x.size(-2), x.size(-1))) + self.mix(x))
        return self.fc2(F.gelu(self.fc1(x.permute(0, 2, 3, 1))))


class KANLinear(nn.Module):
    """A layer of splines on a grid that is a buffer."""

    def __init__(self, n_in, n_out, grid=4, order=2):
        super().__init__()
        self.order = order
        knots = (torch.arange(-order, grid + order + 1) * 2 / grid - 1).expand(n_in, -1).contiguous()
        self.register_buffer("grid", knots)
        self.base, self.spline = (
            nn.Parameter(torch.randn(n_out, n_in)),
            nn.Parameter(torch.randn(n_out, n_in, grid + order)),
        )

    def forward(self, x):
        y, grid = x.unsqueeze(-1), self.grid
        bases = ((y >= grid[:, :-1]) & (y < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (y - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
            bases = left + (grid[:, k + 1 :] - y) / (grid[:, k + 1 :] - grid[:, 1:-k]) * bases[:, :, 1:]
        return F.linear(F.silu(x), self.base) + torch.einsum("bik,oik->bo", bases, self.spline)


class DLRM(nn.Module):
    """Recommendation: bags of ids and numbers, and all their inner products."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 16))
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, ids):
        x = self.bottom(dense)
        rows = torch.stack([x, *(bag(ids[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, i, j]], 1))


class TextBag(nn.Module):
    """torchtext's classifier: all words in one row, and where each text begins."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mid, self.fc = nn.EmbeddingBag(50, 32), nn.Linear(32, 24), nn.Linear(24, 4)

    def forward(self, text, offsets):
        return self.fc(F.relu(self.mid(self.embedding(text, offsets))))


class Bilinear(nn.Module):
    """Two inputs through a bilinear form."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.form, self.out = (
            nn.Linear(6, 16),
            nn.Linear(7, 20),
            nn.Bilinear(16, 20, 24),
            nn.Linear(24, 3),
        )

    def forward(self, x, y):
        return self.out(F.relu(self.form(self.a(x), self.b(y))))


class DeepSets(nn.Module):
    """A sum over the members of a set, masked."""

    def __init__(self):
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 24)), nn.Linear(24, 2)

    def forward(self, x, mask):
        return self.rho((self.phi(x) * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(1, keepdim=True))


class Coupling(nn.Module):
    """A normalising flow: half of the numbers scale and shift the other half."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x):
        total = 0
        for net in self.nets:
            a, b = x.chunk(2, dim=1)
            s, t = net(a).chunk(2, dim=1)
            x, total = torch.cat([b * torch.exp(torch.tanh(s)) + t, a], dim=1), total + s.sum(1)
        return x, total


class Generator(nn.Module):
    """DCGAN's generator, its discriminator's weights normalised by their largest singular value."""

    def __init__(self, n=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(8, n * 2, 4),
            nn.BatchNorm2d(n * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(n * 2, n, 4, 2, 1),
            nn.BatchNorm2d(n),
            nn.ReLU(True),
            nn.ConvTranspose2d(n, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(nn.Conv2d(3, n, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(n, 1, 8))

    def forward(self, z):
        image = self.main(z.view(-1, 8, 1, 1))
        return image, self.critic(image).view(-1, 1).squeeze(1)


class Denoiser(nn.Module):
    """A diffusion model's network: sines of the time, scale and shift, and group norms."""

    def __init__(self, n=32):
        super().__init__()
        self.time, self.film = nn.Sequential(nn.Linear(16, n), nn.SiLU()), nn.Linear(n, 2 * n)
        self.inp, self.norm, self.mid, self.out = (
            nn.Conv2d(3, n, 3, padding=1),
            nn.GroupNorm(8, n),
            nn.Conv2d(n, n, 3, padding=1),
            nn.Conv2d(n, 3, 3, padding=1),
        )

    def forward(self, x, t):
        angle = t[:, None].float() * torch.exp(-torch.arange(8) / 2)
        scale, shift = self.film(self.time(torch.cat([angle.sin(), angle.cos()], -1)))[..., None, None].chunk(2, 1)
        h = self.inp(x)
        return self.out(h + self.mid(F.silu(self.norm(h) * (1 + scale) + shift)))


class CBAM(nn.Module):
    """Attention by the mean and the maximum over channels: a maximum takes a missing channel for something else."""

    def __init__(self):
        super().__init__()
        self.conv, self.mlp = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16)),
        )
        self.spatial, self.fc = nn.Conv2d(2, 1, 7, padding=3), nn.Linear(16, 5)

    def forward(self, x):
        x = self.conv(x)
        x = x * torch.sigmoid(self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))[..., None, None]
        pooled = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return self.fc((x * torch.sigmoid(self.spatial(pooled))).mean((2, 3)))


class Dueling(nn.Module):
    """Q-learning: a value and advantages, less their mean."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU())
        self.value, self.advantage = (
            nn.Sequential(nn.Linear(32 * 3 * 3, 64), nn.ReLU(), nn.Linear(64, n)) for n in (1, 6)
        )

    def forward(self, x):
        x = self.conv(x / 255.0).view(x.size(0), -1)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(dim=1, keepdim=True)


class Residual(nn.Module):
    """The ResNet of FL papers: a group norm of two groups, and squeeze without a dimension."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1, self.conv2, self.norm2 = (
            nn.Conv2d(3, 32, 3, padding=1),
            nn.GroupNorm(2, 32),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.GroupNorm(2, 32),
        )
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(x + self.norm2(self.conv2(x)))
        return self.fc(self.pool(x).squeeze())


MODELS = {
    "femnist-literal-view": Case(Femnist, numbers(2, 1, 28, 28)),
    "lenet-literal-view": Case(LeNet, numbers(2, 3, 32, 32)),
    "shortcut-where-shapes-agree": Case(Shortcut, numbers(4, 12)),
    "tasks": Case(Tasks, numbers(4, 12), {"examples": [{"x": torch.zeros(4, 12), "task": "b"}]}),
    "siamese": Case(Siamese, lambda: (torch.randn(4, 12), torch.randn(4, 12))),
    "vae": Case(VAE, numbers(4, 20)),
    "vq-vae": Case(VQVAE, numbers(2, 3, 8, 8)),
    "fno": Case(FNO, numbers(2, 8, 8, 3)),
    "kan": Case(lambda: nn.Sequential(KANLinear(6, 16), KANLinear(16, 3)), numbers(4, 6)),
    "dlrm": Case(DLRM, lambda: (torch.randn(4, 5), torch.randint(0, 30, (4, 3, 2)))),
    "text-bag": Case(TextBag, lambda: (torch.randint(0, 50, (20,)), torch.tensor([0, 4, 9, 15]))),
    "bilinear": Case(Bilinear, lambda: (torch.randn(4, 6), torch.randn(4, 7))),
    "deep-sets": Case(
        DeepSets, lambda: (torch.randn(3, 5, 6), torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2, [1.0] * 5]))
    ),
    "flow": Case(Coupling, numbers(4, 8)),
    "dcgan": Case(Generator, numbers(2, 8)),
    "denoiser": Case(Denoiser, lambda: (torch.randn(2, 3, 8, 8), torch.tensor([3, 7]))),
    "cbam": Case(CBAM, numbers(2, 3, 8, 8)),
    "dueling": Case(Dueling, numbers(2, 4, 36, 36)),
    "group-norm-of-two": Case(Residual, numbers(2, 3, 8, 8)),
    "spectral-norm": Case(
        lambda: nn.Sequential(spectral_norm(nn.Linear(12, 32)), nn.ReLU(), nn.Linear(32, 3)), numbers(4, 12)
    ),
    "weight-norm": Case(
        lambda: nn.Sequential(weight_norm(nn.Linear(12, 32)), nn.ReLU(), nn.Linear(32, 3)), numbers(4, 12)
    ),
    "text-cnn": Case(lambda: TextCNN(), words(3, 12)),
}


class TextCNN(nn.Module):
    """Kim's network: filters of three widths over words, and the maximum over time."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.convs = nn.ModuleList(nn.Conv2d(1, 16, (k, 24)) for k in (3, 4, 5))
        self.fc = nn.Linear(48, 2)

    def forward(self, x):
        x = self.embed(x).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        return self.fc(torch.cat([F.max_pool1d(i, i.size(2)).squeeze(2) for i in x], 1))
