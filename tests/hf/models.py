"""Runs tiny transformers models with random weights beside our decoder.

Both sides compute in float32 on one thread.
"""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from composer_jax.core import trees
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head
from tests import compiling
from tests.hf import views

torch.set_num_threads(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Tokens of documents; our decoder takes several documents in a row.

  Attributes:
    tokens_BT: int32.
    segment_ids_BT: int32; 0 marks padding.
    positions_BT: int32.
  """

  tokens_BT: np.ndarray
  segment_ids_BT: np.ndarray
  positions_BT: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """Outputs in which both models are compared.

  Attributes:
    logits_BTV: zero on padding.
    expert_ids_MBTA: sorted along A; zero on padding.
    gradients: gradients of the mean cross-entropy, by transformers' names.
  """

  logits_BTV: np.ndarray
  expert_ids_MBTA: np.ndarray
  gradients: dict[str, np.ndarray]


def make(fields: dict[str, Any], seed: int) -> Any:
  """Returns a transformers model whose weights keep activations near one."""
  # `for_model` writes into nested dictionaries.
  config = transformers.AutoConfig.for_model(**copy.deepcopy(fields))
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation='eager', experts_implementation='eager'
  )
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, tensor in model.state_dict(keep_vars=True).items():
      noise = torch.randn(tensor.shape, generator=generator)
      if 'norm' in name:
        tensor.copy_(1 + 0.2 * noise)
      elif tensor.ndim == 1:
        # Biases; that of the selection makes some scores negative.
        tensor.copy_(0.5 * noise)
      else:
        tensor.copy_(noise * tensor.shape[-1] ** -0.5)
  return model


def batch(seed: int, lengths: list[list[int]], vocab_size: int) -> Batch:
  """Returns rows of documents of the given lengths, padded to the longest."""
  rng = np.random.default_rng(seed)
  shape = (len(lengths), max(sum(row) for row in lengths))
  segment_ids_BT, positions_BT = np.zeros((2, *shape), np.int32)
  for row, documents in enumerate(lengths):
    start = 0
    for segment, length in enumerate(documents):
      here = slice(start, start + length)
      segment_ids_BT[row, here] = segment + 1
      positions_BT[row, here] = np.arange(length)
      start += length
  return Batch(
    tokens_BT=rng.integers(vocab_size, size=shape, dtype=np.int32),
    segment_ids_BT=segment_ids_BT,
    positions_BT=positions_BT,
  )


def as_stored(tensors: dict[str, Any]) -> dict[str, Any]:
  """Names tensors as checkpoints do; transformers stacks experts in memory."""
  stored = {}
  for name, tensor in tensors.items():
    start, _, last = name.partition('.mlp.experts.')
    kinds = ('gate', 'up') if last == 'gate_up_proj' else ('down',)
    for expert, matrix in enumerate(tensor) if last else ():
      size = len(matrix) // len(kinds)
      for i, kind in enumerate(kinds):
        half = matrix[i * size : (i + 1) * size]
        stored[f'{start}.mlp.experts.{expert}.{kind}_proj.weight'] = half
    if not last:
      stored[name] = tensor
  return stored


def to_ours(
  model: Any, config: model_config.ModelConfig, family: str
) -> tuple[decoder.Variables, names.Table]:
  """Returns our variables for a transformers model, and the table used."""
  table = names.tensors(config, family)
  state = {name: t.numpy() for name, t in as_stored(model.state_dict()).items()}
  if config.tie_embeddings:
    del state['lm_head.weight']
  assert {n: t.shape for n, t in table.items()} == {
    n: t.shape for n, t in state.items()
  }
  shapes, _ = decoder.abstract(config)
  arrays = jax.tree.map(
    lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), shapes
  )
  flat = trees.flatten_names(arrays)
  for tensor in table.values():
    for part in tensor.parts:
      flat[part.array][part.index] = views.block(part, state[tensor.name])
  return arrays, table


def to_theirs(
  variables: decoder.Variables, table: names.Table
) -> dict[str, np.ndarray]:
  """Returns the tensors of a checkpoint that the variables have."""
  flat = trees.flatten_names(variables)
  tensors = {}
  for tensor in table.values():
    if tensor.parts[0].array in flat:
      tensors[tensor.name] = np.full(tensor.shape, np.nan, np.float32)
      for part in tensor.parts:
        values = np.asarray(flat[part.array])[part.index]
        views.put(part, values, tensors[tensor.name])
  return tensors


class Ours:
  """Our model of a config; compiled once for each shape of batch."""

  def __init__(self, fields: dict[str, Any]):
    config, self.family, _ = hf_config.from_hf(fields)
    self.config = dataclasses.replace(
      config, compute_dtype='float32', remat=False
    )
    self._run = jax.jit(
      jax.value_and_grad(self._loss, has_aux=True),
      compiler_options=compiling.INIT,
    )

  def _loss(self, params, bias, batch):
    variables = {'params': params, **bias}
    out = decoder.Decoder(self.config).apply(variables, *batch)
    logits_BTV = head.logits(variables, out.hidden_BTD, self.config)
    tokens_BT, segment_ids_BT, _ = batch
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    targets_BT1 = tokens_BT[:, 1:, None]
    logprobs_BT = jnp.take_along_axis(logprobs_BTV, targets_BT1, -1)[..., 0]
    same_BT = segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]
    counts_BT = same_BT & (segment_ids_BT[:, 1:] != 0)
    # A single token has no loss, which must be zero and not 0 / 0.
    loss = -(logprobs_BT * counts_BT).sum() / jnp.maximum(counts_BT.sum(), 1)
    return loss, (logits_BTV, out.expert_ids_MBTA)

  def run(
    self, variables: decoder.Variables, table: names.Table, batch: Batch
  ) -> Result:
    arrays = (batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT)
    bias = {k: v for k, v in variables.items() if k != 'params'}
    (_, (logits_BTV, ids_MBTA)), gradients = self._run(
      variables['params'], bias, arrays
    )
    valid_BT1 = (batch.segment_ids_BT != 0)[..., None]
    return Result(
      logits_BTV=np.where(valid_BT1, logits_BTV, 0),
      expert_ids_MBTA=np.where(valid_BT1, np.sort(ids_MBTA, -1), 0),
      gradients=to_theirs({'params': gradients}, table),
    )


def run_theirs(model: Any, batch: Batch) -> Result:
  """Runs rows of one document as one padded batch, the others one by one."""
  routers = [
    layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, 'gate')
  ]
  recorded = [[] for _ in routers]
  hooks = [
    router.register_forward_hook(
      lambda module, inputs, output, ids=ids: ids.append(output[2].numpy())
    )
    for router, ids in zip(routers, recorded, strict=True)
  ]
  B, T = batch.tokens_BT.shape
  logits_BTV = torch.zeros(B, T, model.config.vocab_size)
  ids_MBTA = np.zeros((len(routers), B, T, routers[0].top_k), int)
  single = [row for row in range(B) if batch.segment_ids_BT[row].max() == 1]
  spans = [(single, slice(0, T))] if single else []
  for row in set(range(B)) - set(single):
    segments_T = batch.segment_ids_BT[row]
    for segment in range(1, segments_T.max() + 1):
      (places,) = np.nonzero(segments_T == segment)
      spans.append(([row], slice(places[0], places[-1] + 1)))
  losses, count = [], 0
  for rows, span in spans:
    tokens_BT = torch.tensor(batch.tokens_BT[rows, span], dtype=torch.long)
    mask_BT = torch.tensor(batch.segment_ids_BT[rows, span] != 0)
    output = model(input_ids=tokens_BT, attention_mask=mask_BT.long())
    shown_BTV = torch.where(mask_BT[..., None], output.logits, 0)
    logits_BTV[rows, span] = shown_BTV.detach()
    for layer, ids in enumerate(recorded):
      ids_BTA = np.sort(ids.pop(), -1).reshape(*tokens_BT.shape, -1)
      ids_MBTA[layer, rows, span] = np.where(mask_BT[..., None], ids_BTA, 0)
    targets_BT = torch.where(mask_BT, tokens_BT, -100)[:, 1:]
    count += int((targets_BT != -100).sum())
    losses.append(
      torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1),
        targets_BT.flatten(),
        reduction='sum',
      )
    )
  for hook in hooks:
    hook.remove()
  model.zero_grad()
  (sum(losses) / max(count, 1)).backward()
  return Result(
    logits_BTV=logits_BTV.numpy(),
    expert_ids_MBTA=ids_MBTA,
    gradients={
      name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
      for name, p in model.named_parameters()
    },
  )
