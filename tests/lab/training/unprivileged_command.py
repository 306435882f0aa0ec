"""``solo-ext`` as somebody for whom permissions of files hold, also where tests run as root.

python unprivileged_command.py WORD...
"""

from __future__ import annotations

import ctypes
import os
import sys

VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
"""Capabilities of Linux by which root writes and reads what no permission lets it."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def can_be_bound() -> bool:
    """Whether permissions can be made to hold for a process that is started here."""
    return os.geteuid() != 0 or hasattr(ctypes.CDLL(None), "capset")


def give_up_privileges() -> None:
    """Of this thread, and of those it starts.

    Raises:
        OSError: the system refuses.
    """
    system = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(VERSION_3, 0), (_Sets * 2)()
    if system.capget(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capget")
    kept = ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH) & 0xFFFFFFFF
    for name, _ in _Sets._fields_:
        setattr(sets[0], name, getattr(sets[0], name) & kept)
    if system.capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    if os.geteuid() == 0:
        give_up_privileges()
    from solo_ext.lab.cli.main import main

    sys.exit(main(sys.argv[1:]))
