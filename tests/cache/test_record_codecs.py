"""Record formats: their bytes, their rounding rules, and how far a decoded record may be from what was encoded."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.cache.capacity import page_bytes
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ConfigError, ModelConfig

sys.path.append(str(Path(__file__).parents[1] / "config"))

from published import GLM_5_2

QUANTISED = [("fp8_ds_mla", "bfloat16"), ("nvfp4_ds_mla", "bfloat16"), ("nvfp4_ds_mla", "fp8")]
ALL = [("float32", "bfloat16"), ("bfloat16", "bfloat16"), *QUANTISED]
SIZES = [(512, 64), (32, 8), (48, 6), (130, 2), (16, 1)]


def full_size(name: str, rope_kind: str = "bfloat16") -> RecordFormat:
    return RecordFormat.sized(name, 512, 64, 128, rope_kind)


def rows(seed: int, latent: int, rope: int, count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Latents and roped keys over many magnitudes."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.uniform(-12, 6, (count, 1))
    values = (rng.standard_normal((count, latent + rope)) * size).astype(np.float32)
    return values[:, :latent], values[:, latent:]


class TestBytes:
    def test_sizes_of_glm_5_2(self):
        found = [full_size(name, rope).record_bytes for name, rope in ALL]
        assert found == [2304, 1152, 656, 432, 368]
        assert [full_size(name, rope).index.key_bytes for name, rope in ALL] == [512, 256, 132, 132, 132]

    @settings(deadline=None)
    @given(st.integers(1, 300).map(lambda half: 2 * half), st.integers(1, 80))
    def test_small_sizes_follow_the_formulas(self, latent, rope):
        sized = lambda *kind: RecordFormat.sized(kind[0], latent, rope, 16, *kind[1:]).record_bytes  # noqa: E731
        assert sized("float32") == 4 * (latent + rope)
        assert sized("bfloat16") == 2 * (latent + rope)
        assert sized("fp8_ds_mla") == latent + 4 * -(-latent // 128) + 2 * rope
        assert sized("nvfp4_ds_mla") == latent // 2 + -(-latent // 16) + 16 + 2 * rope
        assert sized("nvfp4_ds_mla", "fp8") == latent // 2 + -(-latent // 16) + 16 + rope

    def test_where_each_field_lies(self):
        placed = lambda *kind: {f.name: (f.offset, f.nbytes) for f in full_size(*kind).fields}  # noqa: E731
        assert placed("bfloat16") == {"latent": (0, 1024), "rope": (1024, 128)}
        assert placed("fp8_ds_mla") == {"latent": (0, 512), "latent_scales": (512, 16), "rope": (528, 128)}
        front = {"latent": (0, 256), "latent_scales": (256, 32)}
        assert placed("nvfp4_ds_mla") == front | {"gap": (288, 16), "rope": (304, 128)}
        assert placed("nvfp4_ds_mla", "fp8") == front | {
            "rope_scale": (288, 4),
            "gap": (292, 12),
            "rope": (304, 64),
        }

    def test_a_record_is_as_long_as_the_format_says(self):
        for latent, rope in SIZES:
            for kind in ALL:
                record = RecordFormat.sized(kind[0], latent, rope, 16, kind[1])
                encoded = jax.eval_shape(record.encode, *rows(0, latent, rope))
                assert encoded.shape == (50, record.width) and encoded.dtype == record.dtype
                assert record.width * encoded.dtype.itemsize == record.record_bytes

    @pytest.mark.parametrize("kind", ALL)
    def test_no_records_are_encoded_and_decoded_as_none(self, kind):
        record = full_size(*kind)
        encoded = record.encode(jnp.zeros((2, 0, 512)), jnp.zeros((2, 0, 64)))
        assert encoded.shape == (2, 0, record.width)
        assert record.decode(encoded, jnp.float32).shape == (2, 0, 576)

    def test_an_odd_latent_has_no_nvfp4_record(self):
        with pytest.raises(ConfigError, match="kv_lora_rank 33 is odd.* use fp8_ds_mla"):
            RecordFormat.sized("nvfp4_ds_mla", 33, 8, 16)

    def test_other_names_are_no_formats(self):
        allowed = "float32, bfloat16, float16, fp8_ds_mla, nvfp4_ds_mla"
        with pytest.raises(ConfigError, match=f"there is no record format 'float8'; use one of {allowed}"):
            RecordFormat.sized("float8", 512, 64, 128)

    @pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8_ds_mla"])
    def test_only_nvfp4_records_have_an_fp8_roped_key(self, name):
        with pytest.raises(ConfigError, match=f"fp8 is for nvfp4_ds_mla records, but these are {name}"):
            RecordFormat.sized(name, 512, 64, 128, "fp8")

    @pytest.mark.parametrize("name", ["float32", "fp8_ds_mla", "nvfp4_ds_mla"])
    @pytest.mark.parametrize("kind", ["float32", "e4m3", ""])
    def test_other_words_are_no_kinds_of_roped_keys(self, name, kind):
        with pytest.raises(ConfigError, match=f"cannot be kept as '{kind}'; use bfloat16 or fp8"):
            RecordFormat.sized(name, 512, 64, 128, kind)

    @pytest.mark.parametrize("kind", ALL)
    @pytest.mark.parametrize("size", [0, -2])
    def test_records_have_latents_roped_keys_and_index_keys(self, kind, size):
        for width, sizes in (
            ("latent", (size, 64, 128)),
            ("rope", (512, size, 128)),
            ("index_width", (512, 64, size)),
        ):
            with pytest.raises(ConfigError, match=f"cannot have {width} {size}; widths are at least 1"):
                RecordFormat.sized(kind[0], *sizes, kind[1])

    @pytest.mark.parametrize("kind", QUANTISED)
    def test_gaps_are_zero(self, kind):
        record = full_size(*kind)
        encoded = np.asarray(record.encode(*rows(1, 512, 64)))
        for field in record.fields:
            part = encoded[:, field.offset : field.offset + field.nbytes]
            assert part.any() == (field.kind != "zero")


class TestRounding:
    @pytest.mark.parametrize(
        ("value", "rounded"),
        [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (6, 6), (7, 6), (1e30, 6)],
    )
    def test_midpoints_of_e2m1_go_to_the_even_code_and_large_values_to_6(self, value, rounded):
        both = codecs.decode_e2m1(codecs.encode_e2m1(jnp.array([value, -value], jnp.float32)))
        assert both.tolist() == [rounded, -rounded]

    def test_e2m1_rounds_to_the_nearest_value(self):
        values = np.random.default_rng(2).uniform(-7, 7, 2000).astype(np.float32)
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        nearest = np.sign(values) * grid[np.abs(np.abs(values)[:, None] - grid).argmin(axis=1)]
        np.testing.assert_array_equal(codecs.decode_e2m1(codecs.encode_e2m1(values)), nearest)

    def test_e2m1_codes_are_sign_exponent_mantissa(self):
        values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        assert codecs.encode_e2m1(jnp.array(values)).tolist() == list(range(8))
        assert codecs.encode_e2m1(-jnp.array(values)).tolist() == list(range(8, 16))

    def test_the_even_element_is_in_the_low_nibble(self):
        assert codecs.pack_nibbles(jnp.array([1, 2, 15, 0], jnp.uint8)).tolist() == [0x21, 0x0F]
        assert codecs.unpack_nibbles(jnp.array([0x21, 0x0F], jnp.uint8)).tolist() == [1, 2, 15, 0]

    def test_e4m3_saturates_where_a_cast_gives_nan(self):
        values = jnp.array([448.0, 460.0, 1e9, -1e9], jnp.float32)
        assert not np.isfinite(values.astype(jnp.float8_e4m3fn)[2])
        assert codecs.decode_e4m3(codecs.encode_e4m3(values)).tolist() == [448, 448, 448, -448]

    def test_e4m3_agrees_with_ml_dtypes_on_all_codes_and_on_midpoints(self):
        codes = np.arange(256, dtype=np.uint8)
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        finite = np.isfinite(values)
        np.testing.assert_array_equal(np.asarray(codecs.decode_e4m3(codes))[finite], values[finite])
        ordered = np.unique(values[finite])
        middle = (ordered[1:] + ordered[:-1]) / 2
        expected = middle.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(codecs.encode_e4m3(middle), expected)

    def test_nvfp4_uses_the_reciprocal_of_the_decoded_scale(self):
        """amax 6.1 gives amax / 6 = 1.0167, which E4M3 makes 1.0: values are not divided by 1.0167."""
        latent = np.zeros((1, 512), np.float32)
        latent[0, :3] = 6.1, 1.26, 0.26
        record = full_size("nvfp4_ds_mla")
        encoded = np.asarray(record.encode(latent, np.zeros((1, 64), np.float32)))
        assert codecs.decode_e4m3(encoded[0, 256:257]).tolist() == [1.0]
        assert record.decode(encoded, jnp.float32)[0, :3].tolist() == [6.0, 1.5, 0.5]

    def test_a_group_whose_scale_decodes_to_zero_is_all_zero(self):
        latent = np.full((1, 512), 2.0**-12, np.float32)  # amax / 6 is below half of E4M3's smallest
        latent[0, 16:] = 1.0
        encoded = np.asarray(full_size("nvfp4_ds_mla").encode(-latent, np.zeros((1, 64), np.float32)))
        assert not encoded[0, :8].any() and encoded[0, 8:256].all()

    def test_fp8_scales_are_never_zero(self):
        encoded = full_size("fp8_ds_mla").encode(
            np.zeros((1, 512), np.float32), np.zeros((1, 64), np.float32)
        )
        assert codecs.from_bytes(encoded[0, 512:528], jnp.float32).tolist() == [2.0**-126] * 4

    @settings(deadline=None)
    @given(st.floats(2.0**-100, 2.0**100, width=32))
    def test_index_scales_are_rounded_up_to_a_power_of_two(self, value):
        power = float(codecs.power_of_two_at_least(jnp.float32(value)))
        assert np.log2(power) == int(np.log2(power))
        assert power / 2 < value <= power

    def test_an_index_key_of_zeros_has_the_least_scale(self):
        codes, scale = codecs.encode_index_key(np.zeros((2, 128), np.float32))
        assert not np.asarray(codes).any()
        assert scale.tolist() == [[2.0**-22]] * 2  # 1e-4 / 448 = 2.2e-7, rounded up


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("latent_width", "rope_width"), SIZES)
class TestRoundTrip:
    def test_decoded_values_are_within_half_a_step_of_the_group(self, kind, latent_width, rope_width):
        """Half a step is 2^-8 of a bfloat16 value, 2^-4 of an E4M3 one, and in E2M1 at most 1 of the 6 of the amax."""
        record = RecordFormat.sized(kind[0], latent_width, rope_width, 16, kind[1])
        latent, rope = rows(3, latent_width, rope_width)
        decoded = np.asarray(record.decode(record.encode(latent, rope), jnp.float32))
        latent_error = np.abs(decoded[:, :latent_width] - latent)
        rope_error = np.abs(decoded[:, latent_width:] - rope)
        plain = {"float32": 0.0, "bfloat16": 2.0**-8}
        if kind[0] in plain:
            assert (latent_error <= plain[kind[0]] * np.abs(latent)).all()
            assert (rope_error <= plain[kind[0]] * np.abs(rope)).all()
            return
        group = 128 if kind[0] == "fp8_ds_mla" else 16
        amax = np.stack(
            [np.abs(latent[:, start : start + group]).max(axis=1) for start in range(0, latent_width, group)],
            axis=1,
        ).repeat(group, axis=1)[:, :latent_width]
        if kind[0] == "fp8_ds_mla":
            assert (latent_error <= np.maximum(2.0**-4 * np.abs(latent), 2.0**-10 * amax / 448)).all()
        else:
            # 1/6 for the widest step, and 1/16 for a scale that E4M3 rounds; below E4M3's normals scales are coarse.
            scale_step = np.maximum(amax / 6 / 16, 2.0**-10) * 6
            assert (latent_error <= amax / 6 + scale_step).all()
        rope_step = 2.0**-4 if kind[1] == "fp8" else 2.0**-8
        floor = 2.0**-10 * np.abs(rope).max(axis=1, keepdims=True) / 448 if kind[1] == "fp8" else 0
        assert (rope_error <= np.maximum(rope_step * np.abs(rope), floor) * (1 + 1e-6)).all()

    def test_a_decoded_record_encodes_to_the_same_values(self, kind, latent_width, rope_width):
        record = RecordFormat.sized(kind[0], latent_width, rope_width, 16, kind[1])
        once = record.decode(record.encode(*rows(4, latent_width, rope_width)), jnp.float32)
        again = record.decode(record.encode(once[:, :latent_width], once[:, latent_width:]), jnp.float32)
        if kind[0] != "nvfp4_ds_mla":
            np.testing.assert_allclose(again, once, rtol=1e-6)
        else:  # a group whose amax did not reach code 6 gets a smaller scale the second time
            np.testing.assert_allclose(again, once, rtol=0.5, atol=np.abs(once).max() / 6)


class TestOuterScale:
    def test_latents_below_e4m3s_range_are_lost_without_it_and_kept_with_it(self):
        latent, rope = rows(5, 512, 64)
        latent = latent / np.abs(latent).max() * 2.0**-10
        record = full_size("nvfp4_ds_mla")
        scale = jnp.float32(np.abs(latent).max() / 2688)
        plain = record.decode(record.encode(latent, rope), jnp.float32)
        scaled = record.decode(record.encode(latent, rope, scale), jnp.float32, scale)
        error = lambda found: np.abs(np.asarray(found)[:, :512] - latent).mean() / np.abs(latent).mean()  # noqa: E731
        assert error(scaled) < 0.12 < 0.5 < error(plain)

    def test_the_roped_key_is_not_scaled(self):
        latent, rope = rows(6, 512, 64)
        record = full_size("nvfp4_ds_mla")
        scaled = record.decode(record.encode(latent, rope, jnp.float32(0.01)), jnp.float32, jnp.float32(0.01))
        np.testing.assert_array_equal(scaled[:, 512:], rope.astype(ml_dtypes.bfloat16).astype(np.float32))


class TestDocument:
    """docs/cache-formats.md against the formats it describes."""

    TEXT = (Path(__file__).parents[2] / "docs" / "cache-formats.md").read_text()
    MODEL = ModelConfig.from_hf(GLM_5_2)
    LAYOUTS = [Layout(64, world) for world in (1, 4, 8)]
    KINDS = {"float32": "float32", "bfloat16": "bfloat16", "e4m3": "E4M3", "e2m1": "E2M1"}

    def test_the_table_of_sizes(self):
        """Bytes of a record and an index key, and of a token on each GPU at DCP 1, 4 and 8."""
        for name, rope in ALL:
            record = full_size(name, rope)
            label = f"`{name}`" + (", `--nvfp4-rope-dtype fp8`" if rope == "fp8" else "")
            pages = [page_bytes(self.MODEL, layout, record) / layout.virtual_block for layout in self.LAYOUTS]
            tokens = " | ".join(f"{each:,.0f}" for each in pages)
            assert f"| {label} | {record.record_bytes} | {record.index.key_bytes} | {tokens} |" in self.TEXT

    @pytest.mark.parametrize(
        ("kind", "title"),
        [
            (("bfloat16", "bfloat16"), "bfloat16, 1152 bytes"),
            (("fp8_ds_mla", "bfloat16"), "fp8_ds_mla, 656 bytes"),
            (("nvfp4_ds_mla", "bfloat16"), "nvfp4_ds_mla, 432 bytes"),
            (("nvfp4_ds_mla", "fp8"), "nvfp4_ds_mla with an FP8 roped key, 368 bytes"),
        ],
    )
    def test_every_field_of_a_record(self, kind, title):
        section = self.TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
        lines = re.findall(r"^\| (\d+)\.\.(\d+) \| (.*) \|$", section, re.MULTILINE)
        fields = full_size(*kind).fields
        assert len(lines) == len(fields)
        for (begin, end, text), field in zip(lines, fields, strict=True):
            assert (int(begin), int(end)) == (field.offset, field.offset + field.nbytes - 1)
            wanted = "zero" if field.kind == "zero" else f"{field.count} {self.KINDS[field.kind]}"
            assert text.startswith(wanted)
