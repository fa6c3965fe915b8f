"""Whether the device that was asked for is here."""

import re

import torch

from glassformer.spec.errors import InputError, MachineError


def check_device(device: str) -> None:
    """Refuse a device that is not here."""
    number = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device)
    if number is None and device != "cpu":
        raise InputError(f"unknown device '{device[:60]}'", hint="cpu, cuda, or cuda:1")
    if number is None:
        return
    if not torch.cuda.is_available():
        raise MachineError("no CUDA device on this machine", hint="--device cpu")
    if int(number[1] or 0) >= torch.cuda.device_count():
        raise MachineError(
            f"no device {device} on this machine", hint=f"it has {torch.cuda.device_count()}"
        )
