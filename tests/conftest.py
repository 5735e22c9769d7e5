"""A strict process: eight devices, no silent promotion of types, no leaks into Haiku's state."""

import haiku as hk
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
hk.config.set(check_jax_usage=True)
