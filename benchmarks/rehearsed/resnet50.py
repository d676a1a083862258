"""The training step of ResNet-50 v1.5 in NVIDIA's DeepLearningExamples (Classification/ConvNets/main.py)."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--precision", choices=["amp", "tf32", "fp32"], default="amp")
args = parser.parse_args()
amp = args.precision == "amp"
torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
world = int(os.environ["WORLD_SIZE"])
layout = torch.channels_last if amp else torch.contiguous_format
model = resnet50().to(device, memory_format=layout)
if world > 1:
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model, device_ids=[device.index])
loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.256, momentum=0.875, weight_decay=3e-5)
scaler = torch.amp.GradScaler("cuda", init_scale=128.0, growth_interval=10**9, enabled=amp)
images = torch.randn(args.batch, 3, 224, 224, device=device).contiguous(memory_format=layout)
labels = torch.randint(1000, (args.batch,), device=device)
for _ in range(5):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
        loss = loss_of(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
