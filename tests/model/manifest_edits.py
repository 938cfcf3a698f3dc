"""Edits that a converted checkpoint's manifest cannot take."""

KV_A = "parts.layer_003.arrays.attention.kv_a"
NORM, FILE = ("parts", "outside", "arrays", "norm"), ("parts", "outside", "files", 0)
FORMAT = ("parts", "layer_003", "formats", "self_attn.kv_a_proj_with_mqa.weight")
EDITS = [
    (("version",), None, "1"),
    (("version",), True, "1"),
    (("made_by",), None, "text"),
    (("tensor_parallel_size",), 0, "a whole number of at least 1"),
    (("tensor_parallel_size",), "4", "a whole number of at least 1"),
    (("enable_expert_parallel",), 0, "true or false"),
    (("dtype",), "int8", "one of bfloat16, float16, float32"),
    (("mtp_layer",), 13.0, "a layer's number or null"),
    (("weights_id",), None, "text"),
    (("parts",), None, "an object"),
    (("parts", "outside"), [], "an object"),
    (("parts", "outside", "arrays"), None, "an object"),
    (("parts", "outside", "formats"), [1], "an object"),
    (("parts", "outside", "files"), None, "a list of at least one file"),
    (("parts", "outside", "files"), [], "a list of at least one file"),
    (NORM, 3, "an object"),
    ((*NORM, "weight"), None, "a list of whole numbers of at least 0"),
    ((*NORM, "shape"), [160.0], "a list of whole numbers of at least 0"),
    ((*NORM, "dtype"), None, "one of bfloat16, float16, float32, float8_e4m3fn, uint8"),
    ((*NORM, "grain"), [1], "a list of two whole numbers of at least 1"),
    ((*NORM, "grain"), [0, 1], "a list of two whole numbers of at least 1"),
    ((*FORMAT, "kind"), "plain", "one of fp8, nvfp4"),
    ((*FORMAT, "block"), None, "a list of two whole numbers of at least 1"),
    ((*FILE, "path"), "../config.json", "a path in weights/"),
    ((*FILE, "path"), "weights/../config.json", "a path in weights/"),
    ((*FILE, "nbytes"), None, "a whole number of at least 0"),
    ((*FILE, "sha256"), "abc", "64 hexadecimal digits"),
]
"""A field of a manifest, another value, and what it may be."""
