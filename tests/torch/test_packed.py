"""Weights laid out for the CPU, and which of them are 4 bits in truth."""

import pytest
import torch
from torch import Tensor

from minisgl.model.packed import FEW_ROWS, PackedWeight, can_pack, in_four_bits


def made_of_levels(rows: int, columns: int, offset: float = 0.0) -> Tensor:
    """[rows, columns] float32 as a 4-bit file has it: of 16 levels for each 32 inputs."""
    generator = torch.Generator().manual_seed(rows + columns)
    levels = torch.randint(0, 16, (rows, columns // 32, 32), generator=generator)
    levels[..., 0], levels[..., 1] = 0, 15  # steps are chosen so that the ends are reached
    step = torch.rand(rows, columns // 32, 1, generator=generator) * 0.02 + 0.001
    return (levels * step - 7.5 * step + offset * step).view(rows, columns)


def restored(found: tuple[Tensor, Tensor]) -> Tensor:
    levels, scales = found
    step, middle = scales.transpose(0, 1).float().unbind(-1)  # [N, G] each
    groups = levels.view(*step.shape, 32)
    return ((groups - 8) * step[..., None] + middle[..., None]).view_as(levels)


@pytest.mark.parametrize("offset", [0.0, 3.0, -7.5, 7.5])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (2048, 64)])
def test_weights_of_16_levels_are_found_within_the_rounding_of_bfloat16(rows: int, columns: int, offset: float) -> None:
    weight = made_of_levels(rows, columns, offset)
    found = in_four_bits(weight.bfloat16())
    assert found is not None
    assert found[0].min() >= 0
    assert found[0].max() <= 15
    largest = weight.view(rows, -1, 32).abs().amax(-1, keepdim=True)
    error = (restored(found) - weight).abs().view(rows, -1, 32)
    assert (error <= largest * 2**-6).all()
    assert error.norm() <= 2**-8 * weight.norm()


def test_a_group_of_one_value_is_four_bits_too() -> None:
    weight = made_of_levels(16, 64)
    weight[3, 32:] = 0.0
    weight[5, :32] = -0.25
    found = in_four_bits(weight.bfloat16())
    assert found is not None
    assert (restored(found)[3, 32:] == 0).all()
    assert (restored(found)[5, :32] == -0.25).all()


@pytest.mark.parametrize("columns", [64, 576])
def test_ordinary_weights_are_not_mistaken_for_four_bits(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    assert in_four_bits(torch.randn(64, columns, generator=generator).bfloat16()) is None


def test_one_weight_off_its_level_is_enough_to_refuse() -> None:
    weight = made_of_levels(1040, 64)
    assert in_four_bits(weight.bfloat16()) is not None
    inside = weight[1039, 32:]
    inside[5] = (inside.min() + 7.4 / 15 * (inside.max() - inside.min())).item()
    assert in_four_bits(weight.bfloat16()) is None


@pytest.mark.parametrize(("rows", "columns"), [(24, 32), (16, 48), (16, 16)])
def test_shapes_that_the_product_cannot_take_are_left_alone(rows: int, columns: int) -> None:
    assert in_four_bits(torch.zeros(rows, columns).bfloat16()) is None


@pytest.mark.skipif(not can_pack(torch.empty(0, dtype=torch.bfloat16)), reason="this torch has no oneDNN")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, FEW_ROWS, FEW_ROWS + 1, 17])
@pytest.mark.parametrize("four_bits", [False, True])
def test_products_are_those_of_the_plain_weight(four_bits: bool, tokens: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = made_of_levels(64, 96) if four_bits else torch.randn(64, 96, generator=generator)
    x = torch.randn(tokens, 96, generator=generator).bfloat16()
    bias = torch.randn(64, generator=generator).bfloat16() if biased else None
    y = PackedWeight(weight.bfloat16()).linear(x, bias)
    right = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    scale = (x.double().abs() @ weight.double().abs().t()) * 2**-7 + right.abs() * 2**-7
    assert y.dtype == torch.bfloat16
    assert ((y.double() - right).abs() <= scale).all()
