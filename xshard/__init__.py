"""xshard trains Haiku models on accelerator pods: all replicas reduce gradients, and
apply or skip each update, together.
"""

import lazy_loader

# A name is imported when it is first used, so that programs that start no JAX, such as
# the launcher, start at once.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
# A module is no part of what a star imports, as in other packages.
__all__.remove("config")
