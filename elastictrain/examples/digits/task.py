"""Classification: the 1,797 handwritten digits that come with scikit-learn, and a small convolutional network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

HELD_OUT_ONE_IN = 5


class Digits(Dataset[tuple[Tensor, int]]):
    """Sample i: an image, float32 of shape (1, 8, 8) in [0, 1], and its digit."""

    def __init__(self, *, held_out: bool, augment: bool) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the digits example needs scikit-learn: pip install 'elastictrain[examples]'") from error
        images, digits = load_digits(return_X_y=True)
        mine = [i for i in range(len(digits)) if (i % HELD_OUT_ONE_IN == 0) is held_out]
        self._images = torch.tensor(images[mine], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self._digits = [int(d) for d in digits[mine]]
        self._augment = augment

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index]
        if self._augment:
            # Seeded for this epoch and sample by the loader: the same shift at any world size.
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, (down, right), dims=(1, 2))
        return image, self._digits[index]


class DigitsTask:
    """The task. See docs/task.md for what is called when.

    Args:
        width: channels of the first convolution.
        dropout: probability before the last layer.
        augment: shift training images by up to one pixel.
    """

    def __init__(self, width: int = 32, dropout: float = 0.1, augment: bool = True) -> None:
        self.width = width
        self.dropout = dropout
        self.augment = augment

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.GroupNorm(4, self.width),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * self.width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * self.width * 16, 10),
        )

    def train_data(self) -> Digits:
        return Digits(held_out=False, augment=self.augment)

    def eval_data(self) -> Digits:
        return Digits(held_out=True, augment=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, digits = batch
        return F.cross_entropy(model(images), digits)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, digits = batch
        logits = model(images)
        correct = (logits.argmax(dim=1) == digits).float().mean()
        return {"loss": F.cross_entropy(logits, digits), "accuracy": correct}
