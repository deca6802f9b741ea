"""A byte-level GPT on real text that every machine has: the source of the Python standard library.

One file in twenty is held out for validation, chosen by its name, so training never sees a line of it.
"""

from __future__ import annotations

import math
import sysconfig
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, Subset

VOCABULARY = 256
HELD_OUT_ONE_IN = 20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def read_stdlib(*, held_out: bool) -> Tensor:
    """The text of the standard library's modules, one after the other, as uint8 of shape (bytes,)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(p.relative_to(root).parts)]
    texts = []
    for path in sorted(paths, key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if (zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0) is held_out:
            texts.append(path.read_bytes())
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


class ByteWindows(Dataset[Tensor]):
    """Sample i: bytes `[i · context, i · context + context]`, uint8 of shape (context + 1,)."""

    def __init__(self, text: Tensor, context: int) -> None:
        self._text = text
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1]


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = self.feed_forward(self.norm_feed_forward(x))
        return x + F.dropout(hidden, self.dropout, self.training)


class ByteGpt(nn.Module):
    """A decoder-only transformer over bytes. Input: int64 (batch, length); output: logits (batch, length, 256)."""

    def __init__(self, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # GPT-2's initialisation: residual projections are scaled down by the number of residual layers.
                residual = name.endswith(("project.weight", "feed_forward.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class StdlibLm:
    """The task. See docs/task.md for what is called when.

    Args:
        context: bytes a prediction can look back on.
        layers, heads, width: size of the transformer.
        dropout: probability in attention and feed-forward.
        warmup: fraction of the run in which the learning rate rises.
        lr: its peak; it falls along a cosine to a tenth.
    """

    def __init__(
        self,
        context: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        lr: float = 3e-3,
        warmup: float = 0.1,
    ) -> None:
        self.context = context
        self.layers, self.heads, self.width, self.dropout = layers, heads, width, dropout
        self.lr = lr
        self.warmup = warmup
        self.tokens_per_sample = context

    def model(self) -> nn.Module:
        return ByteGpt(self.context, self.layers, self.heads, self.width, self.dropout)

    def train_data(self) -> Dataset[Tensor]:
        return ByteWindows(read_stdlib(held_out=False), self.context)

    def eval_data(self) -> Dataset[Tensor]:
        held_out = ByteWindows(read_stdlib(held_out=True), self.context)
        # Every eighth window: enough to see progress by, in seconds.
        return Subset(held_out, range(0, len(held_out), 8))

    def optimizer(self, model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler:
        warmup_steps = max(1, int(self.warmup * num_steps))

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            done = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        return LambdaLR(optimizer, factor)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        tokens = batch.long()
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        loss = self.loss(model, batch)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}
