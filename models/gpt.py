"""GPT: a transformer that predicts the next token of a text, and generates text by sampling."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.models.checks import check_dropout
from stoker.trainer.errors import UserError, check_number

INIT_STD = 0.02
Past = list[Tensor]  # KV cache of a block: keys and values of the tokens so far, or empty


class GPT(nn.Module):
    """Map token ids (N, T) to next-token logits (N, num_classes, T).

    The architecture and the initial weights are those of GPT-2 (Radford et al. 2019, "Language
    Models are Unsupervised Multitask Learners"), with the exact GELU: learned positions, norms
    before attention and MLP, and an output layer that shares its weights with the embedding. T is
    at most `in_shape[0]`.

    The logits are a transposed view of (N, T, num_classes), because torch's losses and the metrics
    expect the classes in the second dimension.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(in_shape) != 1:
            raise UserError(
                f"model: gpt takes tokens, but these inputs have shape {tuple(in_shape)}.\n"
                "Type dataset=text, or another model."
            )
        check_number("model.layers", layers, whole=True, least=1)
        check_number("model.heads", heads, whole=True, least=1)
        if width < 1 or width % heads:
            raise UserError(
                f"model.width={width}: expected a positive multiple of model.heads={heads}."
            )
        check_dropout(dropout)
        self.length: int = in_shape[0]
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(self.length, width)
        self.dropout = nn.Dropout(dropout)
        blocks = [Block(width, heads, dropout) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # Each block adds two terms to the residual stream, so start them small, as in GPT-2.
        for block in blocks:
            for last in (block.attention.out, block.shrink):
                nn.init.normal_(last.weight, std=INIT_STD / math.sqrt(2 * layers))

    def forward(self, inputs: Tensor, past: list[Past] | None = None) -> Tensor:
        """Return the logits. With `past`, the inputs continue the tokens in this KV cache."""
        start = past[0][0].shape[2] if past and past[0] else 0
        places = torch.arange(start, start + inputs.shape[1], device=inputs.device)
        x = self.dropout(self.tokens(inputs) + self.positions(places))
        for i, block in enumerate(self.blocks):
            x = block(x, past[i] if past else None)
        # The output layer uses the embedding's weight, so checkpoints contain this weight once.
        return functional.linear(self.norm(x), self.tokens.weight).transpose(1, 2)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the tokens (N, T) followed by `count` more, sampled one at a time.

        When the context is full, generation continues from the second half of the context.

        Args:
            tokens: At least one token per sample; the model sees only the last `length` of them.
            count: How many tokens to add.
            temperature: Divides the logits. At 0, the token with the highest logit is chosen.
            top_k: Sample only from the `top_k` tokens with the highest logits.
            generator: A CPU generator; tokens are always drawn on the CPU.
        """
        past: list[Past] = [[] for _ in self.blocks]
        new = tokens[:, -self.length :]
        for _ in range(count):
            # Do not call self(...): a compiled model would be recompiled for each length.
            logits = self.forward(new, past)[:, :, -1]
            new = choose(logits.cpu().float(), temperature, top_k, generator).to(tokens.device)
            tokens = torch.cat([tokens, new], 1)
            if past[0][0].shape[2] == self.length:
                past = [[] for _ in self.blocks]
                new = tokens[:, -max(1, self.length // 2) :]
        return tokens


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection; inputs are (N, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), past)
        hidden = functional.gelu(self.widen(self.mlp_norm(x)))
        outputs: Tensor = x + self.dropout(self.shrink(hidden))
        return outputs


class Attention(nn.Module):
    """Causal multi-head self-attention: a token attends to itself and all earlier tokens."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        samples, count, width = x.shape
        qkv = self.qkv(x).view(samples, count, 3, self.heads, width // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # each (N, heads, T, size)
        # With a cache, there is a single new token, which attends to all the others.
        is_causal = not past
        if past:
            keys = torch.cat([past[0], keys], 2)
            values = torch.cat([past[1], values], 2)
        if past is not None:
            past[:] = [keys, values]
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
        )
        joined = mixed.transpose(1, 2).reshape(samples, count, width)
        outputs: Tensor = self.out_dropout(self.out(joined))
        return outputs


def choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Draw a token (N, 1) from logits (N, classes); at temperature 0, take the likeliest."""
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    if top_k is not None:
        lowest = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -math.inf)
    # Shift the highest logit to 0, so that a low temperature cannot make it infinite.
    shares = ((logits - logits.amax(1, keepdim=True)) / temperature).softmax(1)
    return torch.multinomial(shares, 1, generator=generator)


def take_rows(loss: Any) -> None:
    """Let nn.CrossEntropyLoss read (N, C, ...) outputs stored channels-last as (M, C) rows.

    Otherwise torch copies them to move the class dimension to position 1. For 128 tokens and 8,192
    classes, forward and backward including the last layer take 227 ms with the copy and 150 ms
    without it (one core of an AMD EPYC).
    """
    if isinstance(loss, nn.CrossEntropyLoss):
        loss.register_forward_pre_hook(rows_of_classes)


def rows_of_classes(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
    """Return views (M, C) of the outputs and (M,) of the targets, or None if that needs a copy."""
    outputs, targets = arguments
    if outputs.ndim < 3 or outputs.stride(1) != 1 or targets.ndim != outputs.ndim - 1:
        return None
    return outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
