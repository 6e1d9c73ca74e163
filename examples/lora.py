"""LoRA: a model of the digits 0 to 4 learns 5 to 9 through adapters alone (peft). Samplers that probe the model measure the adapters only.

    python examples/lora.py                 # a few minutes on one core; for a quick look: --updates 20 --seeds 1

The script prints the held-out loss of the plain objective, uniform in time, on the new digits: before, and after fine-tuning with each sampler.
"""

import argparse
from copy import deepcopy

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from sklearn.datasets import load_digits

import noiseclock as nc
from noiseclock.integrations.diffusers import clock_from

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=150, help="of fine-tuning, after four times as many of pretraining")
parser.add_argument("--seeds", type=int, default=3)
args = parser.parse_args()
digits = load_digits()
images, labels = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None], torch.tensor(digits.target)
words = torch.nn.functional.one_hot(labels, 10)[:, None].float()  # (N, 1, 10): a prompt of one word
old, held_out = labels < 5, torch.arange(len(images)) % 7 == 0
blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 10, "attention_head_dim": 2}
adapters = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2"])


def train(unet: UNet2DConditionModel, sampler: nc.Sampler, which: torch.Tensor, updates: int, lr: float, seed: int) -> float:
    """Any loop with a clock in it; returns the held-out loss on new digits."""
    optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr)
    clock = clock_from(DDPMScheduler(), sampler, seed=seed).attach(optimizer)
    order, new = torch.Generator().manual_seed(seed), held_out & ~old
    for _ in range(updates):
        rows = torch.multinomial(which.float(), 32, generator=order)
        b = clock.draw(images[rows], predict=(predict := lambda x, t, word: unet(x, t, word).sample), cond=words[rows])
        clock.loss(b, predict(b.x_t, b.t, b.cond)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(nc.measure.loss_over_time(clock, predict, images[new], cond=words[new]).loss.mean())


samplers: dict[str, nc.Sampler] = {"uniform": nc.Uniform(), "loss-second-moment": nc.LossSecondMoment()}
samplers |= {"variance-optimal": nc.VarianceOptimal(), "adaptive": nc.Adaptive.scaled(every=10, stride=10)}  # there are few updates
found: dict[str, list[float]] = {name: [] for name in ("before", *samplers)}
for seed in range(args.seeds):
    torch.manual_seed(seed)
    first = UNet2DConditionModel(8, 1, 1, **sizes, **blocks)
    found["before"].append(train(first, nc.Uniform(), old & ~held_out, 4 * args.updates, 2e-3, seed))
    first.requires_grad_(False)
    first.add_adapter(adapters)
    for name, sampler in samplers.items():
        found[name].append(train(deepcopy(first), sampler, ~old & ~held_out, args.updates, 2e-3, seed + 100))
for name, losses in found.items():
    print(f"{name:<20} held-out loss {sum(losses) / len(losses):.4f}, {min(losses):.4f} to {max(losses):.4f} over {args.seeds} seeds")
