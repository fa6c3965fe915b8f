"""`IntegerTiles`: quantized weights in the layout of integer.c, as NumPy arrays.

The stored form of a matrix becomes tiles here, and tiles become the stored form again, for arrays
of a file and for a torch model alike (`int_matmul`, whose tensors pass through as views). What the
numbers mean is written there. Imports no torch.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glassformer.kernels.large_pages import empty
from glassformer.spec.errors import InputError
from glassformer.spec.lacking import ANY, Runs, lacks
from glassformer.spec.schemes import Int4, Int8, Scheme

# I inputs, O outputs, G groups, N looked-up rows, T tiles, L = 16 outputs of a tile, W words of a
# row: four bytes, which are four inputs of 8 bits or eight of 4

Array = NDArray[Any]

#: What the C file has routines for; levels of 8 bits without a zero point.
RUNS: Runs = {
    Int8: {"group": ANY, "symmetric": (True,)},
    Int4: {"group": ANY, "symmetric": ANY, "fine": ANY},
}

TILE = 16
MOST_INPUTS = 1 << 17  # 128 * 127 * this still fits into 32 bits
MOST_GROUP = 1 << 13  # 15 * 127 * this is still exact in float32
#: `enum kind` of integer.c.
KINDS = tuple(map(np.dtype, (np.float32, np.float16, np.uint8)))
SIXTEENTHS = 16  # what a zero counts where scales have an outer factor: the kind after the last
MIDDLE = 8.0  # the level of 4 bits that means 0 where no zero is stored
WORD = np.dtype("<u4")


class _Form(ctypes.Structure):
    """`struct integer` of integer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "zero", "outer")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "groups", "group")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_kind", "zero_kind", "refined")),
    )


class IntegerTiles:
    """A matrix (O, I) of 8 or 4 bits, in tiles of 16 outputs.

    `per_channel`: scales were given as (O,). `refined`: what rounding leaves of the activations is
    rounded in its turn.
    """

    def __init__(
        self,
        words_OW: Array,
        scale_OG: Array,
        zero_OG: Array | None = None,
        outer_O: Array | None = None,
        *,
        shape: tuple[int, int],
        bits: int,
        refined: bool,
        per_channel: bool = False,
    ) -> None:
        self.shape, self.bits, self.refined, self.per_channel = shape, bits, refined, per_channel
        self.words_TWL = _in_tiles(words_OW)
        _arrange(self.words_TWL, bits)
        self.scale_TGL = _in_tiles(scale_OG)
        self.zero_TGL = None if zero_OG is None else _in_tiles(zero_OG)
        self.outer_TL = None if outer_O is None else _in_tiles(outer_O[:, None])[:, 0]
        groups = self.scale_TGL.shape[1]
        self._form = _Form(
            self.words_TWL.ctypes.data,
            self.scale_TGL.ctypes.data,
            None if self.zero_TGL is None else self.zero_TGL.ctypes.data,
            None if self.outer_TL is None else self.outer_TL.ctypes.data,
            *shape,
            groups,
            shape[1] // groups,
            bits,
            KINDS.index(scale_OG.dtype),
            0 if zero_OG is None else KINDS.index(zero_OG.dtype) + (outer_O is not None),
            refined,
        )

    @property
    def address(self) -> int:
        """The address of the `struct integer`, valid as long as this object."""
        return ctypes.addressof(self._form)

    @property
    def nbytes(self) -> int:
        """The number of resident bytes: weights, scales and zero points."""
        parts = (self.words_TWL, self.scale_TGL, self.zero_TGL, self.outer_TL)
        return sum(part.nbytes for part in parts if part is not None)

    def unpack(self) -> dict[str, Array]:
        """Return the tensors by name, as they were given; 4-bit levels are two to a byte."""
        outputs, inputs = self.shape
        words_OW = _restored(_from_tiles(self.words_TWL, outputs), self.bits)
        scale_OG = _from_tiles(self.scale_TGL, outputs)
        if self.bits == 8:
            qweight = np.ascontiguousarray(words_OW.view(np.int8)[:, :inputs])
            return {"qweight": qweight, "scale": scale_OG[:, 0] if self.per_channel else scale_OG}
        parts = {"qweight": words_OW.view(np.uint8), "scale": scale_OG}
        if self.zero_TGL is not None:
            parts["zero"] = _from_tiles(self.zero_TGL, outputs)
        if self.outer_TL is not None:
            parts["outer"] = self.outer_TL.reshape(-1)[:outputs].copy()
        return parts

    def rows(self, index_N: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return some rows of the matrix as float32, (N, I)."""
        tile_N, lane_N = index_N // TILE, index_N % TILE
        words_NW = _restored(self.words_TWL[tile_N, :, lane_N], self.bits)
        if self.bits == 8:
            level_NI = words_NW.view(np.int8)[:, : self.shape[1]]
        else:
            level_NI = nibbles(words_NW.view(np.uint8))
        scale_NG1 = self.scale_TGL[tile_N, :, lane_N].astype(np.float32)[..., None]
        levels = level_NI.astype(np.float32).reshape(len(index_N), scale_NG1.shape[1], -1)
        if self.zero_TGL is not None:
            zero_NG1 = self.zero_TGL[tile_N, :, lane_N].astype(np.float32)[..., None]
            levels -= zero_NG1 if self.outer_TL is None else zero_NG1 / np.float32(SIXTEENTHS)
        elif self.bits == 4:
            levels -= np.float32(MIDDLE)
        levels *= scale_NG1
        rows_NI = levels.reshape(len(index_N), self.shape[1])
        if self.outer_TL is not None:
            rows_NI *= self.outer_TL[tile_N, lane_N][:, None]
        return rows_NI


def tiles_of(scheme: Scheme, parts: Mapping[str, Array], *, refined: bool) -> IntegerTiles:
    """Return the tiles of a matrix in its stored form, which has these tensors by leaf name."""
    for lack in lacks(scheme, RUNS):
        raise TypeError(f"integer.c has no {lack}")
    if scheme.bits == 8:
        return int8_tiles(parts["qweight"], parts["scale"], refined=refined)
    exponent_O, outer_O = parts.get("exponent"), None
    if exponent_O is not None:
        outer_O = np.ldexp(np.float32(1.0), exponent_O.astype(np.int32))
    scale_OG = parts["scale"]
    return int4_tiles(
        parts["qweight"],
        scale_OG,
        parts.get("zero"),
        group=parts["qweight"].shape[1] * 2 // scale_OG.shape[1],
        outer_O=outer_O,
        refined=refined,
    )


def stored_parts(tiles: IntegerTiles) -> dict[str, Array]:
    """Return the stored form that `tiles_of` was given."""
    parts = tiles.unpack()
    outer_O = parts.pop("outer", None)
    if outer_O is not None:  # powers of two: 0.5 * 2 ** exponent
        parts["exponent"] = (np.frexp(outer_O)[1] - 1).astype(np.int8)
    return parts


def int8_tiles(qweight_OI: Array, scale: Array, *, refined: bool = False) -> IntegerTiles:
    """Return the tiles of q * scale; q (O, I) int8, scale (O,), or (O, G) for groups.

    A group is a multiple of 8 inputs; without groups any number of inputs will do.
    """
    outputs, inputs = _matrix_shape(qweight_OI, np.dtype(np.int8))
    per_channel = scale.ndim == 1
    groups = 1 if per_channel else scale.shape[-1]
    _check_numbers("scale", scale, (outputs,) if per_channel else (outputs, groups))
    if not 0 < inputs <= MOST_INPUTS:
        raise InputError(f"{inputs} inputs", hint=f"1 to {MOST_INPUTS}: sums have 32 bits")
    if not per_channel and inputs % (8 * groups):
        raise InputError(f"{groups} groups of {inputs} inputs", hint="a multiple of 8 inputs each")
    padded_OI = np.ascontiguousarray(qweight_OI)
    if inputs % 8:
        padded_OI = np.zeros((outputs, -(-inputs // 8) * 8), dtype=np.int8)
        padded_OI[:, :inputs] = qweight_OI
    return IntegerTiles(
        padded_OI.view(WORD),
        scale.reshape(outputs, groups),
        shape=(outputs, inputs),
        bits=8,
        refined=refined,
        per_channel=per_channel,
    )


def int4_tiles(
    qweight: Array,
    scale_OG: Array,
    zero_OG: Array | None = None,
    *,
    group: int,
    outer_O: Array | None = None,
    refined: bool = False,
) -> IntegerTiles:
    """Return the tiles of (q - zero) * scale for groups of `group` inputs, a multiple of 8.

    q is uint8, (O, I) with one value 0..15 per byte, or (O, I / 2) with two, the low nibble first;
    scale (O, G) is float16 or float32, zero (O, G) also uint8; no zero means 8 everywhere. With
    outer (O,) of float32, W = (q - zero / 16) * scale * outer, where scale and zero are uint8.
    """
    outputs, width = _matrix_shape(qweight, np.dtype(np.uint8))
    if not (0 < group <= MOST_GROUP and group % 8 == 0):
        raise InputError(f"groups of {group}", hint=f"a multiple of 8 up to {MOST_GROUP}")
    shape = (outputs, scale_OG.shape[-1] * group)
    if width not in (shape[1], shape[1] // 2):
        raise InputError(
            f"qweight has {width} bytes a row, scale {tuple(scale_OG.shape)} groups of {group}",
            hint=f"{shape[1]} unpacked, {shape[1] // 2} packed",
        )
    grid, byte = (outputs, shape[1] // group), KINDS[-1:]
    if outer_O is not None:
        _check_numbers("outer", outer_O, (outputs,), kinds=KINDS[:1])
    _check_numbers("scale", scale_OG, grid, kinds=KINDS[:2] if outer_O is None else byte)
    if zero_OG is not None:
        _check_numbers("zero", zero_OG, grid, kinds=KINDS if outer_O is None else byte)
    pairs = qweight
    if width == shape[1]:
        if qweight.size and int(qweight.max()) > 15:
            raise InputError(f"a 4-bit value of {int(qweight.max())}", hint="0 to 15")
        pairs = qweight[:, ::2] | qweight[:, 1::2] << np.uint8(4)
    return IntegerTiles(
        np.ascontiguousarray(pairs).view(WORD),
        scale_OG,
        zero_OG,
        outer_O,
        shape=shape,
        bits=4,
        refined=refined,
    )


# --- layouts --------------------------------------------------------------------------------------


def _in_tiles(numbers_OG: Array) -> Array:
    """Return (T, G, L); outputs that fill the last tile are zeros."""
    outputs, groups = numbers_OG.shape
    complete, rest = divmod(outputs, TILE)
    count = (complete + bool(rest)) * groups * TILE
    words = empty((-(-count * numbers_OG.dtype.itemsize // 4),))  # at a line of the cache
    made_TGL = words.view(numbers_OG.dtype)[:count].reshape(-1, groups, TILE)
    tiles_TLG = numbers_OG[: complete * TILE].reshape(complete, TILE, groups)
    made_TGL[:complete] = tiles_TLG.transpose(0, 2, 1)
    if rest:
        made_TGL[complete] = 0
        made_TGL[complete, :, :rest] = numbers_OG[complete * TILE :].T
    return made_TGL


def _from_tiles(numbers_TGL: Array, outputs: int) -> Array:
    """Return a copy (O, G)."""
    groups = numbers_TGL.shape[1]
    return numbers_TGL.transpose(0, 2, 1).reshape(-1, groups)[:outputs].copy()


# A level of 8 bits is q + 128 there. Of 4 bits a byte has two neighbours where it is stored: the
# nibbles of a word are inputs 0 1 2 3 4 5 6 7, and 0 4 1 5 2 6 3 7 there, so that four bytes have
# inputs 0 to 3 in their low halves and 4 to 7 in the high ones. Two exchanges of neighbours do it:
# bytes 1 and 2 give 0 1 4 5 2 3 6 7, then nibbles 1 and 2 of each half.

LIFT = WORD.type(0x80808080)
BYTES, NIBBLES = (8, 0x0000FF00), (4, 0x00F000F0)  # the distance, and the lower of the two


def _arrange(words: Array, bits: int) -> None:
    """Make stored words, in place, those of the C file."""
    if bits == 8:
        words ^= LIFT
        return
    for exchange in (BYTES, NIBBLES):
        _exchange(words, *exchange)


def _restored(words: Array, bits: int) -> Array:
    """Return words of the C file, which are overwritten, as they are stored."""
    if bits == 8:
        words ^= LIFT
        return words
    for exchange in (NIBBLES, BYTES):
        _exchange(words, *exchange)
    return words


def _exchange(words: Array, distance: int, lower: int) -> None:
    """Exchange, in place, the bits that `lower` marks with those that far above them."""
    by = WORD.type(distance)
    differ = words >> by
    differ ^= words
    differ &= WORD.type(lower)
    words ^= differ
    differ <<= by
    words ^= differ


def nibbles(pairs: Array) -> Array:
    """Return two values per byte, the low nibble first, as one value per byte."""
    return np.stack((pairs & np.uint8(15), pairs >> np.uint8(4)), -1).reshape(len(pairs), -1)


# --- checks ---------------------------------------------------------------------------------------


def _matrix_shape(qweight: Array, dtype: np.dtype) -> tuple[int, int]:
    if qweight.ndim != 2 or qweight.dtype != dtype:
        raise InputError(
            f"qweight is {tuple(qweight.shape)}, {qweight.dtype}", hint=f"a matrix of {dtype}"
        )
    return qweight.shape[0], qweight.shape[1]


def _check_numbers(
    name: str,
    numbers: Array,
    shape: tuple[int, ...],
    *,
    kinds: tuple[np.dtype, ...] = KINDS[:2],
) -> None:
    if numbers.shape != shape or numbers.dtype not in kinds:
        raise InputError(
            f"{name} is {tuple(numbers.shape)}, {numbers.dtype}",
            hint=f"{shape} of {' or '.join(map(str, kinds))}",
        )
