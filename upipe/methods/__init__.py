"""Methods of sharing attention over ranks behind one name: UPipe and the baselines it is compared with."""

from upipe.methods.apply import MethodHandle, apply_method
from upipe.methods.config import NAMES, MethodConfig

__all__ = ["NAMES", "MethodConfig", "MethodHandle", "apply_method"]
