"""Checks and layers shared by several architectures."""

from typing import Literal

from torch import nn

from repro.measure.checks import whole


def check_at_least(minimum: int, **options: int) -> None:
    """Refuse the first option, by its name, that is no integer of at least `minimum`."""
    for name, value in options.items():
        whole(name, value, minimum)


def check_form(step: int, rest: int = 0, **options: int) -> None:
    """Refuse an option, by its name, that is no multiple of `step` plus `rest`."""
    for name, value in options.items():
        if over := (value - rest) % step:
            raise ValueError(
                f"{name} is {value}, but must be {step} n + {rest}: pass {name}={value - over} or "
                f"{name}={value - over + step}"
            )


def he_normal(model: nn.Module, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Draw the weights of convolutions from N(0, 2 / fan), He et al. 2015, equations 10 and 14."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")


def conv_bn(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Module:
    """A padded convolution and BatchNorm: (B, C_in, H, W) to (B, C_out, ⌈H/stride⌉, ⌈W/stride⌉)."""
    padding = kernel_size // 2
    # No bias: BatchNorm would subtract it again.
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def conv_bn_relu(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1
) -> nn.Module:
    """`conv_bn` and a ReLU."""
    return nn.Sequential(
        conv_bn(in_channels, out_channels, kernel_size, stride), nn.ReLU(inplace=True)
    )
