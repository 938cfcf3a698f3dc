"""Records in plain numpy, written from the byte tables alone: the oracle of the package's codecs and kernels.

float32 throughout, with numpy's correctly rounded division. E2M1 by searching its table; ml_dtypes does the E4M3 and
bfloat16 casts. Formats are named as on the command line; rope_kind (bfloat16 or fp8) concerns nvfp4_ds_mla only.
"""

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SMALLEST_NORMAL = np.float32(2.0**-126)


def encode(
    name: str,
    latent: np.ndarray,
    rope: np.ndarray,
    rope_kind: str = "bfloat16",
    outer_scale: float | None = None,
) -> np.ndarray:
    """uint8 [rows, bytes]: the records of latents [rows, C] and roped keys [rows, R]."""
    latent, rope = np.asarray(latent, np.float32), np.asarray(rope, np.float32)
    if name in ("float32", "bfloat16"):
        return as_bytes(np.concatenate([latent, rope], axis=1).astype(name))
    if outer_scale is not None:
        latent = latent / np.float32(outer_scale)
    if name == "fp8_ds_mla":
        return np.concatenate([*fp8_latent(latent), as_bytes(rope.astype(BFLOAT16))], axis=1)
    codes, scales = nvfp4_latent(latent)
    gap = np.zeros((len(latent), 16), np.uint8)
    if rope_kind == "bfloat16":
        return np.concatenate([codes, scales, gap, as_bytes(rope.astype(BFLOAT16))], axis=1)
    scale = np.abs(rope).max(axis=1, keepdims=True) / np.float32(448)
    reciprocal = np.float32(1) / np.where(scale > 0, scale, np.float32(1))
    return np.concatenate([codes, scales, as_bytes(scale), gap[:, 4:], to_e4m3(rope * reciprocal)], axis=1)


def decode(
    name: str, raw: np.ndarray, latent_width: int, rope_width: int, rope_kind: str = "bfloat16"
) -> np.ndarray:
    """float32 [rows, C + R]: the values of records uint8 [rows, bytes], without the outer scale."""
    if name in ("float32", "bfloat16"):
        return raw.view(name).astype(np.float32)
    if name == "fp8_ds_mla":
        groups = -(-latent_width // 128)
        codes, scales, rope = parts(raw, latent_width, 4 * groups)
        latent = codes.view(E4M3).astype(np.float32) * spread(scales.view(np.float32), 128, latent_width)
        return np.concatenate([latent, rope.view(BFLOAT16).astype(np.float32)], axis=1)
    groups = -(-latent_width // 16)
    nibbles, scales, gap, rope = parts(raw, latent_width // 2, groups, 16)
    codes = np.empty((len(raw), latent_width), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = nibbles & 15, nibbles >> 4
    values = np.where(codes < 8, 1, -1) * E2M1[codes % 8]
    latent = values.astype(np.float32) * spread(scales.view(E4M3).astype(np.float32), 16, latent_width)
    if rope_kind == "bfloat16":
        return np.concatenate([latent, rope.view(BFLOAT16).astype(np.float32)], axis=1)
    scale = np.ascontiguousarray(gap[:, :4]).view(np.float32)
    return np.concatenate([latent, rope.view(E4M3).astype(np.float32) * scale], axis=1)


def encode_index_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 [rows, D] codes, float32 [rows] scales) of index keys [rows, D]."""
    keys = np.asarray(keys, np.float32)
    least = np.maximum(np.abs(keys).max(axis=1), np.float32(1e-4)) / np.float32(448)
    mantissa, exponent = np.frexp(least)
    scales = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    return to_e4m3(keys / scales[:, None]), scales


def fp8_latent(latent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, float32 scales) as bytes, a scale for each 128 values."""
    grouped = groups_of(latent, 128)
    scales = np.maximum(np.abs(grouped).max(axis=2) / np.float32(448), SMALLEST_NORMAL)
    codes = to_e4m3(grouped / scales[:, :, None])
    return codes.reshape(len(latent), -1)[:, : latent.shape[1]], as_bytes(scales)


def nvfp4_latent(latent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, two to a byte with the even element low, E4M3 scales) as bytes, a scale for each 16 values."""
    grouped = groups_of(latent, 16)
    scales = to_e4m3(np.abs(grouped).max(axis=2) / np.float32(6))
    decoded = scales.view(E4M3).astype(np.float32)[:, :, None]
    reciprocal = np.float32(1) / np.where(decoded > 0, decoded, np.float32(1))
    codes = np.where(decoded > 0, to_e2m1(grouped * reciprocal), 0).reshape(len(latent), -1)
    codes = codes[:, : latent.shape[1]].astype(np.uint8)
    return codes[:, 0::2] + 16 * codes[:, 1::2], scales


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """E4M3 codes, saturated at 448."""
    return np.clip(values, np.float32(-448), np.float32(448)).astype(E4M3).view(np.uint8)


def to_e2m1(values: np.ndarray) -> np.ndarray:
    """E2M1 codes: the nearest of the table's magnitudes, of two equally near the even code; the sign in bit 3."""
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - E2M1)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    # Of two neighbours one is even: prefer it, else take the only one.
    code = (nearest * np.array([2, 1] * 4)).argmax(axis=-1)
    return code + 8 * np.signbit(values)


def groups_of(values: np.ndarray, group: int) -> np.ndarray:
    """[rows, groups, group], the last group filled up with zeros."""
    filled = np.pad(values, [(0, 0), (0, -values.shape[1] % group)])
    return filled.reshape(len(values), -1, group)


def spread(scales: np.ndarray, group: int, width: int) -> np.ndarray:
    """Each group's scale at each of its values."""
    return np.repeat(scales, group, axis=1)[:, :width]


def as_bytes(values: np.ndarray) -> np.ndarray:
    """Little-endian bytes of the last axis."""
    return np.ascontiguousarray(values).view(np.uint8)


def parts(raw: np.ndarray, *lengths: int) -> list[np.ndarray]:
    """Records cut into fields of these lengths and the rest."""
    return [np.ascontiguousarray(part) for part in np.split(raw, np.cumsum(lengths), axis=1)]
