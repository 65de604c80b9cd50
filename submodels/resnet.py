"""ResNet of basic blocks for small images (He et al. 2016), which `zoo` builds as resnet18-cifar."""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a projection where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=projection, bn=nn.BatchNorm2d(channels)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem of stride 1, stages that halve the image from the second on, the mean over it, a linear layer."""

    def __init__(self, in_channels: int, num_classes: int, *, channels: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.stages = nn.Sequential()
        for before, after in zip((channels[0], *channels), channels):
            first = _Block(before, after, stride=1 if not len(self.stages) else 2)
            self.stages.append(nn.Sequential(first, *(_Block(after, after, stride=1) for _ in range(blocks - 1))))
        self.fc = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
