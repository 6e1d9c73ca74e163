"""Lightning: a module that defines the prediction, and a callback that takes care of the clock.

    python examples/lightning_loop.py                 # ten seconds on one core; run again with --epochs 20 to continue from the last checkpoint

The callback counts the optimiser's updates, keeps the clock in Lightning's checkpoints and logs what the sampler learns; times are stratified over
the micro-batches of an update.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import noiseclock as nc
from noiseclock.integrations.lightning import ClockCallback, ClockMixin


class Digits(ClockMixin, L.LightningModule):
    """Predicts the noise in digits of 64 numbers; its training step is the mixin's."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64))
        self.clock = nc.Clock("linear", nc.VarianceOptimal(), nc.MinSNR(5))

    def predict(self, x_t: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] / 1000 * torch.pi * 2 ** torch.arange(8, device=t.device)
        return self.net(torch.cat([x_t, angles.sin(), angles.cos()], 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--folder", type=Path, default=Path("lightning_loop"))
args = parser.parse_args()

L.seed_everything(0, verbose=False)
digits = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
model, last = Digits(), args.folder / "last.ckpt"
trainer = L.Trainer(
    max_epochs=args.epochs, accelerator="cpu", accumulate_grad_batches=2, log_every_n_steps=10, logger=CSVLogger(args.folder, name=""),
    callbacks=[ClockCallback(), ModelCheckpoint(args.folder, save_last=True, save_top_k=0)], enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(TensorDataset(digits), batch_size=32), ckpt_path=last if last.exists() else None)
print(f"{model.clock.updates} updates;", ", ".join(f"{name} {value:.4g}" for name, value in model.clock.sampler.info.items()))
