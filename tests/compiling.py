"""How tests compile what need not be fast."""

import jax

# For `jax.jit` of `decoder.init`: its many random numbers take four seconds to
# compile, or one with these. They change the last bits.
INIT = {'xla_backend_optimization_level': 0}
# In seconds instead of tens of them. Not for tests that promise bits.
QUICKLY: dict[str, bool | int] = {'xla_backend_optimization_level': 0}
# As users' programs are compiled, whatever tests/conftest.py says: for tests
# that promise bits among programs of different meshes.
AS_USERS_DO: dict[str, bool | int] = {'xla_backend_optimization_level': 3}
# Quickly, and yet with the usual order of sums.
ORDERLY: dict[str, bool | int] = {'xla_backend_optimization_level': 0}
if jax.__version_info__ < (0, 11):
  AS_USERS_DO['xla_cpu_use_fusion_emitters'] = True
  ORDERLY['xla_cpu_use_fusion_emitters'] = True
  # Without the emitters it takes a fifth of the time again; later versions of
  # XLA have no other way.
  QUICKLY['xla_cpu_use_fusion_emitters'] = False
