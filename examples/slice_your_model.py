"""Take any model, cut a rolling sub-model out of it, train it a step, write it back."""

import timm
import torch
import torch.nn.functional as F

from submodels import Budget, Rolling, ScalableModel

model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=4)  # yours, unmodified
scalable = ScalableModel(model, torch.randn(2, 3, 32, 32))  # traced once, on the meta device
width = scalable.fit(Budget(train_mb=24), batch_size=8)  # the largest width a 24 MB device can train
sub = scalable.extract(width, extractor=Rolling(), round=3)  # a real, smaller VisionTransformer

images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
optimizer = torch.optim.SGD(sub.module.parameters(), lr=0.1)
F.cross_entropy(sub.module(images), labels).backward()
optimizer.step()
scalable.write(sub)  # heads, residual stream and classifier land where they came from

print(f"whole model:  {scalable.cost(1.0, batch_size=8)}")
print(f"width {width:.3f}:  {scalable.cost(width, batch_size=8)}")
print(f"heads kept in block 0: {sub.module.blocks[0].attn.num_heads} of {model.blocks[0].attn.num_heads}")
print(scalable.verify(widths=(width,)))
