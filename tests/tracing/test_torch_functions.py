"""Functions and methods of torch on traced tensors have the values and derivatives that torch computes."""

from __future__ import annotations

import pytest

import xformer as xf
from tests.reference import for_each, raises_line
from xformer.errors import BackendError, DifferentiationError
from xformer.tracing.numpy_functions import OF_TORCH
from xformer.tracing.rule import RULES
from xformer.tracing.rules.elementwise import ELEMENTWISE

torch = pytest.importorskip("torch")
F = torch.nn.functional
X = torch.linspace(0.2, 1.3, 12, dtype=torch.float64).reshape(3, 4).sin() + 0.1
W = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).reshape(4, 2)
INF, NAN = float("inf"), float("nan")
OTHERS = ("clip", "conj", "imag", "nextafter", "real", "sign", "where")
PARAMETERS = {"special.polygamma": (1,), "special.gammainc": (X + 1.0,), "special.gammaincc": (X + 1.0,)}
EYE = torch.eye(3, dtype=torch.float64)
CASES = {
    "sum": [
        lambda x: torch.sum(x),
        lambda x: x.sum(dim=1),
        lambda x: torch.sum(x, 0, True),
        lambda x: x.sum((0, 1), keepdim=True),
        lambda x: x.sum(dim=[], keepdim=True),
        lambda x: torch.sum(x, (), True),
    ],
    "mean": [lambda x: x.mean(dim=0, keepdim=True), lambda x: torch.mean(x), lambda x: x.mean([])],
    "prod": [lambda x: x.prod(-1)],
    "amax": [lambda x: torch.amax(x, dim=0), lambda x: x.amax((0, 1)), lambda x: torch.amax(x, dim=())],
    "amin": [lambda x: x.amin(1, keepdim=True)],
    "reshape": [lambda x: x.reshape(2, 6)[0], lambda x: torch.reshape(x, (-1,))],
    "view": [lambda x: x.view(-1, 2)[1], lambda x: x.view((2, 6))],
    "squeeze": [lambda x: x[:1].squeeze(0), lambda x: torch.squeeze(x[:, :1])],
    "unsqueeze": [lambda x: x.unsqueeze(1) * x, lambda x: torch.unsqueeze(x, dim=-1)],
    "stack": [lambda x: torch.stack([x, x * 2], -1), lambda x: torch.stack((x, X), dim=1)],
    "cat": [lambda x: torch.cat([x, x**2], dim=1), lambda x: torch.cat((X, x))],
    "where": [lambda x: torch.where(x > 0.5, x, 0.0 * x)],
    "roll": [lambda x: torch.roll(x, 1, 0) * x, lambda x: x.roll(2)],
    "flip": [lambda x: x.flip(0, 1) * x, lambda x: torch.flip(x, dims=(1,)) * x],
    "cumsum": [lambda x: torch.cumsum(x, dim=1), lambda x: x.cumsum(0)],
    "cumprod": [lambda x: torch.cumprod(x, 1)],
    "tile": [lambda x: torch.tile(x, (2, 1))],
    "tril": [lambda x: torch.tril(x), lambda x: x.tril(-1)],
    "triu": [lambda x: torch.triu(x, 1)],
    "trace": [lambda x: torch.trace(x)],
    "diagonal": [lambda x: torch.diagonal(x)],
    "outer": [lambda x: torch.outer(x[0], x[1])],
    "kron": [lambda x: torch.kron(x, W)],
    "dot": [lambda x: torch.dot(x[0], x[1])],
    "einsum": [lambda x: torch.einsum("ij,jk->ik", x, W)],
    "matmul": [lambda x: x.matmul(W), lambda x: torch.matmul(W.T, x.T)],
    "mm": [lambda x: torch.mm(x, W)],
    "mv": [lambda x: torch.mv(x, W[:, 0])],
    "bmm": [lambda x: torch.bmm(x.reshape(1, 3, 4), x.reshape(1, 4, 3))],
    "permute": [lambda x: x.permute(1, 0) @ x, lambda x: torch.permute(x, (1, 0))],
    "transpose": [lambda x: torch.transpose(x, 0, 1)[1], lambda x: x.transpose(0, 1)],
    "clamp": [lambda x: x.clamp(min=0.4), lambda x: torch.clamp(x, 0.3, 0.8), lambda x: x.clamp(max=0.7)],
    "sub": [lambda x: torch.sub(2.0 * X, x), lambda x: W[0, 0] - x],
    "mul": [lambda x: torch.mul(x, 2.0), lambda x: W[0, 0].mul(x), lambda x: X * x],
    "div": [lambda x: torch.div(X, x + 1.0), lambda x: x / X],
    "neg": [lambda x: torch.neg(x), lambda x: x.neg()],
    "sigmoid": [
        lambda x: torch.sigmoid(x),
        lambda x: (300.0 * x).sigmoid() * x,
        lambda x: torch.sigmoid(-60.0 * x).log(),
    ],
    "relu": [lambda x: torch.relu(x - 0.5), lambda x: F.relu(x - 0.5), lambda x: (x - X[0]).relu()],
    "softmax": [lambda x: torch.softmax(x, dim=-1) * x, lambda x: F.softmax(x, dim=0) * x, lambda x: x.softmax(1) * x],
    "log_softmax": [lambda x: F.log_softmax(100.0 * x, -1) * x, lambda x: torch.log_softmax(x, dim=0)],
    "logsumexp": [lambda x: torch.logsumexp(x, 1), lambda x: x.logsumexp(dim=0, keepdim=True)],
    "linalg_inv": [lambda x: torch.linalg.inv(x[:, :3] + 3.0 * EYE)],
    "linalg_det": [lambda x: torch.linalg.det(x[:, :3] + EYE)],
    "linalg_solve": [
        lambda x: torch.linalg.solve(x[:, :3] + 3.0 * EYE, x),
        lambda x: torch.linalg.solve(x[:, :3] + 3.0 * EYE, x[:, 3]),
        lambda x: torch.linalg.solve(torch.stack([x[:, :3] + i * EYE for i in (3.0, 5.0, 7.0)]), x[:, 1:]),
        lambda x: torch.linalg.solve((x[:, :3] + 3.0 * EYE)[None], x[None]),
    ],
    "linalg_cholesky": [lambda x: torch.linalg.cholesky(x @ x.T + EYE)],
    "linalg_eigvalsh": [lambda x: torch.linalg.eigvalsh(x @ x.T)],
    "linalg_pinv": [lambda x: torch.linalg.pinv(x[:, :2])],
    "exp": [lambda x: x.exp().log() + torch.tanh(x).sqrt()],
    "pow": [lambda x: x.pow(3), lambda x: torch.pow(X, x)],
    "maximum": [lambda x: torch.maximum(x, X.flip(1)), lambda x: x.minimum(x.flip(0))],
    "abs": [lambda x: torch.abs(x - 0.5), lambda x: (x - 0.5).abs()],
    "atan2": [lambda x: torch.atan2(x, X)],
}


def test_every_function_has_a_case():
    assert {*OF_TORCH} - {name.replace("special.", "special_") for name in ELEMENTWISE} <= {*CASES}


@for_each("name, function", [(name, function) for name, functions in CASES.items() for function in functions])
def test_values_and_derivatives(name, function):
    leaf = X.clone().requires_grad_()
    expected = function(leaf)
    g = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).reshape(expected.shape)
    (expected * g).sum().backward()
    value, pull = xf.vjp(function, X)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(pull(g)[0], leaf.grad)


@for_each("row", [[-INF, -INF], [INF, 1.0], [-INF, 1.0, 2.0], [NAN, 1.0], [-10.0, 0.0, 40.0], [-90.0, 30.0, 30.0]])
@pytest.mark.parametrize("name", ["sigmoid", "relu", "softmax", "log_softmax", "logsumexp"])
def test_values_at_infinity_and_in_float32(name, row):
    x, axes = torch.tensor(row), () if name in ("sigmoid", "relu") else (0,)
    leaf = x.clone().requires_grad_()
    expected = getattr(torch, name)(leaf, *axes)
    value, pull = xf.vjp(lambda x: getattr(torch, name)(x, *axes), x)
    torch.testing.assert_close(value, expected.detach(), rtol=3e-7, atol=1e-37, equal_nan=True)
    if bool(torch.isfinite(x).all()):
        torch.autograd.backward(expected, torch.ones_like(expected))
        torch.testing.assert_close(pull(torch.ones_like(value))[0], leaf.grad, rtol=5e-6, atol=1e-6)


def _torch_function(name):
    module, _, short = name.rpartition(".")
    return getattr(torch.special if module else torch, short, None)


IN_TORCH = [name for name in sorted(ELEMENTWISE) if _torch_function(name) is not None and name not in OTHERS]


@for_each("name", IN_TORCH)
def test_elementwise_functions_are_those_of_torch(name):
    given, more = PARAMETERS.get(name, ()), () if len(RULES[name].steps) == 1 else (X.flip(0),)
    x = X + 1.5 if name == "acosh" else X * 0.5

    def function(x):
        return _torch_function(name)(*given, x, *more)

    leaf = x.clone().requires_grad_()
    expected = function(leaf)
    value, pull = xf.vjp(function, x)
    torch.testing.assert_close(value, expected.detach())
    if expected.requires_grad:
        expected.sum().backward()
        torch.testing.assert_close(pull(torch.ones_like(value))[0], leaf.grad)


@for_each(
    "function, error, message",
    [
        (
            lambda x: torch.max(x, 1)[0],
            BackendError,
            "max of torch got a traced array and would lose its gradient; use",
        ),
        (lambda x: torch.std(x), BackendError, "std of torch got a traced array and would lose its gradient; use"),
        (
            lambda x: torch.add(x, x, alpha=2),
            DifferentiationError,
            "add of torch on a traced array has no argument alpha",
        ),
        (
            lambda x: x.sum(dtype=torch.float32),
            DifferentiationError,
            "sum of torch on a traced array has no argument dtype",
        ),
        (
            lambda x: torch.div(x, 2, rounding_mode="floor"),
            DifferentiationError,
            "div of torch on a traced .* no argument",
        ),
        (
            lambda x: torch.linalg.solve(EYE, x, left=False),
            DifferentiationError,
            "linalg_solve of torch on a traced array has no argument left",
        ),
        (lambda x: x.std(), AttributeError, r"traced arrays have no method 'std'; use xp.std\(x\)"),
    ],
)
def test_what_differs_from_the_standard_is_refused(function, error, message):
    with raises_line(error, message):
        xf.grad(lambda x: function(x)[0])(X)
