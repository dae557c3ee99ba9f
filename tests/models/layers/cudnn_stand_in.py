"""A stand-in for cuDNN's kernel in jax.numpy, for any dtype and machines without cuDNN.

`forward` and `backward` have the signatures of models/layers/cudnn_kernel.py. Results that the
kernel leaves undefined are NaN here, so a wrapper that lets any of them through fails its test.
"""

import jax.numpy as jnp
import pytest

from models.layers import attention, cudnn_kernel


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all attention run as on an H100, with the stand-in as the kernel."""
    selected = attention.SelectedKernel(kernel="cudnn", why="a test")
    monkeypatch.setattr(attention, "select_kernel", lambda *_, **_options: selected)
    monkeypatch.setattr(attention, "_can_pack", lambda: True)
    monkeypatch.setattr(cudnn_kernel, "forward", forward)
    monkeypatch.setattr(cudnn_kernel, "backward", backward)


def forward(q, k, v, bias, lengths, options):
    check(q, k, v, bias, lengths)
    seen = _visible(q, k, lengths, options)
    logits = _logits(q, k, bias, options, seen)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True)
    stats_BNT = (jnp.log(total) + largest)[..., 0]
    weights = jnp.exp(logits - stats_BNT[..., None])
    y = jnp.einsum("BNTS,BSNH->BTNH", weights, _repeated(v, q))
    is_query, _ = _defined(q, k, lengths)
    y = jnp.where(is_query[:, :, None, None], y, jnp.nan)
    stats_BNT = jnp.where(is_query[:, None], stats_BNT, jnp.nan)
    return y, stats_BNT if lengths is None else _to_rows(stats_BNT, q, lengths)


def backward(q, k, v, bias, lengths, options, stats, y, dy):
    check(q, k, v, bias, lengths)
    seen = _visible(q, k, lengths, options)
    is_query, is_key = _defined(q, k, lengths)
    stats_BNT = _to_queries(stats, q, lengths) if lengths is not None else stats
    hidden = ~is_query[:, None, :, None]
    logits = _logits(q, k, bias, options, seen)
    weights = jnp.where(hidden, 0, jnp.exp(logits - stats_BNT[..., None]))
    y, dy = (jnp.where(is_query[:, :, None, None], x, 0) for x in (y, dy))
    k_all = _repeated(k, q)
    v_all = _repeated(v, q)
    dweights = jnp.einsum("BTNH,BSNH->BNTS", dy, v_all)
    shift = jnp.einsum("BTNH,BTNH->BNT", dy, y)[..., None]
    dlogits = weights * (dweights - shift)

    def of_kv_heads(x):
        return x.reshape(*k.shape[:3], -1, x.shape[-1]).sum(axis=3)

    dq = jnp.einsum("BNTS,BSNH->BTNH", dlogits, k_all) * options.scale
    dk = of_kv_heads(jnp.einsum("BNTS,BTNH->BSNH", dlogits, q) * options.scale)
    dv = of_kv_heads(jnp.einsum("BNTS,BTNH->BSNH", weights, dy))
    dbias = None
    if options.has_bias_gradient:
        sums = tuple(dim for dim, size in enumerate(bias.shape) if size == 1)
        dbias = jnp.sum(dlogits, axis=sums, keepdims=True)
    dq = jnp.where(is_query[:, :, None, None], dq, jnp.nan)
    dk, dv = (jnp.where(is_key[:, :, None, None], x, jnp.nan) for x in (dk, dv))
    return dq, dk, dv, dbias


def check(q, k, v, bias, lengths) -> None:
    """Assert that the kernel would accept these arguments."""
    if bias is not None or lengths is not None:
        assert q.shape[1] % 2 == k.shape[1] % 2 == 0
    assert q.shape[3] % 8 == 0
    assert q.shape[2] % k.shape[2] == 0
    assert k.shape == v.shape
    if bias is not None:
        assert bias.shape[2:] == (q.shape[1], k.shape[1])
        assert bias.shape[0] in (1, q.shape[0])
        assert bias.shape[1] in (1, q.shape[2])
        assert lengths is None


def _logits(q, k, bias, options, seen):
    logits = jnp.einsum("BTNH,BSNH->BNTS", q, _repeated(k, q)) * options.scale
    logits = logits if bias is None else logits + bias
    return jnp.where(seen[:, None], logits, -1e300)


def _repeated(x_BSKH, q):
    return jnp.repeat(x_BSKH, q.shape[2] // x_BSKH.shape[2], axis=2)


def _members(x, offsets, lengths):
    """Return each token's index in each document, [R, B, T], and whether it belongs to it.

    Args:
        x: array [B, T, N, H] of the tokens.
        offsets: start of each document, in elements.
        lengths: length of each document, in tokens.
    """
    batch, length, num_heads, head_dim = x.shape
    first = offsets.reshape(-1)[: lengths.size] // (num_heads * head_dim)
    number_BT = jnp.arange(batch * length).reshape(batch, length)
    index = number_BT[None] - first[:, None, None]
    return index, (index >= 0) & (index < lengths.reshape(-1)[:, None, None])


def _in_order(q_index, k_index, options):
    distance = q_index[..., :, None] - k_index[..., None, :]
    seen = (distance >= 0) | (not options.is_causal)
    return seen if options.window is None else seen & (distance < options.window)


def _visible(q, k, lengths, options):
    """Return bool[B, T, S], which keys each query sees."""
    q_index, k_index = (jnp.arange(x.shape[1])[None] for x in (q, k))
    if lengths is None:
        return jnp.broadcast_to(
            _in_order(q_index, k_index, options), (q.shape[0], q.shape[1], k.shape[1])
        )
    q_index, is_query = _members(q, lengths.q_offsets, lengths.q)
    k_index, is_key = _members(k, lengths.k_offsets, lengths.k)
    both = is_query[..., :, None] & is_key[..., None, :]
    return jnp.any(both & _in_order(q_index, k_index, options), axis=0)


def _defined(q, k, lengths):
    """Return which queries and keys have a result, bool[B, T] and bool[B, S]."""
    if lengths is None:
        return jnp.ones(q.shape[:2], bool), jnp.ones(k.shape[:2], bool)
    members = ((q, lengths.q_offsets, lengths.q), (k, lengths.k_offsets, lengths.k))
    return tuple(jnp.any(_members(*of)[1], axis=0) for of in members)


def _to_rows(stats_BNT, q, lengths):
    """Return statistics per document, `[R, N, T]`, with NaN after a document's last query."""
    index, is_in = _members(q, lengths.q_offsets, lengths.q)
    # [R, B, T, position in the document]
    at = is_in[..., None] & (index[..., None] == jnp.arange(q.shape[1]))
    rows = jnp.einsum("RBTP,BNT->RNP", at.astype(stats_BNT.dtype), _finite(stats_BNT))
    return jnp.where(jnp.any(at, axis=(1, 2))[:, None], rows, jnp.nan)


def _to_queries(stats_RNT, q, lengths):
    """Return the statistics of each query, `[B, N, T]`, from statistics per document."""
    index, is_in = _members(q, lengths.q_offsets, lengths.q)
    at = is_in[..., None] & (index[..., None] == jnp.arange(q.shape[1]))
    return jnp.einsum("RBTP,RNP->BNT", at.astype(stats_RNT.dtype), _finite(stats_RNT))


def _finite(x):
    return jnp.where(jnp.isnan(x), 0, x)
