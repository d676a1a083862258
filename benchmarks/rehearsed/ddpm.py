"""The step of diffusers' examples/unconditional_image_generation/train_unconditional.py at 64 x 64."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from torch.nn import functional

BATCH, SIZE = 16, 64

accelerator = Accelerator(mixed_precision="no")
model = UNet2DModel(
    sample_size=SIZE,
    in_channels=3,
    out_channels=3,
    layers_per_block=2,
    block_out_channels=(128, 128, 256, 256, 512, 512),
    down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
)
average = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75)
noises = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
model, optimizer = accelerator.prepare(model, optimizer)
average.to(accelerator.device)
for _ in range(5):
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(accelerator.device, non_blocking=True)
    noise = torch.randn(images.shape, dtype=torch.float32, device=images.device)
    steps = torch.randint(0, 1000, (BATCH,), device=images.device).long()
    noisy = noises.add_noise(images, noise, steps)
    with accelerator.accumulate(model):
        loss = functional.mse_loss(model(noisy, steps).sample.float(), noise.float())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    average.step(model.parameters())
    loss.detach().item()
