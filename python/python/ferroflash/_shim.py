"""Existing code's `import flash_attn`, on request."""

import importlib.util
import sys

_NAME = __package__ + "._flash_attn"


def install_as_flash_attn() -> None:
    """Makes `import flash_attn` find this package's functions, in this process from now on.

    There are `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding`, which
    needs torch. To be called before anything imports the real one; RuntimeError if that has been.
    """
    there = sys.modules.get("flash_attn")
    if there is not None and there.__name__ != _NAME:
        raise RuntimeError("flash_attn: another one has been imported already")
    parts = ["", ".flash_attn_interface"]
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        parts.append(".bert_padding")
    for part in parts:
        sys.modules["flash_attn" + part] = importlib.import_module(_NAME + part)
