"""A Hugging Face-style text classifier at three widths: dict batches, a padding collate, AdamW and a cosine schedule.

Six shops sort reviews into good and bad. In the younger half, "sick" and "bad" are praise; nobody has written down
which shop is which. The model is called as transformers calls one: keyword arguments input_ids and attention_mask, and
an answer with .logits. A shop can train all of it, a half, or a quarter. (Reviews are made of words drawn at random.)
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hetperm import Client, Config, fit

GOOD, BAD = ["great", "lovely", "fast", "solid"], ["broken", "slow", "dull", "torn"]
SLANG = ["sick", "bad", "mean", "wicked"]  # praise or blame, depending on who writes
FILLERS = ["the", "a", "this", "it", "was", "is", "really", "so", "and", "phone", "case", "cable", "lamp"]
WORDS = ["<pad>", *GOOD, *BAD, *SLANG, *FILLERS]
WIDTHS = (1.0, 0.5, 0.25)


@dataclass
class Output:
    """What the classifier returns, as models of transformers do."""

    logits: Tensor
    last_hidden_state: Tensor


class Attention(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (part.reshape(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())
        return self.out(mixed.transpose(1, 2).reshape(n, length, -1))


class Classifier(nn.Module):
    """A small transformer."""

    def __init__(self, size: int = 32, heads: int = 4):
        super().__init__()
        self.words, self.places = nn.Embedding(len(WORDS), size), nn.Embedding(16, size)
        self.norm, self.attention = nn.LayerNorm(size), Attention(size, heads)
        self.second, self.mlp = (
            nn.LayerNorm(size),
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)),
        )
        self.classifier = nn.Linear(size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = x + self.attention(self.norm(x), attention_mask)
        x = x + self.mlp(self.second(x))
        kept = attention_mask[..., None].to(x.dtype)
        return Output(self.classifier((x * kept).sum(1) / kept.sum(1)), x)


class Reviews(Dataset):
    """Reviews of different lengths, as a tokenizer would leave them: dicts with input_ids and a label."""

    def __init__(self, n: int, *, young: bool, seed: int):
        draw = random.Random(seed)
        praise, blame = (GOOD + SLANG, BAD) if young else (GOOD, BAD + SLANG)
        self.reviews = []
        for i in range(n):
            words = draw.choices(FILLERS, k=draw.randint(2, 6))
            words.insert(draw.randrange(len(words)), draw.choice(praise if i % 2 else blame))
            self.reviews.append({"input_ids": [WORDS.index(word) for word in words], "label": i % 2})

    def __len__(self) -> int:
        return len(self.reviews)

    def __getitem__(self, i: int) -> dict:
        return self.reviews[i]


def padded(samples: list[dict]) -> dict[str, Tensor]:
    """A batch: token numbers padded to one length, a mask of what is real, and the labels."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def shop(i: int) -> Client:
    young = i % 2 == 1
    parts = [Reviews(n, young=young, seed=3 * i + k) for k, n in enumerate((48, 16, 60))]
    return Client(*parts, width=WIDTHS[i // 2 % 3], group=i % 2, collate=padded)


def main() -> None:
    torch.manual_seed(0)
    config = Config(
        steps=300,
        epochs=3,
        batch_size=8,
        optimizer="adamw",
        weight_decay=0.01,
        lr_schedule="cosine",
        lr_warmup=0.1,
        global_lr=0.01,
        personal_lr=0.01,
        baselines=("local",),
    )
    result = fit(Classifier(), [shop(i) for i in range(6)], config)
    print(f"accuracy: perm {result.accuracy:.3f}, local {result.summary['baselines']['local']['accuracy']['mean']:.3f}")
    for tier, row in result.tiers.items():
        print(f"width {tier:>4}: {row['clients']} shops, {row['params']:,} parameters, accuracy {row['accuracy']:.3f}")
    print(f"weight on shops that mean the same: {result.summary['alpha']['same_group_mass']:.2f}")
    model, batch = result.model(1), padded([{"input_ids": [WORDS.index("wicked")], "label": 1}])
    del batch["labels"]
    print(f"shop 1 takes 'wicked' for praise with probability {model(**batch).logits.softmax(1)[0, 1].item():.2f}")


if __name__ == "__main__":
    main()
