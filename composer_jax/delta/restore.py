"""Rebuilds the weights of a manifest from a keyframe or from held weights.

Every byte is verified before it is used: a blob before it is decoded, a chunk
after it. The Merkle root of the chunks' hashes was checked when the manifest
was read, and weights leave here only when all their chunks matched it.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from composer_jax.delta import bundle, codec
from composer_jax.delta import store as store_lib


def history(
  store: store_lib.Store, name: str
) -> Iterator[tuple[str, bundle.Manifest]]:
  """Yields (hash, manifest) from `name` backwards, verified link by link.

  Stops at the first version of the run or where `gc` removed the rest.

  Raises:
    ValueError: a manifest is damaged or does not continue the chain.
    FileNotFoundError: `name` itself, or a base that a delta needs, is missing.
  """
  after: bundle.Manifest | None = None
  while name:
    needed = after is None or after.kind == bundle.DELTA
    if not needed and not (store.objects / name).exists():
      return
    manifest = store.manifest(name)
    if after is not None:
      _check_link(store.objects / name, manifest, after)
    yield name, manifest
    name, after = manifest.previous, manifest


def _check_link(path, manifest, after) -> None:
  wrong = (
    manifest.run_id != after.run_id
    or manifest.version >= after.version
    or manifest.target_id != after.base_id
    or (after.kind == bundle.DELTA and manifest.depth + 1 != after.depth)
  )
  if wrong:
    raise ValueError(
      f'{path}: version {manifest.version} ({manifest.target_id}) of run '
      f'{manifest.run_id!r} is not the base of version {after.version} of '
      f'run {after.run_id!r}, which needs {after.base_id}.'
    )


def weights(
  store: store_lib.Store,
  name: str,
  held: tuple[str, Mapping[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
  """Returns the verified weights of the manifest `name`, read-only.

  Args:
    store: where to read.
    name: hash of the manifest.
    held: (target_id, arrays) that may spare the way from the keyframe.

  Raises:
    ValueError: names the tensor or the file that is damaged.
    OSError: an object is missing or unreadable.
  """
  todo: list[bundle.Manifest] = []
  tensors: Mapping[str, np.ndarray] | None = None
  for _, manifest in history(store, name):
    if held is not None and manifest.target_id == held[0]:
      tensors = held[1]
      break
    todo.append(manifest)
    if manifest.kind == bundle.KEY:
      break
  for manifest in reversed(todo):
    tensors = apply(store, manifest, tensors)
  assert tensors is not None  # a chain ends at held weights or a keyframe
  return dict(tensors)


def apply(
  store: store_lib.Store,
  manifest: bundle.Manifest,
  base: Mapping[str, np.ndarray] | None,
) -> dict[str, np.ndarray]:
  """Applies one bundle to a base, which it leaves as it is."""
  if manifest.kind == bundle.KEY:
    base = None
  elif base is None:
    raise ValueError(f'version {manifest.version} needs a base.')
  elif bundle.signature_of(base) != manifest.signature():
    raise ValueError(
      f'version {manifest.version} has other tensors than its base: '
      f'{_difference(bundle.signature_of(base), manifest.signature())}.'
    )
  blobs = _blobs(store, manifest)
  result = {}
  for tensor in manifest.tensors:
    array = np.empty(tensor.shape, bundle.DTYPES[tensor.dtype])
    bits = array.reshape(-1).view(bundle.bits_dtype(array.dtype))
    old = None if base is None else bundle.flat_bits(base[tensor.name])
    parts = bundle.chunk_slices(bits.size)
    for number, (part, chunk) in enumerate(
      zip(parts, tensor.chunks, strict=True)
    ):
      where = f'{tensor.name} (chunk {number}, version {manifest.version})'
      blob = next(blobs)
      if bundle.digest(blob) != chunk.blob_hash:
        raise ValueError(f'{where}: its blob is damaged, the hash is wrong.')
      try:
        bits[part] = codec.decode(
          chunk.codec,
          blob,
          part.stop - part.start,
          bits.dtype,
          None if old is None else old[part],
        )
      except ValueError as error:
        raise ValueError(f'{where}: {error}.') from error
      if bundle.hash_bits(bits[part]) != chunk.post_hash:
        raise ValueError(
          f'{where}: does not decode to the weights that were published; '
          'blob and base do not belong together.'
        )
    array.setflags(write=False)
    result[tensor.name] = array
  return result


def _blobs(
  store: store_lib.Store, manifest: bundle.Manifest
) -> Iterator[bytes]:
  """Yields the blob of each chunk, in order, one object in memory at a time."""
  objects = iter(manifest.objects)
  data, offset = b'', 0
  for tensor in manifest.tensors:
    for chunk in tensor.chunks:
      if chunk.length and offset == len(data):
        digest, length = next(objects, ('', 0))
        try:
          data, offset = store.pack(digest, length) if digest else b'', 0
        except (ValueError, OSError) as error:
          raise ValueError(f'{tensor.name}: {error}') from error
      if offset + chunk.length > len(data):
        raise ValueError(
          f'{tensor.name}: the objects of version {manifest.version} end '
          'before its blobs do.'
        )
      yield data[offset : offset + chunk.length]
      offset += chunk.length


def _difference(left: Mapping, right: Mapping) -> str:
  names = sorted(n for n in {*left, *right} if left.get(n) != right.get(n))
  return ', '.join(f'{n}: {left.get(n)} and {right.get(n)}' for n in names[:5])
