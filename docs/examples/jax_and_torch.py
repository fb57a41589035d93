"""Use a model inside jax.jit, jax.grad and torch autograd."""

import importlib.util

import numpy as np

import xformer as xf

config = xf.LanguageModelConfig(
    vocab_size=20, d_model=16, num_heads=2, d_ff=32, num_layers=2
)
tokens = np.asarray([[5, 3, 8, 1]])

if importlib.util.find_spec("jax"):
    import jax

    model = xf.LanguageModel(config, xp=jax.numpy, seed=0)

    @jax.jit
    def mean_logit(model, tokens):  # a model is a pytree
        return jax.numpy.mean(model(tokens))

    print(mean_logit(model, jax.numpy.asarray(tokens)))
    # The gradients have the structure of the model.
    gradients = jax.grad(mean_logit)(model, jax.numpy.asarray(tokens))
    print(jax.tree.map(jax.numpy.shape, gradients.embedding))

if importlib.util.find_spec("torch"):
    import torch

    model = xf.LanguageModel(config, xp=torch, seed=0)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_()
    model(tokens).mean().backward()
    print(model.embedding.weight.grad.shape)
