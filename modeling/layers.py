"""One decoder layer of the Llama / Qwen2 / Qwen3 kind over flat rows, shared by target, draft model, adapter and
decoder.

Rows carry no batch dimension: the caller says through the mask which row may see which key. Query heads that share a
key/value head are folded into the rows of one attention call, which is several times faster on a CPU than expanding
keys.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.architecture import Architecture, inverse_frequencies
from modeling.kernels.fused import FusedLayer, LayerParts
from modeling.kernels.int8 import Quantization
from modeling.kernels.packed import PackedWeight, Weight, can_pack, linear, pack, pack_parameters, unpacked


@dataclass(frozen=True)
class Heads:
    """Projected rows: query [..., rows, heads, dim], key and value [..., rows, kv_heads, dim]; RoPE is applied."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __getitem__(self, rows: slice) -> "Heads":
        """Some of flat rows [rows, heads, dim]."""
        return Heads(self.query[rows], self.key[rows], self.value[rows])


@dataclass(frozen=True)
class Rotary:
    """cos and signed sin [rows, 1, head_dim] of some positions, in the dtype of the rows they turn."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: Tensor | slice) -> "Rotary":
        return Rotary(self.cos[rows], self.sin[rows])


class RotaryTable:
    """cos and sin of all positions, computed once in fp32 and kept in the working dtype."""

    def __init__(
        self, architecture: Architecture, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies, scale = inverse_frequencies(architecture)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        cos = torch.cat((angles.cos(), angles.cos()), dim=-1) * scale
        sin = torch.cat((-angles.sin(), angles.sin()), dim=-1) * scale
        self._table = Rotary(cos[:, None, :].to(device, dtype), sin[:, None, :].to(device, dtype))

    def at(self, positions: Tensor) -> Rotary:
        """Entries for integer positions of any shape [...]: cos and sin [..., 1, head_dim]."""
        return self._table[positions]

    def span(self, start: int, stop: int) -> Rotary:
        """Entries of positions start..stop-1, without a copy."""
        return self._table[slice(start, stop)]


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE (half rotation) to [..., rows, heads, dim]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * rotary.cos, swapped, rotary.sin)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32 inside, as the published models compute it."""
    wide = rows.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(rows.dtype) * weight


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Masked attention of rows against a key store.

    query [..., rows, heads, dim]; key, value [..., kv_heads, keys, dim]; mask from `grouped_mask` [..., 1,
    group*rows, keys].
    Returns [..., rows, heads*dim].
    """
    folded = _fold_heads(query, key.shape[-3])
    if query.dim() == 3:
        out = F.scaled_dot_product_attention(folded[None], key[None], value[None], attn_mask=mask[None])[0]
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask)
    return _unfold_heads(out, query)


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, size: int) -> Tensor:
    """As `attend`, over `size` keys at a time: further keys that a row does not see leave its bits alone.

    A sum over all keys at once is ordered by their number on some CPUs. Here a block of hidden keys adds zeros.
    """
    folded = _fold_heads(query, key.shape[-3]).float() * query.shape[-1] ** -0.5
    blocks = list(zip(*(part.split(size, dim=-2) for part in (key, value)), mask.split(size, dim=-1), strict=True))
    scores = [folded @ keys.float().transpose(-1, -2) + hidden for keys, _, hidden in blocks]
    largest = torch.stack([block.amax(-1, keepdim=True) for block in scores]).amax(0)
    total, out = torch.zeros_like(largest), torch.zeros_like(folded)
    for block, (_, values, _) in zip(scores, blocks, strict=True):
        weights = (block - largest).exp()
        total, out = total + weights.sum(-1, keepdim=True), out + weights @ values.float()
    return _unfold_heads((out / total).to(query.dtype), query)


def _fold_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """Query heads [..., rows, heads, dim] that share a key head as rows of it: [..., kv_heads, group*rows, dim]."""
    *lead, num_rows, num_heads, head_dim = query.shape
    folded = query.reshape(*lead, num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return folded.movedim(-4, -2).reshape(*lead, num_kv_heads, -1, head_dim)


def _unfold_heads(out: Tensor, query: Tensor) -> Tensor:
    """The reverse of `_fold_heads`, heads side by side: [..., rows, heads*dim]."""
    *lead, num_rows, num_heads, head_dim = query.shape
    out = out.reshape(*lead, out.shape[-3], -1, num_rows, head_dim).movedim(-2, -4)
    return out.reshape(*lead, num_rows, num_heads * head_dim)


def grouped_mask(visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [..., 1, group*rows, keys] of 0 and -inf from a boolean [..., rows, keys]; made once for all
    layers."""
    additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return torch.cat([additive] * group, dim=-2).unsqueeze(-3)


@dataclass(frozen=True)
class FusedHalves:
    """A frozen layer's C calls: the layer, and its keys and values of context rows with and without the input norm."""

    whole: FusedLayer
    normed_context: FusedLayer
    plain_context: FusedLayer


def _packed(weight: Weight) -> PackedWeight:
    assert isinstance(weight, PackedWeight), "the layer is packed"
    return weight


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU with fused qkv and gate/up weights."""

    qkv: nn.Parameter | PackedWeight
    out: nn.Parameter | PackedWeight
    gate_up: nn.Parameter | PackedWeight
    down: nn.Parameter | PackedWeight

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype = torch.float32, *, initialise: bool = True
    ) -> None:
        """`initialise` False leaves the matrices unset, for a loader that fills all of them."""
        super().__init__()
        shape = self.architecture = architecture
        self.fused: FusedHalves | None = None
        self.input_norm = nn.Parameter(torch.ones(shape.hidden_size, dtype=dtype))
        self.qkv = nn.Parameter(torch.empty(shape.query_width + 2 * shape.kv_width, shape.hidden_size, dtype=dtype))
        self.qkv_bias = (
            nn.Parameter(torch.zeros(shape.query_width + 2 * shape.kv_width, dtype=dtype))
            if shape.attention_bias
            else None
        )
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim, dtype=dtype)) if shape.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim, dtype=dtype)) if shape.qk_norm else None
        self.out = nn.Parameter(torch.empty(shape.hidden_size, shape.query_width, dtype=dtype))
        self.post_norm = nn.Parameter(torch.ones(shape.hidden_size, dtype=dtype))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.intermediate_size, shape.hidden_size, dtype=dtype))
        self.down = nn.Parameter(torch.empty(shape.hidden_size, shape.intermediate_size, dtype=dtype))
        for weight in (self.qkv, self.out, self.gate_up, self.down) if initialise else ():
            nn.init.normal_(unpacked(weight), std=0.02)

    def project(self, hidden: Tensor, rotary: Rotary) -> Heads:
        """Queries, keys and values of rows [..., rows, hidden], input norm included."""
        shape = self.architecture
        if self.fused is not None:
            return self._split(self.fused.whole.project(hidden, rotary.cos, rotary.sin), shape.num_heads)
        normed = rms_norm(hidden, self.input_norm, shape.rms_eps)
        fused = linear(normed, self.qkv, self.qkv_bias).unflatten(-1, (-1, shape.head_dim))
        split = shape.num_heads + shape.num_kv_heads
        turned = fused[..., :split, :]
        if self.q_norm is not None and self.k_norm is not None:
            query = rms_norm(turned[..., : shape.num_heads, :], self.q_norm, shape.rms_eps)
            key = rms_norm(turned[..., shape.num_heads :, :], self.k_norm, shape.rms_eps)
            turned = torch.cat((query, key), dim=-2)
        turned = rotate(turned, rotary)
        return Heads(turned[..., : shape.num_heads, :], turned[..., shape.num_heads :, :], fused[..., split:, :])

    def context(self, rows: Tensor, rotary: Rotary, *, normalise: bool) -> Heads:
        """Keys and values of context rows [..., rows, hidden], which never become queries (query is empty).

        `normalise` applies the input norm: true for raw residual states (adapter, decoder), false for the draft model's
        context feature, which its own norm has scaled already.
        """
        shape = self.architecture
        if self.fused is not None:
            half = self.fused.normed_context if normalise else self.fused.plain_context
            return self._split(half.project(rows, rotary.cos, rotary.sin), 0)
        if normalise:
            rows = rms_norm(rows, self.input_norm, shape.rms_eps)
        bias = None if self.qkv_bias is None else self.qkv_bias[shape.query_width :]
        weight = unpacked(self.qkv)[shape.query_width :]
        fused = linear(rows, weight, bias).unflatten(-1, (-1, shape.head_dim))
        key = fused[..., : shape.num_kv_heads, :]
        if self.k_norm is not None:
            key = rms_norm(key, self.k_norm, shape.rms_eps)
        return Heads(key[..., :0, :], rotate(key, rotary), fused[..., shape.num_kv_heads :, :])

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, MLP, residual."""
        if self.fused is not None:
            return self.fused.whole.finish(residual, attended)
        hidden = residual + linear(attended, self.out)
        normed = rms_norm(hidden, self.post_norm, self.architecture.rms_eps)
        gate, up = linear(normed, self.gate_up).chunk(2, dim=-1)
        return hidden + linear(F.silu(gate) * up, self.down)

    def _split(self, turned: Tensor, num_heads: int) -> Heads:
        num_kv_heads = self.architecture.num_kv_heads
        return Heads(*turned.split((num_heads, num_kv_heads, num_kv_heads), dim=1))

    def pack(self, quantization: Quantization = "none") -> None:
        """Freeze the layer for inference on the row-independent kernels, where there are some; rows are flat then."""
        if isinstance(self.qkv, PackedWeight) or not can_pack(self.qkv):
            return
        kv = self.qkv[self.architecture.query_width :]
        pack_parameters(self, ("qkv", "out", "gate_up", "down"), quantization)
        assert isinstance(self.qkv, PackedWeight), "packing replaces the parameter"
        self.fused = self._fuse(self.qkv, self.qkv.rows_from(self.architecture.query_width) or pack(kv, quantization))

    def _fuse(self, qkv: PackedWeight, kv: PackedWeight) -> "FusedHalves":
        shape = self.architecture
        whole = LayerParts(
            hidden=shape.hidden_size,
            intermediate=shape.intermediate_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            dim=shape.head_dim,
            query_width=shape.query_width,
            eps=shape.rms_eps,
            qkv=qkv,
            input_norm=self.input_norm.data,
            qkv_bias=None if self.qkv_bias is None else self.qkv_bias.data,
            q_norm=None if self.q_norm is None else self.q_norm.data,
            k_norm=None if self.k_norm is None else self.k_norm.data,
            out=_packed(self.out),
            post_norm=self.post_norm.data,
            gate_up=_packed(self.gate_up),
            down=_packed(self.down),
        )
        bias = None if self.qkv_bias is None else self.qkv_bias.data[shape.query_width :].clone()
        normed = replace(whole, heads=0, qkv=kv, qkv_bias=bias, q_norm=None)
        plain = replace(normed, input_norm=None)
        return FusedHalves(FusedLayer(whole), FusedLayer(normed), FusedLayer(plain))


def fill_parameter(parameter: Tensor, value: Tensor, name: str) -> None:
    """Copy a loaded tensor into a parameter; raises ValueError with its name where a copy would broadcast it."""
    if parameter.shape != value.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(parameter.shape)}")
    parameter.data.copy_(value)


def load_layer(layer: DecoderLayer, tensors: dict[str, Tensor], prefix: str) -> None:
    """Fill a layer from published names (`<prefix>self_attn.q_proj.weight`, ...).

    Raises KeyError naming a missing tensor, ValueError naming one of another shape or one that would be dropped.
    """
    if f"{prefix}self_attn.o_proj.bias" in tensors:
        raise ValueError(f"{prefix}self_attn.o_proj.bias: a bias on the output projection is not supported")

    def take(name: str) -> Tensor:
        return tensors[prefix + name]

    def fill(parameter: Tensor, value: Tensor, name: str) -> None:
        fill_parameter(parameter, value, prefix + name)

    projections = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
    fill(unpacked(layer.qkv), torch.cat([take(p + "weight") for p in projections]), "self_attn.{q,k,v}_proj.weight")
    if layer.qkv_bias is not None:
        fill(layer.qkv_bias, torch.cat([take(p + "bias") for p in projections]), "self_attn.{q,k,v}_proj.bias")
    if layer.q_norm is not None and layer.k_norm is not None:
        fill(layer.q_norm, take("self_attn.q_norm.weight"), "self_attn.q_norm.weight")
        fill(layer.k_norm, take("self_attn.k_norm.weight"), "self_attn.k_norm.weight")
    fill(unpacked(layer.out), take("self_attn.o_proj.weight"), "self_attn.o_proj.weight")
    fill(
        unpacked(layer.gate_up),
        torch.cat([take("mlp.gate_proj.weight"), take("mlp.up_proj.weight")]),
        "mlp.{gate,up}_proj.weight",
    )
    fill(unpacked(layer.down), take("mlp.down_proj.weight"), "mlp.down_proj.weight")
    fill(layer.input_norm, take("input_layernorm.weight"), "input_layernorm.weight")
    fill(layer.post_norm, take("post_attention_layernorm.weight"), "post_attention_layernorm.weight")


def layer_tensors(layer: DecoderLayer, prefix: str) -> dict[str, Tensor]:
    """The inverse of `load_layer`: contiguous tensors under published names."""
    shape = layer.architecture
    query, key, value = unpacked(layer.qkv).data.split((shape.query_width, shape.kv_width, shape.kv_width))
    gate, up = unpacked(layer.gate_up).data.chunk(2)
    named = {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": unpacked(layer.out).data,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": unpacked(layer.down).data,
        "input_layernorm.weight": layer.input_norm.data,
        "post_attention_layernorm.weight": layer.post_norm.data,
    }
    if layer.qkv_bias is not None:
        biases = layer.qkv_bias.data.split((shape.query_width, shape.kv_width, shape.kv_width))
        named |= {f"self_attn.{n}_proj.bias": b for n, b in zip("qkv", biases, strict=True)}
    if layer.q_norm is not None and layer.k_norm is not None:
        named |= {"self_attn.q_norm.weight": layer.q_norm.data, "self_attn.k_norm.weight": layer.k_norm.data}
    return {prefix + name: tensor.contiguous() for name, tensor in named.items()}


def block_layer(layer: DecoderLayer, hidden: Tensor, rotary: Rotary, context: Heads, mask: Tensor) -> Tensor:
    """One layer over rows [..., rows, hidden] whose keys are `context` [..., keys, kv_heads, dim] and then the rows'
    own.

    The form that training uses: nothing is written anywhere. mask [..., 1, group*rows, keys + rows].
    """
    heads = layer.project(hidden, rotary)
    key = torch.cat((context.key, heads.key), dim=-3).transpose(-3, -2)
    value = torch.cat((context.value, heads.value), dim=-3).transpose(-3, -2)
    return layer.finish(hidden, attend(heads.query, key, value, mask))
