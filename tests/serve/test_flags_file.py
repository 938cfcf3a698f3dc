"""--config FILE: flags from YAML, over which the command line wins; what is wrong is named with its file and key."""

import os
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from glm_dcp_jax.config import ConfigError, SpeculativeConfig
from glm_dcp_jax.convert import command as convert
from glm_dcp_jax.plan import flags as plan
from glm_dcp_jax.serve import __main__ as entry
from glm_dcp_jax.serve import flags
from glm_dcp_jax.serve.pair import flags as pair

ALL_KINDS = """
# Keys are flags, with or without dashes and short forms.
model: some/model
tp: 4
--decode-context-parallel-size: 2
max_model_len: 4K
gpu-memory-utilization: 0.5
api-key: [one, two]
served-model-name: shown
async-scheduling: false
skip-tokenizer-init: true
enable-expert-parallel: false
enforce-eager: false
precompile-bs-paddings: [1, 4]
allowed-origins: ["https://a.example"]
speculative-config: {method: mtp, num_speculative_tokens: 3}
hf-overrides:
  rope_scaling: {type: none}
"""


@pytest.fixture
def file(tmp_path: Path):
    """Write a file of flags; its name."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "flags.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def parse(*argv: str) -> flags.Command:
    return flags.parse(argv, has_gpu=False)


def test_every_kind_of_flag_can_be_in_the_file(file):
    command = parse("--config", file(ALL_KINDS))
    config, settings = command.config, command.settings
    assert config.model == "some/model" and not command.demo
    assert (config.parallel.tensor_parallel_size, config.parallel.decode_context_parallel_size) == (4, 2)
    assert (config.scheduler.max_model_len, config.cache.gpu_memory_utilization) == (4096, 0.5)
    assert (config.scheduler.async_scheduling, config.skip_tokenizer_init) == (False, True)
    assert not config.parallel.enable_expert_parallel
    assert config.scheduler.precompile_bs_paddings == (1, 4)
    assert config.speculative == SpeculativeConfig(3, "mtp")
    assert config.hf_overrides == (("rope_scaling", {"type": "none"}),)
    assert (settings.api_keys, settings.served_model_names) == (("one", "two"), ("shown",))
    assert settings.allowed_origins == ("https://a.example",)


@pytest.mark.parametrize(
    "argv",
    [
        "other --max_model_len 99 --api-key mine --served-model-name me --async-scheduling "
        "-sc.num_speculative_tokens 2",
        "--model other --max-model-len=99 --api-key=mine --served-model-name=me --async_scheduling "
        "--speculative-config.num_speculative_tokens=2",
    ],
)
def test_the_command_line_wins_whole(file, argv):
    command = parse("--config=" + file(ALL_KINDS), *argv.split())
    assert command.config.model == "other" and command.config.scheduler.max_model_len == 99
    assert command.settings.api_keys == ("mine",) and command.settings.served_model_names == ("me",)
    assert command.config.scheduler.async_scheduling
    assert command.config.speculative == SpeculativeConfig(2)
    assert command.config.parallel.tensor_parallel_size == 4, "what it does not say is the file's"


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_sets_nothing(file, text):
    assert parse("m", "--config", file(text)) == parse("m")


def test_json_is_yaml(file):
    assert parse("m", "--config", file('{"port": 81, "hf-overrides": {"a": null}}')).settings.port == 81


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("blok-size: 4", r": blok-size: unknown flag --blok-size; did you mean --block-size\?"),
        ("enable_lora: true", ": enable_lora: --enable-lora is not supported: LoRA"),
        (
            "context-length: 4096",
            ": context-length: unknown flag --context-length; it is --max-model-len here",
        ),
        ("5: 4", ": 5: unknown flag --5"),
        ("port: eighty", ': port: must be a whole number, but is "eighty"'),
        ("port: 80.5", ': port: must be a whole number, but is "80.5"'),
        ("port: true", ": port: takes one value, but got true"),
        ("port: [1, 2]", r": port: takes one value, but got \['1', '2'\]"),
        ("port: {a: 1}", ": port: takes one value, but got"),
        ("port:", ": port: has no value; give one, or leave the key out"),
        ("port: 2020-01-01", ": port: must be a whole number, but is"),
        ("port: 1:30", ': port: must be a whole number, but is "1:30"'),
        ("port: 0o17", ": port: must be a whole number"),
        (
            "served-model-name: no",
            ": served-model-name: takes one value, but got false; in quotes it is text",
        ),
        ("model: [a]", ": model: takes one value"),
        ("max-model-len: long", ": max-model-len: must be a number such as 4096"),
        ("dtype: int4", ': dtype: must be one of auto, bfloat16, .*, but is "int4"'),
        ("async-scheduling: 1", ': async-scheduling: must be true or false, but is "1"'),
        ("skip-tokenizer-init: maybe", ': skip-tokenizer-init: must be true or false, but is "maybe"'),
        ("api-key: []", ": api-key: the list is empty"),
        ("api-key: [a, [b]]", r": api-key: takes one value, but got \["),
        ("allowed-origins: a", r": allowed-origins: must be a JSON list of strings"),
        ("allowed-origins: [[a]]", r": allowed-origins: must be a JSON list of strings"),
        ("speculative-config: [mtp]", ": speculative-config: takes one value"),
        ("config: other.yaml", ": config: is for the command line only"),
        ("version: true", ": version: is for the command line only"),
        ("help: true", ": help: is for the command line only"),
        ("port: 1\nport: 2", "is not valid YAML: the key 'port' is there twice .*line 2"),
        ("hf-overrides: {a: 1, a: 2}", "is not valid YAML: the key 'a' is there twice"),
        ("port: 1\n--port: 2", ": --port: port has set that already; keep one of them"),
        ("tp: 2\ntensor-parallel-size: 2", ": tensor-parallel-size: tp has set that already"),
        ("- port", "must hold flags, as `port: 8000`, one a line, but holds a list"),
        ("port 80", "must hold flags, as `port: 8000`, one a line, but holds a str"),
        ("port: [", "is not valid YAML"),
        ("allowed-origins: &a [*a]", r"is not valid YAML: \*a: write the value out.* line 1"),
        ("api-key: &a [x]\nserved-model-name: *a", r"\*a: write the value out.* line 2"),
        (f"dtype: {'x' * 5000}", 'dtype: must be one of auto, .*, but is "x{99}\\.\\.\\.$'),
        (
            f"port: [{'1, ' * 5000}]",
            r"port: takes one value, but got \['1', '1', '1', '1', '1', '1', \.\.\.\]$",
        ),
        ("hf-overrides: {a: 010}", "'010' is no number as JSON has them; write it so, or in quotes .*line 1"),
        ("hf-overrides: {a: 1:30}", "'1:30' is no number"),
        ("hf-overrides: {a: .inf}", "'.inf' is no number"),
        ("hf-overrides: {a: !!set {b}}", "is not valid YAML: could not determine a constructor"),
        ("hf-overrides: {1: a, '1': b}", ": hf-overrides: is not valid JSON: the key '1' is there twice"),
        ("hf-overrides: '{'", ": hf-overrides: is not valid JSON"),
        ("<<: {port: 1}", "is not valid YAML: <<: write the keys out"),
        (
            "hf-overrides.a: 1",
            ": hf-overrides.a: --hf-overrides takes an object here, with 'a' among its keys",
        ),
        ("pp: 2", ": pp: -pp is not supported"),
        ("no-enable-lora: false", ": no-enable-lora: --no-enable-lora is not supported"),
        (f"max-model-len: {'9' * 400}k", ": max-model-len: must be a number such as 4096"),
        ("#" * 2**20 + "#", "cannot be read: it has more than 1048576 bytes"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("[" * 10_000, "is nested too deeply"),
        (b"a: \xff", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(file, text, says, capsys):
    name = file(text)
    with pytest.raises(ConfigError, match=says) as raised:
        parse("m", "--config", name)
    assert name in str(raised.value)
    assert entry.main(["m", "--config", name]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["0123", "1.10", "1_000", "12:30:45", "0x1F", "1e3", "2024-01-01", "-0", ".inf"]
)
def test_values_are_what_is_written(file, text):
    settings = parse("m", "--config", file(f"api-key: {text}\nserved-model-name: [a, {text}]")).settings
    assert (settings.api_keys, settings.served_model_names) == ((text,), ("a", text))


def test_numbers_are_as_on_the_command_line_and_within_objects_json_s(file):
    command = parse("m", "--config", file("port: 010\nhf-overrides: {a: 1e-5, b: [1.10, -2], c: 2024-01-01}"))
    assert command.settings.port == 10
    assert command.config.hf_overrides == (("a", 1e-5), ("b", [1.1, -2]), ("c", "2024-01-01"))


@pytest.mark.parametrize("text", ["served-model-name: shown", "api-key: [shown]"])
def test_a_model_that_is_typed_is_none_of_a_list_s_values(file, text):
    command = parse("--config", file(text), "some/model")
    assert (command.config.model, command.demo) == ("some/model", False)
    assert "some/model" not in command.settings.api_keys
    assert command.settings.served_model_names == (("shown",) if "served" in text else ("some/model",))


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_may_be_there_by_its_other_name(file, value):
    said = f"no-async-scheduling: {value}\nno_enable_log_requests: {value}"
    command = parse("m", "--config", file(said))
    assert command.config.scheduler.async_scheduling is command.settings.enable_log_requests is not value
    command = parse("m", "--config", file(said), "--async-scheduling", "--no-enable-log-requests")
    assert (command.config.scheduler.async_scheduling, command.settings.enable_log_requests) == (True, False)


@pytest.mark.parametrize("text", ["pp: 1", "pipeline-parallel-size: '1'", "no-enable-lora: true", "dp: 1"])
def test_what_is_so_anyway_may_be_there(file, text):
    assert parse("m", "--config", file(text)) == parse("m")


def test_everything_that_is_wrong_is_said_at_once(file):
    name = file("prot: 1\nport: a\nmax-num-seqs: 8\nenable-lora: true\ndtype: int4")
    with pytest.raises(ConfigError) as raised:
        parse("m", "--config", name)
    assert [line.removeprefix(f"{name}: ").partition(":")[0] for line in str(raised.value).splitlines()] == [
        "prot",
        "port",
        "enable-lora",
        "dtype",
    ]


def test_a_value_that_the_command_line_overrides_must_be_right_all_the_same(file):
    with pytest.raises(ConfigError, match="port: must be a whole number"):
        parse("m", "--port", "80", "--config", file("port: eighty"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--config", "nowhere.yaml"], "--config nowhere.yaml does not exist"),
        (["--config", "."], "--config . cannot be read"),
        (["--config"], "--config needs the name of a YAML file"),
        (["--config="], "--config needs the name of a YAML file"),
        (["--config", "--port", "80"], "--config needs the name of a YAML file"),
        (["--config", "a", "--config=b"], "--config is given twice, a and b"),
    ],
)
def test_a_file_that_is_none(argv, says):
    with pytest.raises(ConfigError, match=says):
        parse("m", *argv)


def test_the_server_starts_with_what_the_file_says(file, monkeypatch):
    def serve(engine, settings, listener):
        listener.close()
        served.append(settings)

    served = []
    monkeypatch.setattr(entry, "_load", lambda command: FakeEngine())
    monkeypatch.setattr(entry.run, "serve", serve)
    assert entry.main(["--config", file("model: m\nport: 0\nlog-level: error\nmax-logprobs: 3")]) == 0
    assert served[0].max_logprobs == 3 and served[0].served_model_names == ("m",)


def test_plans_take_their_own_flags_and_the_engines(file):
    text = "model: glm-5.2-fp8\ngpus: 8xH200\nconcurrency: 4\nno-compile: true\ndcp: 8\nport: 80\n"
    options = plan.parse(["--config", file(text), "--concurrency", "2"])
    assert (options.requests, options.compile, str(options.target)) == (2, False, "8xH200")
    assert options.config.parallel.decode_context_parallel_size == 8
    with pytest.raises(ConfigError, match="flags.yaml: concurency: unknown flag"):
        plan.parse(["--config", file("concurency: 4")])


def test_conversions_take_theirs(file, capsys):
    assert convert.main(["a", "b", "--config", file("dtype: int4")]) == 2
    assert "flags.yaml: dtype: must be one of" in capsys.readouterr().err
    assert convert.main(["nowhere/a", "b", "--config", file("tp: 2\nno-mtp: true")]) == 1
    assert "nowhere/a" in capsys.readouterr().err


def test_the_file_that_the_page_shows_is_a_right_one(file):
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    [shown] = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    command = parse("--config", file(shown))
    assert command.config.scheduler.max_model_len == 128 * 1024
    assert command.settings.served_model_names == ("glm", "glm-5.2")


def test_both_servers_of_a_pair_read_it(file):
    command = pair.parse(["m", "--config", file("max-num-seqs: 3\nshutdown-timeout: 90")], has_gpu=True)
    assert command.shutdown_timeout == 90
    for role in pair.ROLES:
        assert parse(*command.servers[role]).config.scheduler.max_num_seqs == 3


@pytest.mark.parametrize("text", ["port: 9", "host: a", "kv-transfer-config: {kv_connector: tcp}"])
def test_what_a_pair_decides_is_no_part_of_a_file(file, text):
    with pytest.raises(
        ConfigError, match=f"{text.partition(':')[0]}: is the pair's own; give it on the command"
    ):
        pair.parse(["m", "--config", file(text)], has_gpu=True)


def test_a_pair_wants_a_file_that_can_be_read_again(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo is no regular file"):
        pair.parse(["m", "--config", str(tmp_path / "fifo")], has_gpu=True)


def test_a_pair_says_as_much_as_the_file_wants(file):
    name = file("log-level: debug")
    assert pair.parse(["m", "--config", name], has_gpu=True).log_level == "debug"
    quiet = pair.parse(["m", "--config", name, "--log-level", "error"], has_gpu=True)
    assert quiet.log_level == parse(*quiet.servers["decode"]).settings.log_level == "error"
    assert pair.parse(["m"], has_gpu=True).log_level == "info"
