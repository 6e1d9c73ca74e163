"""A model of digits, trained as diffusers' own unconditional script does it: UNet2DModel, DDPMScheduler, accelerate, EMA, a pipeline at the end.

    python examples/diffusers_unconditional.py                 # a few minutes on one core; run again with more --num_epochs to continue
    accelerate launch examples/diffusers_unconditional.py      # on all your GPUs

Only the lines that end in `# noiseclock` differ from the usual script.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits

from noiseclock.integrations.diffusers import clock_from  # noiseclock

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output_dir", type=Path, default=Path("runs/diffusers_unconditional"))
parser.add_argument("--num_epochs", type=int, default=40)
parser.add_argument("--use_ema", action="store_true")
parser.add_argument("--sampler", default="loss-second-moment")  # noiseclock
args = parser.parse_args()
set_seed(0)
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
images = torch.tensor(load_digits().images / 8 - 1, dtype=torch.float32)[:, None]
blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
model = UNet2DModel(8, 1, 1, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, **blocks)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(images, batch_size=64, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
ema = EMAModel(model.parameters(), decay=0.995)
clock = clock_from(noise_scheduler, args.sampler).attach(optimizer)  # noiseclock
accelerator.register_for_checkpointing(ema, clock)  # noiseclock
if (checkpoint := args.output_dir / "checkpoint").exists():
    accelerator.load_state(str(checkpoint))
for epoch in range(clock.updates // len(loader), args.num_epochs):
    loader.set_epoch(epoch)
    for x0 in loader:
        b = clock.draw(x0, predict=lambda x, t: model(x, t).sample)  # noiseclock
        accelerator.backward(clock.loss(b, model(b.x_t, b.t).sample).mean())  # noiseclock
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    accelerator.save_state(str(checkpoint))
if accelerator.is_main_process:
    if args.use_ema:
        ema.copy_to(model.parameters())
    DDPMPipeline(accelerator.unwrap_model(model), noise_scheduler).save_pretrained(args.output_dir)
    samples = DDPMPipeline.from_pretrained(args.output_dir)(batch_size=64, num_inference_steps=50, output_type="np").images
    loss = np.nanmean(clock.record.by_time().loss)  # noiseclock
    print(f"after {clock.updates} updates the loss is {loss:.4f}; samples {samples.shape} with a mean of {samples.mean():.4f}")
accelerator.end_training()
