"""Audio models."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from submodels.gallery.case import Case, numbers


class M5(nn.Module):
    """Convolutions on raw audio, as in PyTorch's tutorial on speech commands."""

    def __init__(self, n=32):
        super().__init__()
        self.conv1, self.bn1, self.pool1 = nn.Conv1d(1, n, 20, stride=4), nn.BatchNorm1d(n), nn.MaxPool1d(4)
        self.conv2, self.bn2, self.pool2 = nn.Conv1d(n, n, 3), nn.BatchNorm1d(n), nn.MaxPool1d(2)
        self.conv3, self.bn3, self.fc1 = nn.Conv1d(n, 2 * n, 3), nn.BatchNorm1d(2 * n), nn.Linear(2 * n, 10)

    def forward(self, x):
        x = self.pool1(F.relu(self.bn1(self.conv1(x))))
        x = self.pool2(F.relu(self.bn2(self.conv2(x))))
        x = F.relu(self.bn3(self.conv3(x)))
        x = F.avg_pool1d(x, x.shape[-1]).permute(0, 2, 1)
        return F.log_softmax(self.fc1(x), dim=2)


class TemporalBlock(nn.Module):
    """A dilated causal convolution with normalised weights and a shortcut (TCN)."""

    def __init__(self, n_in, n_out, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(n_in, n_out, 3, padding=self.pad, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_out, n_out, 3, padding=self.pad, dilation=dilation))
        self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else None

    def forward(self, x):
        y = F.relu(self.conv1(x)[:, :, : -self.pad].contiguous())
        y = F.relu(self.conv2(y)[:, :, : -self.pad].contiguous())
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    """A temporal convolutional network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(TemporalBlock(4, 24, 1), TemporalBlock(24, 24, 2), TemporalBlock(24, 32, 4))
        self.linear = nn.Linear(32, 10)

    def forward(self, x):
        return self.linear(self.net(x)[:, :, -1])


class WaveNet(nn.Module):
    """Gated dilated convolutions with skip connections."""

    def __init__(self):
        super().__init__()
        self.start, self.end1, self.end2 = nn.Conv1d(1, 16, 1), nn.Conv1d(24, 32, 1), nn.Conv1d(32, 10, 1)
        self.gated = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i, padding=2**i) for i in range(3))
        self.residual = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(16, 24, 1) for _ in range(3))

    def forward(self, x):
        x, skips = self.start(x), 0
        for gated, residual, skip in zip(self.gated, self.residual, self.skip, strict=True):
            a, b = gated(x)[..., : x.shape[-1]].chunk(2, dim=1)
            y = torch.tanh(a) * torch.sigmoid(b)
            skips, x = skips + skip(y), x + residual(y)
        return self.end2(F.relu(self.end1(F.relu(skips))))


class ConvTasNet(nn.Module):
    """Separation of two voices: masks on a learned representation, normalised over everything."""

    def __init__(self, n=32, b=16):
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, n, 8, 4, bias=False), nn.ConvTranspose1d(n, 1, 8, 4, bias=False)
        self.norm, self.bottleneck = nn.GroupNorm(1, n), nn.Conv1d(n, b, 1)
        self.block = nn.Sequential(
            nn.Conv1d(b, n, 1),
            nn.PReLU(),
            nn.GroupNorm(1, n),
            nn.Conv1d(n, n, 3, padding=1, groups=n),
            nn.PReLU(),
            nn.Conv1d(n, b, 1),
        )
        self.mask = nn.Conv1d(b, 2 * n, 1)

    def forward(self, x):
        e = F.relu(self.encoder(x))
        y = self.bottleneck(self.norm(e))
        m = torch.sigmoid(self.mask(y + self.block(y)))
        m = m.view(m.shape[0], 2, -1, m.shape[-1])
        voices = m * e.unsqueeze(1)
        return self.decoder(voices.flatten(0, 1)).view(x.shape[0], 2, -1)


class KeywordSpotter(nn.Module):
    """A depthwise-separable network on a spectrogram."""

    def __init__(self, c=24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, c, (10, 4), 2, (5, 1), bias=False), nn.BatchNorm2d(c), nn.ReLU())
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(c, c, 3, padding=1, groups=c),
                    nn.BatchNorm2d(c),
                    nn.ReLU(),
                    nn.Conv2d(c, c, 1),
                    nn.BatchNorm2d(c),
                    nn.ReLU(),
                )
                for _ in range(2)
            )
        )
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(c, 12)

    def forward(self, x):
        return self.fc(self.pool(self.blocks(self.stem(x))).squeeze())


class CRNN(nn.Module):
    """Convolutions over time and frequency, then a GRU over time."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d((1, 4)),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d((1, 4)),
        )
        self.gru, self.fc = nn.GRU(24 * 2, 32, batch_first=True, bidirectional=True), nn.Linear(64, 5)

    def forward(self, x):
        x = self.conv(x)
        return self.fc(self.gru(x.permute(0, 2, 1, 3).flatten(2))[0])


class Vocoder(nn.Module):
    """HiFi-GAN's generator, small: transposed convolutions and residual blocks with normalised weights."""

    def __init__(self):
        super().__init__()
        self.pre, self.post = weight_norm(nn.Conv1d(20, 32, 7, padding=3)), weight_norm(nn.Conv1d(8, 1, 7, padding=3))
        self.ups = nn.ModuleList(
            [weight_norm(nn.ConvTranspose1d(32, 16, 4, 2, 1)), weight_norm(nn.ConvTranspose1d(16, 8, 4, 2, 1))]
        )
        self.blocks = nn.ModuleList(weight_norm(nn.Conv1d(c, c, 3, padding=1)) for c in (16, 16, 8, 8))

    def forward(self, x):
        x = self.pre(x)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(x + block(F.leaky_relu(x, 0.1)) for block in self.blocks[2 * i : 2 * i + 2]) / 2
        return torch.tanh(self.post(F.leaky_relu(x)))


class Spectrogram(nn.Module):
    """Classifies the magnitudes of a short-time Fourier transform."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.conv, self.fc = (
            nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU()),
            nn.Linear(24, 4),
        )

    def forward(self, x):
        s = torch.stft(x, 32, window=self.window, return_complex=True).abs().log1p()
        return self.fc(self.conv(s[:, None]).mean((2, 3)))


MODELS = {
    "m5": Case(M5, numbers(2, 1, 800)),
    "tcn-weight-norm": Case(TCN, numbers(2, 4, 30)),
    "wavenet": Case(WaveNet, numbers(2, 1, 40)),
    "conv-tasnet": Case(ConvTasNet, numbers(2, 1, 64)),
    "keyword-spotter": Case(KeywordSpotter, numbers(2, 1, 40, 20)),
    "crnn": Case(CRNN, numbers(2, 1, 12, 32)),
    "vocoder-weight-norm": Case(Vocoder, numbers(2, 20, 12)),
    "spectrogram": Case(Spectrogram, numbers(2, 256)),
}
