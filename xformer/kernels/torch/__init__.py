"""torch kernels: the library's own fused functions.

Outside our own differentiation (`save=False`) they are public functions, which torch differentiates and compiles.
Inside it, they are the pairs of forward and backward functions that torch's autograd itself calls, because arrays do
not require grad there, and inference mode has no autograd. A kernel does not write to its inputs, except for Adam's.
"""

from xformer.kernels.torch import attention as attention
from xformer.kernels.torch import elementwise as elementwise
from xformer.kernels.torch import linear as linear
from xformer.kernels.torch import optimizer as optimizer
from xformer.kernels.torch import rowwise as rowwise
