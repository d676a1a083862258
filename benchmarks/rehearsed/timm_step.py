"""The step of timm's benchmark.py, ``--bench train --amp [--channels-last]``: MODEL BATCH SIZE LAYOUT."""

import sys

import torch
from timm import create_model
from timm.optim import create_optimizer_v2

name, batch, size, layout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
torch.backends.cudnn.benchmark = True
model = create_model(name)
model.to(device="cuda", memory_format=memory_format)
model.train()
loss_of = torch.nn.CrossEntropyLoss().to("cuda")
optimizer = create_optimizer_v2(model, opt="sgd", lr=1e-4)
images = torch.randn((batch, 3, size, size), device="cuda").contiguous(memory_format=memory_format)
for _ in range(5):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(images)
        output = output[0] if isinstance(output, tuple) else output
        labels = torch.empty((batch,), device="cuda", dtype=torch.long).random_(model.num_classes)
        loss_of(output, labels).backward()
    optimizer.step()
    torch.cuda.synchronize()
