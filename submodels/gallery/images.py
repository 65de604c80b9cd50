"""Segmentation and video."""

import torch
import torch.nn.functional as F
from torch import nn

from submodels.gallery.case import Case, numbers


def _double(n_in, n_out, norm=nn.BatchNorm2d, conv=nn.Conv2d):
    return nn.Sequential(
        conv(n_in, n_out, 3, padding=1, bias=False),
        norm(n_out),
        nn.ReLU(inplace=True),
        conv(n_out, n_out, 3, padding=1, bias=False),
        norm(n_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """milesial's U-Net, two levels deep."""

    def __init__(self, bilinear=False, norm=nn.BatchNorm2d):
        super().__init__()
        self.inc, self.down1, self.down2 = _double(3, 16, norm), _double(16, 32, norm), _double(32, 64, norm)
        up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.up1 = up if bilinear else nn.ConvTranspose2d(64, 32, 2, 2)
        self.up2 = up if bilinear else nn.ConvTranspose2d(32, 16, 2, 2)
        self.conv1, self.conv2 = _double(96 if bilinear else 64, 32, norm), _double(48 if bilinear else 32, 16, norm)
        self.outc = nn.Conv2d(16, 2, 1)

    @staticmethod
    def _joined(x, skip):
        dy, dx = skip.size()[2] - x.size()[2], skip.size()[3] - x.size()[3]
        return torch.cat([skip, F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])], dim=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x = self.conv1(self._joined(self.up1(self.down2(F.max_pool2d(x2, 2))), x2))
        return self.outc(self.conv2(self._joined(self.up2(x), x1)))


class AttentionGate(nn.Module):
    """The gate of an attention U-Net."""

    def __init__(self, n, inner):
        super().__init__()
        self.g, self.x, self.psi = nn.Conv2d(n, inner, 1), nn.Conv2d(n, inner, 1), nn.Conv2d(inner, 1, 1)

    def forward(self, g, x):
        return x * torch.sigmoid(self.psi(F.relu(self.g(g) + self.x(x))))


class AttentionUNet(UNet):
    """A U-Net whose skip connections are gated."""

    def __init__(self):
        super().__init__()
        self.gate1, self.gate2 = AttentionGate(32, 16), AttentionGate(16, 8)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x = self.up1(self.down2(F.max_pool2d(x2, 2)))
        x = self.conv1(torch.cat([self.gate1(x, x2), x], 1))
        x = self.up2(x)
        return self.outc(self.conv2(torch.cat([self.gate2(x, x1), x], 1)))


class UNet3d(nn.Module):
    """A volume in, a mask out; residual blocks and instance norms."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            _double(i, o, nn.InstanceNorm3d, nn.Conv3d) for i, o in ((1, 8), (8, 16), (16 + 8, 8))
        )
        self.shortcut, self.out = nn.Conv3d(1, 8, 1), nn.Conv3d(8, 3, 1)

    def forward(self, x):
        a = self.a(x) + self.shortcut(x)
        b = F.interpolate(self.b(F.max_pool3d(a, 2)), scale_factor=2, mode="trilinear")
        return self.out(self.c(torch.cat([a, b], 1)))


class SegNet(nn.Module):
    """An encoder whose maxima remember where they were, and a decoder that puts them back."""

    def __init__(self):
        super().__init__()
        self.enc1, self.enc2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.dec2, self.dec1, self.out = (
            nn.Conv2d(32, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Conv2d(16, 4, 1),
        )

    def forward(self, x):
        x, first = F.max_pool2d(F.relu(self.enc1(x)), 2, return_indices=True)
        x, second = F.max_pool2d(F.relu(self.enc2(x)), 2, return_indices=True)
        x = F.relu(self.dec2(F.max_unpool2d(x, second, 2)))
        return self.out(F.relu(self.dec1(F.max_unpool2d(x, first, 2))))


class PyramidHead(nn.Module):
    """A feature pyramid, its levels summed, with a dice loss inside the forward."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.l1, self.l2, self.out = nn.Conv2d(16, 24, 1), nn.Conv2d(32, 24, 1), nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x, mask):
        c1 = F.relu(self.c1(x))
        p2 = self.l2(F.relu(self.c2(c1)))
        p1 = self.l1(c1) + F.interpolate(p2, size=c1.shape[-2:], mode="nearest")
        logits = F.interpolate(self.out(p1), size=x.shape[-2:], mode="bilinear", align_corners=False)
        y = logits.softmax(1)
        one_hot = F.one_hot(mask, 3).permute(0, 3, 1, 2).to(y)
        dice = 1 - (2 * (y * one_hot).sum((2, 3)) + 1) / (y.sum((2, 3)) + one_hot.sum((2, 3)) + 1)
        return logits, dice.mean()


def _vision(kind, name, **options):
    """One of torchvision's segmentation or video models, without weights."""

    def build():
        import torchvision

        return getattr(getattr(torchvision.models, kind), name)(weights=None, **options)

    return build


class FramesLSTM(nn.Module):
    """A small network on every frame, then an LSTM over frames."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 24, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.lstm, self.fc = nn.LSTM(24, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x):
        b, t, c, h, w = x.shape
        features = self.cnn(x.view(b * t, c, h, w)).view(b, t, -1)
        return self.fc(self.lstm(features)[0][:, -1])


class TimeSformer(nn.Module):
    """Attention over time, then over space."""

    def __init__(self, dim=24):
        super().__init__()
        self.patch, self.head = nn.Conv3d(3, dim, (1, 4, 4), (1, 4, 4)), nn.Linear(dim, 5)
        self.time, self.space = (
            nn.MultiheadAttention(dim, 4, batch_first=True),
            nn.MultiheadAttention(dim, 4, batch_first=True),
        )
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        x = self.patch(x).flatten(3)
        b, c, t, s = x.shape
        x = x.permute(0, 3, 2, 1).reshape(b * s, t, c)
        y = self.norm1(x)
        x = x + self.time(y, y, y, need_weights=False)[0]
        x = x.reshape(b, s, t, c).permute(0, 2, 1, 3).reshape(b * t, s, c)
        y = self.norm2(x)
        x = x + self.space(y, y, y, need_weights=False)[0]
        return self.head(x.reshape(b, t * s, c).mean(1))


def _video_mask():
    return torch.randn(2, 3, 16, 16), torch.randint(0, 3, (2, 16, 16))


SEGMENTATION = {
    "unet": Case(UNet, numbers(2, 3, 16, 16)),
    "unet-bilinear": Case(lambda: UNet(bilinear=True), numbers(2, 3, 16, 16)),
    "unet-instance-norm": Case(lambda: UNet(norm=nn.InstanceNorm2d), numbers(2, 3, 16, 16)),
    "unet-group-norm": Case(lambda: UNet(norm=lambda n: nn.GroupNorm(8, n)), numbers(2, 3, 16, 16)),
    "unet-attention": Case(AttentionUNet, numbers(2, 3, 16, 16)),
    "unet-3d": Case(UNet3d, numbers(2, 1, 8, 8, 8)),
    "segnet": Case(SegNet, numbers(2, 3, 16, 16)),
    "pyramid-with-dice": Case(PyramidHead, _video_mask),
    "lraspp-mobilenet": Case(
        _vision("segmentation", "lraspp_mobilenet_v3_large", weights_backbone=None), numbers(2, 3, 64, 64)
    ),
    "deeplab-mobilenet": Case(
        _vision("segmentation", "deeplabv3_mobilenet_v3_large", weights_backbone=None), numbers(2, 3, 64, 64)
    ),
    "fcn-resnet50": Case(_vision("segmentation", "fcn_resnet50", weights_backbone=None), numbers(2, 3, 32, 32)),
}
VIDEO = {
    "r3d-18": Case(_vision("video", "r3d_18"), numbers(2, 3, 4, 32, 32)),
    "mc3-18": Case(_vision("video", "mc3_18"), numbers(2, 3, 4, 32, 32)),
    "r2plus1d-18": Case(_vision("video", "r2plus1d_18"), numbers(2, 3, 4, 32, 32)),
    "frames-lstm": Case(FramesLSTM, numbers(2, 4, 3, 16, 16)),
    "timesformer": Case(TimeSformer, numbers(2, 3, 4, 16, 16)),
}
