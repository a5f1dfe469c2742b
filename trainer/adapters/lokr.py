"""LoKr: W + s w1 (x) w2, a Kronecker product, by LyCORIS' conventions (arXiv 2309.14859; its modules/lokr.py, 4.1).

    w1 [O, I] (x) w2 [P, Q, ...]  of W [N, K, ...], N = O P and K = I Q (`factorization`): row o P + p, column i Q + q is
    w1[o, i] w2[p, q]. w1 = w1_a [O, R] w1_b [R, I] or whole, w2 = w2_a [P, R] w2_b [R, Q, ...] or whole: a pair where R is
    less than half of the longer side. s = alpha / R (rsLoRA: alpha / sqrt(R)), and 1 where both are whole.

    y = x W^T + s y' + b,  y'[m] = w1 x[m] w2^T  with x[m] as [I, Q] and y'[m] as [O, P]

Each factor is one product, of one side of x[m]. The products of the two sides may come in any order, and a pair may be
multiplied first: `order` finds the cheapest. Each product costs twice as much backward as forward, so one order is the
cheapest for both. Neither w1 (x) w2 nor W + dW is made. For a convolution w2, or w2_b, is a convolution of W's geometry, and
the other factors act on its pixels.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.base import memory
from trainer.base.protocols import BaseLayer

W1, W1_A, W1_B, W2, W2_A, W2_B = ENDS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
DRAWN = (W1, W1_A, W1_B, W2_A)  # begin as random draws; the others as zeros, and so does the product
PAIRS = {W1: (W1_A, W1_B), W2: (W2_A, W2_B)}


def factorization(size: int, factor: int = -1) -> tuple[int, int]:
    """(m, n), m n = size, m <= n: with the side `factor` if that divides it; else the most balanced one with m <= `factor`
    (-1: any)."""
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    most = size if factor < 0 else factor
    m = max(m for m in range(1, int(size**0.5) + 1) if size % m == 0 and m <= most)
    return m, size // m


def shapes(shape: Sequence[int], rank: int, factor: int = -1, decompose: str = "w2") -> dict[str, tuple[int, ...]]:
    """The parameters' shapes for a W of `shape`. decompose: which of w1 and w2 become pairs if the rank is small enough:
    "w2", "both" or "none"."""
    (o, p), (i, q), kernel = factorization(shape[0], factor), factorization(shape[1], factor), tuple(shape[2:])
    sizes: dict[str, tuple[int, ...]] = {}
    for whole, rows, columns, taps, may in ((W1, o, i, (), decompose == "both"), (W2, p, q, kernel, decompose != "none")):
        a, b = PAIRS[whole]
        is_pair = may and rank < max(rows, columns) / 2
        sizes |= {a: (rows, rank), b: (rank, columns, *taps)} if is_pair else {whole: (rows, columns, *taps)}
    return sizes


def rank_of(sizes: Mapping[str, Sequence[int]]) -> int:
    """The rank of a layer's pairs, from the shapes of its parameters; if both are whole, one for which they would be."""
    return next((sizes[b][0] for b in (W2_B, W1_B) if b in sizes), 0) or max(sizes[W2][:2])


def sizes_for(shape: Sequence[int], sizes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]] | None:
    """A file's shapes, in which a convolution may be flat, in the form used here. shape: W's. None: they give no such W."""
    if any((whole in sizes) == (a in sizes) or (a in sizes) != (b in sizes) for whole, (a, b) in PAIRS.items()):
        return None
    o, i = sizes[W1] if W1 in sizes else (sizes[W1_A][0], sizes[W1_B][-1])
    p, (rank_1, rank_2) = sizes[W2 if W2 in sizes else W2_A][0], (sizes.get(b, (0,))[0] for _, b in PAIRS.values())
    kernel, q = tuple(shape[2:]), shape[1] // max(i, 1)
    if (o * p, i * q) != tuple(shape[:2]):
        return None
    pairs: dict[str, tuple[int, ...]] = {W1: (o, i), W1_A: (o, rank_1), W1_B: (rank_1, i)}
    pairs |= {W2: (p, q, *kernel), W2_A: (p, rank_2), W2_B: (rank_2, q, *kernel)}
    return {end: pairs[end] for end in sizes}


def is_whole(ends: Iterable[str]) -> bool:
    """Whether neither w1 nor w2 is a pair: then the scale is 1."""
    return {W1, W2} <= {*ends}


def wholes(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(w1 [O, I], w2 [P, Q, ...])."""
    w1, w2 = (
        values[whole] if whole in values else (values[a] @ values[b].flatten(1)).unflatten(1, values[b].shape[1:])
        for whole, (a, b) in PAIRS.items()
    )
    return w1, w2


def factors(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(A [R', K...], B [N, R', 1...]) with B A = w1 (x) w2: w1 = L1 R1 and w2 = L2 R2 give (L1 (x) L2) (R1 (x) R2). R' is the
    product of the two ranks, which may be large: for files and tools, not for training."""
    (left_1, right_1), (left_2, right_2) = (_sides(values, whole) for whole in PAIRS)
    ones = (1,) * (right_2.dim() - 2)
    return torch.kron(right_1.view(*right_1.shape, *ones), right_2), torch.kron(left_1, left_2).view(
        len(left_1) * len(left_2), -1, *ones
    )


def _sides(values: Mapping[str, Tensor], whole: str) -> tuple[Tensor, Tensor]:
    if whole not in values:
        a, b = PAIRS[whole]
        return values[a], values[b]
    rows, columns = (matrix := values[whole].flatten(1)).shape
    like = {"dtype": matrix.dtype, "device": matrix.device}
    if rows <= columns:
        return torch.eye(rows, **like), values[whole]
    return matrix, torch.eye(columns, **like).view(columns, *values[whole].shape[1:])


def product(values: Mapping[str, Tensor]) -> Tensor:
    """w1 (x) w2 in W's shape, fp64: for tools, one layer at a time, never in training."""
    w1, w2 = wholes({end: value.double() for end, value in values.items()})
    return torch.kron(w1.view(*w1.shape, *(1 for _ in w2.shape[2:])), w2)


def nearest(values: Mapping[str, Tensor], rank: int) -> tuple[Tensor, Tensor, float]:
    """(A [r, K...], B [N, r], relative loss of ||w1 (x) w2||), fp64, r <= rank, with B A nearest to w1 (x) w2.

    Its singular values are the products of one of w1 and one of w2, and its singular vectors Kronecker products of theirs.
    """
    w1, w2 = wholes({end: value.double() for end, value in values.items()})
    (u_1, s_1, v_1), (u_2, s_2, v_2) = (torch.linalg.svd(w.flatten(1), full_matrices=False) for w in (w1, w2))
    sizes, places = torch.outer(s_1, s_2).flatten().sort(descending=True, stable=True)
    first, second = places[:rank] // len(s_2), places[:rank] % len(s_2)
    roots = sizes[:rank].sqrt()
    b = torch.einsum("or,pr->opr", u_1[:, first], u_2[:, second]).flatten(0, 1) * roots
    a = torch.einsum("ri,rq->riq", v_1[first], v_2[second]).flatten(1) * roots[:, None]
    loss = sizes[rank:].square().sum().sqrt() / sizes.square().sum().sqrt().clamp_min(1e-300)
    return a.view(len(a), w1.shape[1] * w2.shape[1], *w2.shape[2:]), b, float(loss)


def norm(values: Mapping[str, Tensor], less: Mapping[str, Tensor] | None = None) -> float:
    """||w1 (x) w2|| = ||w1|| ||w2||, or ||w1 (x) w2 - v1 (x) v2|| for matrices with the same ends: the norm of
    (w1 - v1) (x) w2 + v1 (x) (w2 - v2), in which nothing cancels if they are close."""
    w1, w2 = wholes({end: value.double() for end, value in values.items()})
    if less is None:
        return float(w1.norm() * w2.norm())
    v1, v2 = wholes({end: value.double() for end, value in less.items()})
    d1, d2 = w1 - v1, w2 - v2
    crossed = 2 * (d1 * v1).sum() * (w2 * d2).sum()
    return float((d1.norm() ** 2 * w2.norm() ** 2 + v1.norm() ** 2 * d2.norm() ** 2 + crossed).clamp_min(0).sqrt())


@cache
def order(sizes: tuple[tuple[str, tuple[int, ...]], ...], tokens: int) -> tuple[str, ...]:
    """The names of the factors in the order of products with the fewest multiplications. W1 or W2 in place of its pair: the
    pair is multiplied first. sizes: of the parameters. tokens: of the input, or pixels; strides are not considered."""
    of, best = dict(sizes), (0, ())
    for path in _paths(of):
        cost, state = 0, {whole: _side(of, whole, 1) for whole in PAIRS}
        for name in path:
            side, other = (W1, W2) if name.startswith(W1) else (W2, W1)
            rows, *columns = of.get(name, ()) or (of[PAIRS[name][0]][0], *of[PAIRS[name][1]][1:])
            product = torch.Size((rows, *columns)).numel()
            cost += tokens * product * state[other]
            cost += 0 if name in of else product * of[PAIRS[name][0]][1]
            state[side] = rows
        best = min(best, (cost, path)) if best[1] else (cost, path)
    return best[1]


def _side(sizes: Mapping[str, tuple[int, ...]], whole: str, axis: int) -> int:
    """The rows (axis 0) or columns (1) of w1 or w2."""
    return sizes[whole if whole in sizes else PAIRS[whole][axis]][axis]


def _paths(sizes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, ...]]:
    """All orders of the products: each side's factors from the last to the first, or its pair as one."""
    sides = ([(whole,)] if whole in sizes else [(b, a), (whole,)] for whole, (a, b) in PAIRS.items())
    for first, second in itertools.product(*sides):
        for places in itertools.combinations(range(len(first) + len(second)), len(first)):
            firsts, seconds = iter(first), iter(second)
            yield tuple(next(firsts if at in places else seconds) for at in range(len(first) + len(second)))


class KronPart:
    """One adapted layer. trained: fp32 parameters by name; cast: in the compute dtype, the first times s, once an update."""

    def __init__(self, base: BaseLayer, trained: Mapping[str, Tensor], cast: Mapping[str, Tensor], scaling: float) -> None:
        self.base, self.trained, self.cast, self.scaling = base, dict(trained), dict(cast), scaling
        self.sizes = tuple((end, tuple(tensor.shape)) for end, tensor in trained.items())

    def is_of(self, modules: Mapping[str, Any], scaling: float) -> bool:
        """Whether these parameters' modules and that scale are its own."""
        return scaling == self.scaling and all(modules[end].weight is tensor for end, tensor in self.trained.items())

    def output(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The layer's output [..., N] or [B, N, h, w] for x [..., K] or [B, K, H, W], in the compute dtype. mask: dropout's,
        over the x of the product alone."""
        arguments = self, x, mask, *self.trained.values()
        return _Kron.apply(*arguments) if torch.is_grad_enabled() else _composed(*arguments)[0]


def _composed(part: KronPart, x: Tensor, mask: Tensor | None, *trained: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(output, inputs of the products, factors of the products)."""
    base, compute = part.base, part.base.compute_dtype
    x = x if x.dtype == compute else x.to(compute)
    x_c = base.collapsed(x)
    t = x_c if mask is None else base.collapsed(x * mask)
    t = t.reshape(len(t), _side(dict(part.sizes), W1, 1), -1, *t.shape[2:])
    path = _path(part, t)
    weights = [part.cast[name] if name in part.cast else _multiplied(part, name) for name in path]
    inputs = [t]
    for name, weight in zip(path[:-1], weights, strict=False):
        inputs.append(_product(base, name, weight, inputs[-1]))
    last = path[-1], weights[-1], inputs[-1]
    if base.unread and memory.recomputing():  # no gradient needs it (see dora.py)
        y = torch.full_like(_product(base, *last).flatten(1, 2), torch.nan)
    else:
        y = _added(base, base.matmul(x_c), *last)
        y = y if (bias := base.bias_N) is None else y.add_(bias.to(compute).view(-1, *(1 for _ in y.shape[2:])))
    return base.expanded(y, x.shape), inputs, weights


def _path(part: KronPart, t: Tensor) -> tuple[str, ...]:
    return order(part.sizes, len(t) * t[0, 0, 0].numel())


def _multiplied(part: KronPart, whole: str) -> Tensor:
    """s w1, or w2, from its pair: computed in fp32, returned in the compute dtype."""
    a, b = (part.trained[end].detach() for end in PAIRS[whole])
    return ((a * part.scaling if whole == W1 else a) @ b.flatten(1)).to(part.base.compute_dtype).unflatten(1, b.shape[1:])


def _on_the_left(name: str, t: Tensor) -> bool:
    """Whether a factor [R, R'] multiplies matrices from the left; else it is the layer's own operation on other channels."""
    return name.startswith(W1) or (name == W2_A and t.dim() > 3)


def _matrices(name: str, t: Tensor) -> Tensor:
    """t [M, I, Q, ...] as a batch of matrices for a factor: with rows I for w1, else Q."""
    return t.flatten(2) if name.startswith(W1) else t.flatten(0, 1).flatten(2)


def _product(base: BaseLayer, name: str, weight: Tensor, t: Tensor) -> Tensor:
    """t [M, I, Q, ...] with a factor multiplied into I (w1) or Q (w2)."""
    if not _on_the_left(name, t):
        y = base.product(t.flatten(0, 1), weight)
        return y.reshape(*t.shape[:2], *y.shape[1:])
    y = weight.expand(len(matrices := _matrices(name, t)), *weight.shape).bmm(matrices)
    return y.reshape(len(t), -1, *t.shape[2:]) if name.startswith(W1) else y.reshape(*t.shape[:2], -1, *t.shape[3:])


def _added(base: BaseLayer, z: Tensor, name: str, weight: Tensor, t: Tensor) -> Tensor:
    """z plus `_product`; for a Linear's rows in one operation, rounded once."""
    if t.dim() > 3:
        return z.add_(_product(base, name, weight, t).flatten(1, 2))
    if name.startswith(W1):
        z.view(len(t), len(weight), -1).baddbmm_(weight.expand(len(t), *weight.shape), t)
    else:
        z.view(-1, len(weight)).addmm_(t.flatten(0, 1), weight.t())
    return z


def _weight_gradient(base: BaseLayer, name: str, weight: Tensor, t: Tensor, d: Tensor) -> Tensor:
    """The factor's gradient in `_product`. d: the gradient of its result."""
    if not _on_the_left(name, t):
        return base.product_weight_grad(d.flatten(0, 1), t.flatten(0, 1), weight.shape)
    matrices, d_matrices = _matrices(name, t), _matrices(name, d)
    joined, d_joined = (batch.transpose(0, 1).flatten(1) for batch in (matrices, d_matrices))
    return d_joined @ joined.t()


def _input_gradient(base: BaseLayer, name: str, weight: Tensor, t: Tensor, d: Tensor, add_to: Tensor | None = None) -> Tensor:
    """The gradient of t in `_product`: a new tensor, or added to `add_to`, of t's size. d: the gradient of its result."""
    if not _on_the_left(name, t):
        rows = t.flatten(0, 1)
        dt = base.product_input_grad(d.flatten(0, 1), weight, rows.shape, None if add_to is None else add_to.view(rows.shape))
        return dt.view(t.shape)
    matrices, back = _matrices(name, d), weight.t().expand(len(_matrices(name, t)), *weight.t().shape)
    if add_to is None:
        return back.bmm(matrices).view(t.shape)
    return add_to.view(len(matrices), weight.shape[1], -1).baddbmm_(back, matrices).view(t.shape)


class _Kron(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, x, mask, *trained):
        y, inputs, weights = _composed(part, x, mask, *trained)
        ctx.save_for_backward(mask, *inputs, *weights)
        ctx.part, ctx.x_shape, ctx.x_dtype = part, x.shape, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        part, base, (mask, *saved) = ctx.part, ctx.part.base, ctx.saved_tensors
        needs_dx, dx, gradients = ctx.needs_input_grad[1], None, {}
        dy = base.collapsed(dy)
        inputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        path, d = _path(part, inputs[0]), dy.reshape(len(dy), _side(dict(part.sizes), W1, 0), -1, *dy.shape[2:])
        for place in reversed(range(len(path))):
            here = base, path[place], weights[place], inputs[place], d
            gradients[path[place]] = _weight_gradient(*here)
            if place > 0:
                d = _input_gradient(*here)
            elif needs_dx:
                dx = base.input_grad(dy, inputs[0].flatten(1, 2).shape)
                if mask is None and dx.is_contiguous():
                    _input_gradient(*here, add_to=dx)
                else:
                    d = _input_gradient(*here).reshape(dx.shape)
                    dx.add_(d if mask is None else d * base.collapsed(mask))
                dx = dx.view(ctx.x_shape).to(ctx.x_dtype)
        gradients = {name: gradient.to(next(iter(part.trained.values())).dtype) for name, gradient in gradients.items()}
        for whole, (a, b) in PAIRS.items():
            if whole in gradients and whole not in part.trained:
                d_whole, (factor_a, factor_b) = gradients[whole].flatten(1), (part.trained[end].detach() for end in (a, b))
                d_whole = d_whole * part.scaling if whole == W1 else d_whole
                gradients |= {a: d_whole @ factor_b.flatten(1).t(), b: (factor_a.t() @ d_whole).view(factor_b.shape)}
        d_trained = [gradients[end].view(tensor.shape) for end, tensor in part.trained.items()]
        if part.scaling != 1 and next(iter(part.trained)) in path:  # `cast` has it times s
            d_trained[0].mul_(part.scaling)
        return None, dx, None, *d_trained
