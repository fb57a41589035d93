"""Share tensors of torch with a model on CuPy, in the memory of the GPU."""

import importlib.util

import numpy as np

import xformer as xf

config = xf.LanguageModelConfig(
    vocab_size=20, d_model=16, num_heads=2, d_ff=32, num_layers=2
)
has_gpu = False
if importlib.util.find_spec("cupy"):
    import cupy

    has_gpu = cupy.cuda.is_available()
xp = cupy if has_gpu else np  # the lines below are the same on the CPU

if importlib.util.find_spec("torch"):
    import torch

    tokens = torch.tensor([[5, 3, 8, 1]], device="cuda" if has_gpu else "cpu")
    model = xf.LanguageModel(config, xp=torch, seed=0).to(xp)
    logits = model(xp.from_dlpack(tokens))  # no copy
    tensor = torch.from_dlpack(logits)  # no copy either
    print(tensor.device.type, tuple(tensor.shape))
