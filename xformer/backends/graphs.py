"""Work that is recorded once and repeated as a whole, where a library can."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from xformer.backends import Namespace, backend_name
from xformer.environment import env_value

Work = Callable[[], Any]


def recorder(xp: Namespace) -> Callable[[Work], Work] | None:
    """What makes of work one that does the same again, faster; None where the library cannot, or is told not to.

    The work must read and write arrays that stay where they are, and nothing on the host.
    """
    if backend_name(xp) != "cupy" or env_value("XFORMER_KERNELS") == "portable":
        return None
    found: Callable[[Work], Work] = importlib.import_module("xformer.kernels.cupy.graph").record
    return found
